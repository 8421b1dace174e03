"""Strided arrays on the CUDA kernels, through the C API."""

from __future__ import annotations

import importlib

import pytest

pytestmark = pytest.mark.gpu


# "unaligned" is served by the portable kernels in any case.
@pytest.mark.parametrize("kernels", ["auto", "sm80"])
@pytest.mark.parametrize("layout", ["row_gaps", "heads_first", "shared", "unaligned"])
@pytest.mark.parametrize("H", [20, 64, 96, 128, 192, 256])
def test_strided_arrays(monkeypatch, kernels, layout, H):
    monkeypatch.setenv("JAXFLASH_CUDA_KERNELS", kernels)
    sanitize = importlib.import_module("sanitize")
    sanitize.use_first_device()
    case = sanitize.Case(
        T=200, S=230, N=4, K=2, H=H, is_causal=True, layout=layout, d_lse=True
    )
    sanitize.check(case)
    sanitize.check(
        sanitize.Case(
            T=130,
            S=140,
            H=H,
            layout=layout,
            out_low=True,
            gradients="float32",
            lengths=((130, 70), (90, 140)),
        )
    )
