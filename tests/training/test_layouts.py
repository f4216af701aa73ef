"""Results of a scoring pass, and their places among the completions."""

from __future__ import annotations

import torch

from kit.scoring.scorer import PlacedLabels, scatter_to_tokens


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


def test_placed_labels_replace_the_heads_mask() -> None:
    labels = torch.tensor([[-100, 4, -100, 7, 2]])
    placed = PlacedLabels(labels, torch.tensor([1, 3, 4])).to(torch.device("cpu"))
    hidden = torch.arange(10.0).view(1, 5, 2).requires_grad_()
    positions, mask = placed != -100, labels != -100
    assert torch.equal(hidden[positions], hidden[mask])
    assert torch.equal(placed[positions], labels[mask])
    values = torch.tensor([0.5, 1.5, 2.5], requires_grad=True)
    spread = values.new_zeros(positions.shape).masked_scatter(positions, values)
    assert torch.equal(spread, values.new_zeros(mask.shape).masked_scatter(mask, values))
    (hidden[positions].sum() + (spread * 2).sum()).backward()
    assert hidden.grad is not None
    assert hidden.grad[0, :, 0].tolist() == [0, 1, 0, 1, 1]
    assert values.grad is not None
    assert values.grad.tolist() == [2, 2, 2]
    assert int(positions.sum()) == 3  # other attributes are the tensor's
    assert torch.equal(torch.where(mask, hidden[..., 0], 0.0), torch.where(positions.values, hidden[..., 0], 0.0))
