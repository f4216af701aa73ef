"""Packs in Unsloth's attention dispatch; a stand-in records the calls."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kit.scoring import unsloth_packs
from kit.scoring.packing import Group, Layout, NotPackable, packed_attention

SHARED, ALONE = Layout([Group(0, 3, (4, 2)), Group(9, 2, (3,))]), Layout([Group(0, 3, (4,)), Group(7, 2, (3,))])


@dataclass
class Context:
    prefix_seg_info: Any = None
    sliding_window: int | None = None


@dataclass
class Config:
    flash_varlen_kwargs: dict[str, Any] | None = None


@pytest.fixture
def dispatch(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """The wrapped attention function of a model's module, and the calls that reach Unsloth's own function."""
    calls: list[Any] = []

    def run_attention(*, config: Any, context: Any, Q: Any, K: Any, V: Any) -> Any:
        calls.append(context)
        return "theirs"

    for name in (unsloth_packs.DISPATCH, "unsloth.models.llama"):
        module = types.ModuleType(name)
        module.run_attention = run_attention  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    unsloth_packs.install()
    once = sys.modules["unsloth.models.llama"].run_attention
    unsloth_packs.install()
    assert sys.modules["unsloth.models.llama"].run_attention is once is not run_attention
    return once, calls


def heads(layout: Layout) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"Q": 4, "K": 2, "V": 2}
    return {name: torch.randn(1, count, layout.tokens, 8, generator=draw) for name, count in shapes.items()}


def test_a_shared_prompt_is_computed_here_with_the_window_and_scale_of_the_call(dispatch: Any) -> None:
    attend, calls = dispatch
    inputs = heads(SHARED)
    for config, context, window in (
        (Config(), Context(SHARED), None),
        (Config(), Context(SHARED, sliding_window=3), 3),
        (Config({"softmax_scale": 0.2, "window_size": (2, 2)}), Context(SHARED, sliding_window=9), 3),
        (Config({"window_size": (-1, -1)}), Context(SHARED, sliding_window=9), None),
    ):
        scale = (config.flash_varlen_kwargs or {}).get("softmax_scale")
        output = attend(config=config, context=context, **inputs)
        want = packed_attention(inputs["Q"], inputs["K"], inputs["V"], SHARED, scale, window=window)
        assert torch.equal(output, want)
    assert SHARED.windows[-4:] == [None, 3, 3, None]
    assert not calls


def test_packs_without_shared_prompts_use_unsloths_kernels(dispatch: Any) -> None:
    attend, calls = dispatch
    capped = Config({"softcap": 50.0})
    assert attend(config=capped, context=Context(ALONE), **heads(ALONE)) == "theirs"
    assert calls[-1].prefix_seg_info is None
    other = replace(Context(), prefix_seg_info="a table of Unsloth's own")
    assert attend(config=capped, context=other, **heads(ALONE)) == "theirs"
    assert calls[-1] is other


def test_what_cannot_be_computed_is_said(dispatch: Any) -> None:
    attend, _ = dispatch
    with pytest.raises(NotPackable, match="softcap"):
        attend(config=Config({"softcap": 50.0}), context=Context(SHARED), **heads(SHARED))
    with pytest.raises(NotPackable, match="in a pack of 14 tokens"):
        attend(config=Config(), context=Context(SHARED), **heads(ALONE))


def test_a_model_is_given_the_lengths_of_its_texts() -> None:
    inputs = unsloth_packs.pack_inputs(SHARED)
    assert inputs["packed_seq_lengths"].tolist() == [9, 5]
    assert inputs["prefix_seg_info"] is SHARED
