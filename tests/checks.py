"""Whole checks of a call: against the oracle, the accuracy bar, and a cleaner call."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
from calls import QKV, cotangents, run, run_gradients, with_keep
from compare import (
    assert_equal,
    assert_forward,
    assert_gradients,
    assert_meets_bar,
    xla_results,
)

from jaxflash.spec import DIFFERENTIABLE

Call = dict[str, Any]


def check(call: Call, implementation: str | None) -> None:
    """out, lse and the gradients of everything that has one, against the oracle."""
    if call.get("dropout_rate"):
        call = with_keep(call)
    assert_forward(call, *run(call, implementation))
    cts = cotangents(call)
    wrt = [name for name in DIFFERENTIABLE if name in call]
    assert_gradients(call, run_gradients(call, implementation, *cts, wrt), *cts)


def check_forward_bar(call: Call, implementation: str, dtype: str, xla: Any) -> None:
    """Out and lse are no worse than `xla`, those of XLA's attention."""
    results = run(call, implementation), xla
    truth = oracle.forward(call), oracle.forward_terms(call)
    for name, *numbers in zip(("out", "lse"), *results, *truth, strict=True):
        assert_meets_bar(*numbers, dtype if name == "out" else "float32", name)


def check_backward_bar(
    call: Call, implementation: str, dtype: str, cts: Any, xla: Any
) -> None:
    """The gradients are no worse than `xla`, those of XLA's attention."""
    results = run_gradients(call, implementation, *cts), xla
    truth = (oracle.backward(call, *cts, absolute=x) for x in (False, True))
    results = (*results, *truth)
    for name in QKV:
        assert_meets_bar(*(x[name] for x in results), dtype, f"d{name}")


def check_bar(call: Call, implementation: str, dtype: str) -> None:
    """Both passes meet the accuracy bar."""
    cts = cotangents(call)
    xla, xla_gradients = xla_results(call, *cts)
    check_forward_bar(call, implementation, dtype, xla)
    check_backward_bar(call, implementation, dtype, cts, xla_gradients)


def check_no_effect(
    call: Call, changes: Call, implementation: str, d_out_changes: Any = None
) -> None:
    """The changes leave every bit of the results and gradients as it is.

    d_out_changes: the d_out that goes with the changes.
    """
    d_out, d_lse = cotangents(call)
    changed_d_out = d_out if d_out_changes is None else d_out_changes
    results = (run(x, implementation) for x in (call | changes, call))
    for got, want in zip(*results, strict=True):
        assert_equal(got, want)
    wrt = [name for name in DIFFERENTIABLE if name in call]
    got, want = (
        run_gradients(x, implementation, d, d_lse, wrt, deterministic=True)
        for x, d in ((call | changes, changed_d_out), (call, d_out))
    )
    for name in wrt:
        assert_equal(got[name], want[name], f"d{name}")


def check_reaches_only(
    call: Call, changes: Call, touched: np.ndarray, implementation: str
) -> None:
    """NaN in the changes makes NaN of lse and dq where `touched` [*batch, T, N].

    Out and the others of these keep all their bits.
    """
    cts = cotangents(call)
    results = []
    for x in (call | changes, call):
        dq = run_gradients(x, implementation, *cts, deterministic=True)["query"]
        results.append((*run(x, implementation), dq))
    for got, want in zip(*results, strict=True):
        assert_equal(np.asarray(got)[~touched], np.asarray(want)[~touched])
    _, lse, dq = results[0]
    assert np.all(np.isnan(np.asarray(lse)[touched]))
    assert np.all(np.isnan(np.asarray(dq, np.float32)[touched]))
