"""Attention over a pack against attention with the complete mask in float64; other calls are unchanged."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pairwise import rest_in_matrix
from torch import Tensor
from transformers import AttentionInterface

from kit.scoring import packing as module
from kit.scoring.packing import (
    KEYWORD,
    WRAPPED,
    Group,
    Layout,
    NotPackable,
    install_packed_attention,
    lay_out,
    packed_attention,
)

from .packs import rows_of

HEADS, WIDTH = 4, 6


def layouts(window: int | None) -> tuple[Layout, Tensor]:
    """A layout of ragged groups, and the mask (S, S) of which token attends to which, computed token by token."""
    rows = rows_of((5, 1, 8), (1, 7, 6, 2))
    (pack,) = lay_out(rows.ids, rows.mask, rows.completion)
    position, text, prompt, of_group = pack.positions[0].tolist(), [], [], []
    for number, group in enumerate(pack.groups):
        text += [None] * group.prompt + [place for place, length in enumerate(group.lengths) for _ in range(length)]
        prompt += [True] * group.prompt + [False] * sum(group.lengths)
        of_group += [number] * group.tokens
    visible = [
        [
            of_group[i] == of_group[j]
            and (text[i] == text[j] or prompt[j])
            and 0 <= position[i] - position[j] < (window or 99)
            for j in range(pack.tokens)
        ]
        for i in range(pack.tokens)
    ]
    return Layout(pack.groups), torch.tensor(visible)


def tensors(tokens: int, key_heads: int = HEADS) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = (HEADS, key_heads, key_heads)
    return [torch.randn(1, heads, tokens, WIDTH, generator=draw, dtype=torch.float64) for heads in shapes]


# --- stand-ins for the kernels, which have no CPU version, by their documentation ----------------------------------------


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """A reference of torch.nn.attention.varlen's function, (T, h, d).

    The last query of a text attends to its last key and to `window_size[0]` keys before it.
    """
    assert query.shape[1] == key.shape[1] or enable_gqa
    done = []
    for (a, b), (c, d) in zip(
        itertools.pairwise(cu_seq_q.tolist()), itertools.pairwise(cu_seq_k.tolist()), strict=True
    ):
        assert b - a <= max_q
        assert d - c <= max_k
        q, k, v = (tensor.transpose(0, 1) for tensor in (query[a:b], key[c:d], value[c:d]))
        k, v = (tensor.repeat_interleave(q.shape[0] // k.shape[0], 0) for tensor in (k, v))
        behind = torch.arange(d - c - (b - a), d - c)[:, None] - torch.arange(d - c)
        left, right = (99 if side < 0 else side for side in window_size)
        weights = (q @ k.transpose(1, 2)) * (q.shape[2] ** -0.5 if scale is None else scale)
        weights = weights.masked_fill((behind > left) | (behind < -right), -torch.inf)
        done.append((weights.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(done)


def efficient(
    q: Tensor, k: Tensor, v: Tensor, starts: tuple[Any, ...], scale: float | None, window: int | None
) -> Tensor:
    assert q.shape == (1, q.shape[1], HEADS, q.shape[3])
    assert k.shape[2] == HEADS  # the kernel has no grouped queries
    left = -1 if window is None else window - 1
    return varlen_attn(q[0], k[0], v[0], *starts, scale=scale, window_size=(left, 0))[None]


def efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: None, *rest: Any, scale: float | None = None, window_size: int | None = None
) -> tuple[Tensor, ...]:
    assert rest[4:] == (0.0, 2, True)
    return efficient(q, k, v, rest[:4], scale, window_size), *(torch.empty(0) for _ in range(3)), rest[2], rest[3]


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, out: Tensor, *rest: Any, scale: Any, window_size: Any
) -> tuple[Tensor | None, ...]:
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        output = efficient(*leaves, rest[:4], scale, window_size)
    torch.testing.assert_close(output, out, equal_nan=True)
    return *torch.autograd.grad(output, leaves, grad), None


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Select the attention of a GPU on this machine: a kernel by its name, or torch's own attention by groups."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", efficient_forward)
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_backward", efficient_backward)
    monkeypatch.setattr(module, "KERNELS_ON", "cuda" if request.param == "cpu" else "cpu")
    kernels = {name: kernel for name, kernel in module.KERNELS.items() if name == request.param}
    monkeypatch.setattr(module, "KERNELS", kernels)
    module._kernel.cache_clear()
    yield request.param
    if request.param != "cpu":
        assert module._kernel(torch.device("cpu"), torch.float64, WIDTH, False) == next(iter(kernels), None)
    module._kernel.cache_clear()


@pytest.mark.parametrize("window", rest_in_matrix(2, [None, 1, 4, 11, 50]))
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("way", ["cpu", "groups", "flash", "efficient"], indirect=True)
def test_each_token_sees_its_own_text_and_nothing_else(window: int | None, key_heads: int, way: str) -> None:
    layout, visible = layouts(window)
    results = []
    for packed in (True, False):
        leaves = [leaf.requires_grad_() for leaf in tensors(layout.tokens, key_heads)]
        if packed:
            result = packed_attention(*leaves, layout, scaling=0.3, window=window)
        else:
            query, key, value = leaves
            key, value = (tensor.repeat_interleave(HEADS // key_heads, 1) for tensor in (key, value))
            weights = (0.3 * query @ key.transpose(2, 3)).masked_fill(~visible, -torch.inf).softmax(-1)
            result = (weights @ value).transpose(1, 2)
        draw = torch.Generator().manual_seed(2)
        (result * torch.randn(result.shape, generator=draw, dtype=torch.float64)).sum().backward()
        results.append([result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert len(results[0]) == 4
    for actual, dense in zip(*results, strict=True):
        assert (actual - dense).norm() <= 1e-10 * dense.norm().clamp(min=1e-3)  # a window of 1 has no gradient


@pytest.mark.parametrize("way", ["flash", "efficient"], indirect=True)
@pytest.mark.parametrize("wrong", ["window", "starts", "gradient", "raises"])
def test_a_kernel_that_is_wrong_is_not_used(
    way: str, wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = module.KERNELS[way]

    def planted(q: Tensor, k: Tensor, v: Tensor, segments: module.Segments, scale: Any, window: Any) -> Tensor:
        if wrong == "window":
            window = window and window + 1
        elif wrong == "starts":
            starts = segments.key_starts.clone()
            starts[1] -= 1
            segments = dataclasses.replace(segments, key_starts=starts, longest=(99, 99))
        elif wrong == "gradient":
            k = k.detach()[:, :1] + 0.0 * k + k.detach() - k.detach()[:, :1]
        else:
            raise RuntimeError("only Ampere GPUs or newer\nfurther lines")
        return right(q, k, v, segments, scale, window)

    assert module._problem(way, torch.device("cpu"), torch.float64, WIDTH) is None
    with monkeypatch.context() as patched, caplog.at_level(logging.INFO, "kit"):
        patched.setitem(module.KERNELS, way, planted)
        assert module._kernel(torch.device("cpu"), torch.float64, WIDTH, False) is None
        assert module._kernel(torch.device("cpu"), torch.float64, WIDTH, False) is None
    (record,) = caplog.records  # logged once
    endings = {
        "window": "(window 5)",
        "starts": "(window None)",
        "gradient": "(window None)",
        "raises": "only Ampere GPUs or newer",
    }
    assert record.getMessage().startswith(
        "attention of packs: group by group, sliding windows as dense masks; not " + way
    )
    assert record.getMessage().endswith(endings[wrong])
    module._kernel.cache_clear()


class Module(torch.nn.Module):
    num_key_value_groups = 1


def test_calls_without_a_layout_use_the_original_function() -> None:
    install_packed_attention()
    wrapped: Any = AttentionInterface()["sdpa"]
    install_packed_attention()
    assert AttentionInterface()["sdpa"] is wrapped  # wrapped once
    query, key, value = tensors(7)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    for bias in (None, mask):
        out = wrapped(Module(), query, key, value, bias, dropout=0.0, scaling=0.2)[0]
        assert torch.equal(out, wrapped.unpacked(Module(), query, key, value, bias, dropout=0.0, scaling=0.2)[0])
    assert "eager" not in WRAPPED


def call(name: str = "sdpa", **keywords: Any) -> Any:
    install_packed_attention()
    layout = Layout([Group(0, 2, (3, 2))])
    query, key, value = tensors(7)
    function = AttentionInterface()[name]
    return function(Module(), query, key, value, None, **({KEYWORD: layout} | keywords)), layout


def test_a_call_with_a_layout_is_computed_and_recorded() -> None:
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
        {"name": "flash_attention_2", "alibi_slopes": torch.zeros(1)},
        {KEYWORD: Layout([Group(0, 2, (3,))])},
    ],
)
def test_unsupported_attention_arguments_are_refused(keywords: dict[str, Any]) -> None:
    with pytest.raises(NotPackable, match="attention"):
        call(**keywords)
