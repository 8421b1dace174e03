"""Calls of many blocks, whose keys and rows the CPU's backward pass cuts in chunks."""

import numpy as np
import pytest
from calls import make_call, serving
from checks import check

T, S, N = 300, 600, 4
RNG = np.random.default_rng(7)
TERMS = {
    "causal": {"is_causal": True, "query_offset": np.array(200, np.int32)},
    "window": {"local_window_size": (90, 250)},
    "mask": {"mask": RNG.random((1, 1, T, S)) < 0.3},
    "bias": {"bias": RNG.standard_normal((2, 1, T, S)).astype(np.float32)},
    "segments": {
        "query_segment_ids": np.sort(RNG.integers(0, 5, (2, T))).astype(np.int32),
        "key_value_segment_ids": np.sort(RNG.integers(0, 5, (2, S))).astype(np.int32),
    },
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": np.array([0.5, -1.0, 3.0, -np.inf], np.float32)},
    "alibi": {"alibi_slopes": np.array([0.5, 0.1, 0.02, 0.0], np.float32)},
    "dropout": {"dropout_rate": 0.25, "dropout_key": np.array([5, 6], np.uint32)},
}
EVERYTHING = {name: x for terms in TERMS.values() for name, x in terms.items()}


def serve_all():
    names = ("bias", "mask", "query_segment_ids", "sinks", "alibi_slopes", "softcap")
    return sorted(set.intersection(*(set(serving(name)) for name in names)))


@pytest.mark.implementations(*serve_all())
@pytest.mark.parametrize("terms", [*TERMS, "everything"])
def test_chunks(implementation, working_dtype, terms):
    call = make_call(T, S, N=N, K=1, Hv=24, dtype=working_dtype)
    call |= TERMS.get(terms, EVERYTHING) | {"scale": np.array(-0.3, np.float32)}
    check(call, implementation)
