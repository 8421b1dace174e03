"""Compares the module that CMake built with NumPy, gradients by finite differences.

python check.py <build folder>
"""

import importlib
import sys

import numpy as np


def softmax_attention(q, k, v):
    """Full attention of [B, T, N, H] arrays, heads alike, in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = np.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    lse = np.log(np.sum(np.exp(s), -1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", np.exp(s - lse), v)


def main() -> int:
    sys.path.insert(0, sys.argv[1])
    attention = importlib.import_module("embedded_attention")
    rng = np.random.default_rng(0)
    # Every second row of a longer array: a view that is not contiguous.
    q, k, v, d_out = rng.standard_normal((4, 2, 140, 3, 24), np.float32)[:, :, ::2]

    out, lse = attention.forward(q, k, v, is_causal=False)
    error = np.max(np.abs(out - softmax_attention(q, k, v)))
    print(f"forward  {error:.1e}")

    gradients = attention.backward(q, k, v, out, lse, d_out, is_causal=False)
    slope_error = 0.0
    for index, gradient in enumerate(gradients):
        inputs = [x.astype(np.float64) for x in (q, k, v)]
        direction = rng.standard_normal(inputs[index].shape)
        values = []
        for step in (1e-5, -1e-5):
            moved = [*inputs]
            moved[index] = inputs[index] + step * direction
            values.append(np.sum(softmax_attention(*moved) * d_out))
        want = (values[0] - values[1]) / 2e-5
        got = np.sum(gradient * direction)
        slope_error = max(slope_error, abs(got - want) / np.linalg.norm(gradient))
    print(f"backward {slope_error:.1e}")

    try:
        attention.forward(q, k[:, :, :2], v[:, :, :2], is_causal=False)
    except ValueError as refusal:
        print("refused:", refusal)
    else:
        return 1
    return 0 if error < 1e-5 and slope_error < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
