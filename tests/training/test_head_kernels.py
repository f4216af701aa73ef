"""The head's Triton kernels against torch's implementation, in Triton's interpreter without a GPU."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch

WIDTH = 77
SETTINGS = tuple(itertools.product((torch.float32, torch.bfloat16), ((None, False), (5.0, True))))


@pytest.mark.matrix
def test_the_kernels_of_a_gpu_do_what_torch_does():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # read when Triton is imported
    result = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["equal"] * len(SETTINGS)


def compare(dtype: torch.dtype, softcap: float | None, bias: bool) -> None:
    from kit.scoring import head, head_kernels

    n, half = 4, dtype != torch.float32
    targets = torch.tensor([0, 80, 153, 76])  # in the first and second tile, at the edges of the columns, too
    z = 4 * torch.randn(2, n, WIDTH)
    z[0, 0, 5] = z[0, 0, 9] = 40.0  # equal maxima
    offset = torch.randn(2, WIDTH) if bias else [None, None]
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-3 if half else 2e-5}
    for entropy in (True, False):
        made: list[list[torch.Tensor]] = [[], []]
        for fold, results in zip((head.fold_in_torch, head_kernels.fold), made, strict=True):
            stats = torch.zeros(6, n)
            stats[head.BEST], stats[head.SLOPE_TARGET] = -1e30, 1.0
            for part in (0, 1):
                logits, e = z[part].clone(), torch.empty(n, WIDTH, dtype=dtype)
                weighted = torch.empty_like(e) if half and entropy else None
                fold(logits, stats, e, weighted, offset[part], targets, WIDTH * part, 0.7, softcap, 1.3, entropy)
                results += [e, (logits if weighted is None else weighted) if entropy else e, stats.clone()]
        for torch_tensor, triton_tensor in zip(*made, strict=True):
            torch.testing.assert_close(torch_tensor, triton_tensor, **close)
        rows = 1.0 + torch.rand(6, n)
        rows[0] = made[0][-1][head.BEST]
        grads = [torch.empty(n, WIDTH, dtype=dtype) for _ in made]
        for grad, out in zip((head.grad_in_torch, head_kernels.grad), grads, strict=True):
            grad(z[0].clone(), out, rows, offset[0], targets, 0, 0.7, softcap, 1.3, entropy)
        torch.testing.assert_close(*grads, **close)


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.path.insert(0, os.getcwd())
    from kit.scoring import head_kernels

    head_kernels.BLOCK = 32
    for dtype, (softcap, bias) in SETTINGS:
        compare(dtype, softcap, bias)
        print("equal")
