"""What is kept of a scoring pass, and how it is laid over completions."""

from __future__ import annotations

import torch

from kit.scoring.layouts import scatter_to_tokens


def test_rows_are_laid_over_live_tokens_in_order_with_gradient() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]])
    rows = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    laid = scatter_to_tokens(rows, mask)
    assert laid.tolist() == [[1, 2, 0], [0, 0, 0], [0, 3, 4]]
    (laid * torch.arange(9.0).view(3, 3)).sum().backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [0, 1, 7, 8]
    wide = torch.stack([rows.detach(), -rows.detach()], dim=1)
    laid = scatter_to_tokens(wide, mask)
    assert laid.shape == (3, 3, 2)
    assert laid[..., 1].tolist() == [[-1, -2, 0], [0, 0, 0], [0, -3, -4]]
    assert torch.equal(laid[mask.bool()], wide)
