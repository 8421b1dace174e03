"""The same call gives the same bits."""

import numpy as np
import pytest
from calls import cotangents, make_call, run, run_gradients
from compare import assert_equal

# On a GPU nothing but the kernels takes care of the order.
REPEATS = {"cuda": 250}
FEWER_REPEATS = 10
CASES = {
    "tail_block": {"T": 192, "N": 8, "H": 16},
    "odd_lengths": {"T": 131, "S": 259, "N": 3, "H": 40},
    "grouped": {"T": 128, "N": 8, "K": 2, "H": 64, "is_causal": True},
    "one_row": {"T": 1, "S": 1000, "N": 2, "H": 64},
}


@pytest.mark.parametrize("case", CASES)
def test_forward_repeats_bit_for_bit(implementation, dtype, case):
    call = make_call(dtype=dtype, **CASES[case])
    first = [np.asarray(x) for x in run(call, implementation)]
    for _ in range(REPEATS.get(implementation, FEWER_REPEATS)):
        for got, want in zip(run(call, implementation), first, strict=True):
            assert_equal(np.asarray(got), want)


@pytest.mark.parametrize("case", CASES)
def test_deterministic_backward_repeats_bit_for_bit(implementation, dtype, case):
    call = make_call(dtype=dtype, **CASES[case]) | {"deterministic": True}
    cts = cotangents(call)
    first = run_gradients(call, implementation, *cts)
    for _ in range(REPEATS.get(implementation, FEWER_REPEATS)):
        grads = run_gradients(call, implementation, *cts)
        for name, grad in grads.items():
            assert_equal(grad, first[name], f"d{name}")


def test_backward_repeats_key_and_value_gradients_bit_for_bit(implementation, dtype):
    call = make_call(dtype=dtype, **CASES["odd_lengths"])
    cts = cotangents(call)
    first = run_gradients(call, implementation, *cts)
    for _ in range(REPEATS.get(implementation, FEWER_REPEATS)):
        grads = run_gradients(call, implementation, *cts)
        for name in ("key", "value"):
            assert_equal(grads[name], first[name], f"d{name}")


def test_batch_elements_do_not_depend_on_their_neighbours(implementation, dtype):
    call = make_call(70, 90, batch=(3,), K=2, dtype=dtype, is_causal=True)
    whole = run(call, implementation)
    alone = {name: call[name][1:2] for name in ("query", "key", "value")}
    for got, want in zip(run(call | alone, implementation), whole, strict=True):
        assert_equal(got, np.asarray(want)[1:2])
