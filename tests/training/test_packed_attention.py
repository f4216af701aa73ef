"""Attention over a pack against attention with the whole mask written out, in double precision; other calls as they came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from kit.scoring.packed_attention import KEYWORD, WRAPPED, Layout, install_packed_attention, packed_attention
from kit.scoring.packing import Group, NotPackable, lay_out

from .packs import rows_of

HEADS, WIDTH = 4, 6


def layouts(window: int | None) -> tuple[Layout, Tensor]:
    """A layout of ragged groups, and which token sees which, found token by token: (S, S) bool."""
    given = rows_of((5, 1, 8), (1, 7, 6, 2))
    (pack,) = lay_out(given.ids, given.mask, given.completion)
    position, text, prompt, of_group = pack.positions[0].tolist(), [], [], []
    for number, group in enumerate(pack.groups):
        text += [None] * group.prompt + [place for place, length in enumerate(group.lengths) for _ in range(length)]
        prompt += [True] * group.prompt + [False] * sum(group.lengths)
        of_group += [number] * group.tokens
    seen = [
        [
            of_group[i] == of_group[j]
            and (text[i] == text[j] or prompt[j])
            and 0 <= position[i] - position[j] < (window or 99)
            for j in range(pack.tokens)
        ]
        for i in range(pack.tokens)
    ]
    return Layout(pack.groups), torch.tensor(seen)


def tensors(tokens: int, key_heads: int = HEADS) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = (HEADS, key_heads, key_heads)
    return [torch.randn(1, heads, tokens, WIDTH, generator=draw, dtype=torch.float64) for heads in shapes]


@pytest.mark.parametrize("window", [None, 1, 4, 11, 50])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("kernels_on", ["cuda", "cpu"])
def test_each_token_sees_its_own_text_and_nothing_else(
    window: int | None, key_heads: int, kernels_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kit.scoring.packed_attention.KERNELS_ON", kernels_on)  # cpu: a GPU's way, on this machine
    layout, seen = layouts(window)
    found = []
    for packed in (True, False):
        given = [one.requires_grad_() for one in tensors(layout.tokens, key_heads)]
        if packed:
            result = packed_attention(*given, layout, scaling=0.3, window=window)
        else:
            query, key, value = given
            key, value = (one.repeat_interleave(HEADS // key_heads, 1) for one in (key, value))
            weights = (0.3 * query @ key.transpose(2, 3)).masked_fill(~seen, -torch.inf).softmax(-1)
            result = (weights @ value).transpose(1, 2)
        draw = torch.Generator().manual_seed(2)
        (result * torch.randn(result.shape, generator=draw, dtype=torch.float64)).sum().backward()
        found.append([result.detach(), *(one.grad for one in given if one.grad is not None)])
    assert len(found[0]) == 4
    for ours, wanted in zip(*found, strict=True):
        assert (ours - wanted).norm() <= 1e-10 * wanted.norm().clamp(min=1e-3)  # a window of 1 has no weights to learn


def test_dropout_is_honoured() -> None:
    layout, _ = layouts(None)
    given = tensors(layout.tokens)
    torch.manual_seed(0)
    means = torch.stack([packed_attention(*given, layout, dropout=0.5) for _ in range(120)])
    whole = packed_attention(*given, layout)
    assert (means[0] - means[1]).abs().max() > 0.1
    torch.testing.assert_close(means.mean(0), whole, atol=0.8, rtol=0)  # right on average


class Module(torch.nn.Module):
    num_key_value_groups = 1


def test_calls_without_a_layout_go_to_the_original_function_as_they_came() -> None:
    install_packed_attention()
    wrapped: Any = AttentionInterface()["sdpa"]
    install_packed_attention()
    assert AttentionInterface()["sdpa"] is wrapped  # once
    query, key, value = tensors(7)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    for given in (None, mask):
        ours = wrapped(Module(), query, key, value, given, dropout=0.0, scaling=0.2)[0]
        assert torch.equal(ours, wrapped.unpacked(Module(), query, key, value, given, dropout=0.0, scaling=0.2)[0])
    assert "eager" not in WRAPPED


def call(name: str = "sdpa", **keywords: Any) -> Any:
    install_packed_attention()
    layout = Layout([Group(0, 2, (3, 2))])
    query, key, value = tensors(7)
    function = AttentionInterface()[name]
    return function(Module(), query, key, value, None, **({KEYWORD: layout} | keywords)), layout


def test_a_call_with_a_layout_is_computed_here_and_noted() -> None:
    (result, weights), layout = call(scaling=0.2, sliding_window=5, softcap=30.0, position_ids=None)  # as sdpa does
    assert result.shape == (1, 7, HEADS, WIDTH)
    assert weights is None
    assert layout.windows == [5]


@pytest.mark.parametrize(
    "keywords",
    [
        {"is_causal": False},
        {"output_attentions": True},
        {"position_bias": torch.zeros(1)},
        {"name": "flash_attention_2", "softcap": 30.0},
        {"name": "flash_attention_2", "s_aux": torch.zeros(1)},
        {KEYWORD: Layout([Group(0, 2, (3,))])},
    ],
)
def test_what_means_something_else_is_refused(keywords: dict[str, Any]) -> None:
    with pytest.raises(NotPackable, match="attention"):
        call(**keywords)
