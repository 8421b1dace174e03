"""Peak memory of a process that runs attention and its gradient on the CPU.

    python benchmarks/peak_memory.py
    python benchmarks/peak_memory.py 16384

The argument is the number of tokens: one head of head dim 64, float32, causal.
"""

import os
import resource
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from jaxflash import dot_product_attention


def peak_mb():
    """Peak resident memory of the process, in 10^6 bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


@jax.jit
def attention_and_gradients(query, key, value, d_out):
    def attend(query, key, value):
        return dot_product_attention(
            query, key, value, is_causal=True, implementation="cpu"
        )

    out, pullback = jax.vjp(attend, query, key, value)
    return out, pullback(d_out)


def main():
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 65_536
    rng = np.random.default_rng(0)
    arrays = [
        jax.device_put(rng.standard_normal((1, length, 1, 64), np.float32))
        for _ in range(4)
    ]
    jax.block_until_ready(arrays)
    before = peak_mb()
    began = time.perf_counter()
    jax.block_until_ready(attention_and_gradients(*arrays))
    print(
        f"{length:,} tokens: {peak_mb():.0f} MB at the peak, {before:.0f} MB of it "
        f"before the call; {time.perf_counter() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
