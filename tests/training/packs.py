"""Helpers of the packing tests: rows of any lengths, and both ways of scoring them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.scoring.packing import KEYWORD, TEXT_OF_TOKEN, install_recurrent_packs, recurrent_layers
from kit.scoring.scorer import Rows

LENGTHS = (0, 1, 4, 9)
Scored = tuple[Tensor, Tensor, dict[str, Tensor]]


def rows_of(
    prompts: Sequence[int] = (7, 12, 3), lengths: Sequence[int] = LENGTHS, *, seed: int = 0, vocabulary: int = 60
) -> Rows:
    """Rows in TRL's layout, shuffled: each prompt with completions of all `lengths`, and two unused columns of padding."""
    draw = random.Random(seed)
    made = []
    for size in prompts:
        prompt = [draw.randrange(4, vocabulary) for _ in range(size)]
        made += [(prompt, [draw.randrange(4, vocabulary) for _ in range(length)]) for length in lengths]
    draw.shuffle(made)
    width, completion = max(prompts) + 1, max(lengths) + 1
    ids = torch.zeros(len(made), width + completion, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, tokens) in enumerate(made):
        place = slice(width - len(prompt), width + len(tokens))
        ids[row, place], mask[row, place] = torch.tensor(prompt + tokens), 1
    return Rows(ids, mask, completion)


def score(trainer: Any, rows: Rows, **options: Any) -> Scored:
    """Log-probabilities, entropies and the gradients of all LoRA weights, for random weights of each output in the loss."""
    trainer.model.zero_grad()
    outputs = trainer._get_per_token_logps_and_entropies(
        trainer.model, rows.ids, rows.mask, rows.completion, compute_entropy=True, **options
    )
    draw = torch.Generator().manual_seed(1)
    logps, entropy = outputs[:2]
    weights = [torch.randn(rows.live.shape, generator=draw) for _ in range(2)]
    ((logps * weights[0]).sum() + (entropy * weights[1]).sum()).backward()
    gradients = {name: weight.grad.clone() for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    return logps.detach(), entropy.detach(), gradients


def plainly(trainer: Any, rows: Rows, **options: Any) -> Scored:
    """`score` without packing, in TRL's padded layout."""
    packing, trainer.scorer.packing = trainer.scorer.packing, False
    try:
        return score(trainer, rows, **options)
    finally:
        trainer.scorer.packing = packing


def assert_same(actual: Scored, expected: Scored, atol: float = 1e-5, rtol: float = 1e-5) -> None:
    """Assert that two results of `score` are equal.

    Scores (nats) may differ by `atol` and by 3e-6 of their value, which is float32's rounding and varies by processor. Gradients
    may differ by `rtol`, relative to the norm of each weight's gradient.
    """
    assert expected[0].abs().max() > 0.1
    for scores, other in zip(actual[:2], expected[:2], strict=True):
        torch.testing.assert_close(scores, other, atol=atol, rtol=3e-6)
    assert actual[2].keys() == expected[2].keys() != set()
    for name, gradient in expected[2].items():
        assert gradient.norm() > 0, name
        assert (actual[2][name] - gradient).norm() <= rtol * gradient.norm(), name


def read_as_one_text(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant the defect that a recurrent layer carries its state into the next text of a pack, as transformers' functions do."""
    assert install_recurrent_packs(model)
    for kind in {type(layer) for layer in recurrent_layers(model)}:
        original = kind.forward.unpacked

        def forward(self: Any, *arguments: Any, original: Any = original, **keywords: Any) -> Any:
            keywords.pop(KEYWORD, None)
            return original(
                self, *arguments, **{name: None if name == TEXT_OF_TOKEN else value for name, value in keywords.items()}
            )

        forward.unpacked = original  # type: ignore[attr-defined]
        monkeypatch.setattr(kind, "forward", forward)
