"""The check of packing detects planted defects, and architectures that cannot be packed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig

from kit.model_check.tiny import tiny_config, tiny_model
from kit.scoring import packing, scorer
from kit.scoring.scorer import Rows, probe_rows

from .packs import assert_same, plainly, read_as_one_text, rows_of, score
from .rollouts import NewTrainer

NewTiny = Callable[..., Any]


@pytest.fixture(scope="module")
def tiny(new_trainer: NewTrainer, tokenizer: Any) -> NewTiny:
    def make(kind: str = "llama", attention: str = "sdpa", dropout: float = 0.0, **fields: Any) -> Any:
        config = tiny_config(AutoConfig.for_model(kind), len(tokenizer))
        for name, value in fields.items():
            setattr(config, name, value)
        torch.manual_seed(0)  # so that weights and adapters do not depend on other tests
        model = tiny_model(config)
        model.set_attn_implementation(attention)
        lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, lora_dropout=dropout)
        trainer = new_trainer(objective="grpo", unchecked=True, extra={"model": model, "peft_config": lora})
        trainer.model.train()
        return trainer

    return make


def outcome(trainer: Any, rows: Rows | None = None) -> tuple[str, str]:
    """The layout that the scorer chose and its reason, after asserting that its numbers are right."""
    rows = rows or rows_of()
    # Gradients of a key nearly cancel within a softmax, so rounding is a larger part of them.
    assert_same(score(trainer, rows), plainly(trainer, rows), rtol=3e-5)
    return trainer.packing_report["packing"], trainer.packing_report["reason"]


def prompts_of(rows: Rows) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    width = rows.ids.shape[1] - rows.completion
    yield from zip(rows.ids[:, :width], rows.mask[:, :width].bool(), strict=True)


def test_the_proof_has_ragged_rows_that_share_a_prompt() -> None:
    for rows in (rows_of(), rows_of((5,), (1,)), rows_of((100, 2), (60, 0)), rows_of((1,), (1,))):
        probe = probe_rows(rows)
        lengths = probe.live.sum(1).tolist()
        assert lengths[1] == lengths[0] + 1
        assert lengths[2:] == [1, lengths[0] - 1, lengths[0]]
        assert lengths[0] >= 6
        assert not probe.mask[:, :3].any()
        assert len({row[mask].numpy().tobytes() for row, mask in prompts_of(probe)}) == 2
        assert probe.ids.shape[1] <= 3 + 65 + 26


def test_attention_that_ignores_the_layout_fails_the_proof(tiny: NewTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny()
    backbone = trainer.accelerator.unwrap_model(trainer.model).get_base_model().base_model
    for layer in backbone.layers:
        attention, forward = layer.self_attn, layer.self_attn.forward

        def without(*args: Any, forward: Any = forward, **more: Any) -> Any:
            more.pop(packing.KEYWORD, None)
            return forward(*args, **more)

        monkeypatch.setattr(attention, "forward", without)
    way, reason = outcome(trainer)
    assert way == "plain"
    assert "do not call the packed attention as expected (windows []" in reason


def test_attention_across_completions_fails_the_proof(tiny: NewTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of the first completion are right; only a change of another completion reveals the defect."""
    right = packing.Layout.mask

    def leaking(self: Any, queries: int, keys: int, *rest: Any) -> Any:
        return torch.ones_like(right(self, queries, keys, *rest))

    monkeypatch.setattr(packing.Layout, "mask", leaking)
    assert outcome(tiny())[0] == "plain"
    original = packing.packed_attention

    def looking_back(query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        return original(query, key, value, *rest, **more) + 0.05 * value.cumsum(2).transpose(1, 2).mean(2, keepdim=True)

    monkeypatch.undo()
    monkeypatch.setattr(packing, "packed_attention", looking_back)
    way, reason = outcome(tiny())
    assert way == "plain"
    assert "one completion changes the scores of another" in reason


def test_wrong_positions_fail_the_proof(tiny: NewTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    right = scorer.lay_out

    def counted_on(*args: Any, **more: Any) -> Any:
        packs = right(*args, **more)
        return [dataclasses.replace(pack, positions=torch.arange(pack.tokens)[None]) for pack in packs]

    monkeypatch.setattr(scorer, "lay_out", counted_on)
    way, reason = outcome(tiny())
    assert way == "plain"
    assert "differ from those of padded rows" in reason


def test_a_missing_window_fails_the_proof(tiny: NewTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window is longer than any row of the proof, so only the arguments of attention reveal the defect."""
    layout_class = scorer.Layout

    class Blind(layout_class):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.windows = _Nothing()

    class _Nothing(list[Any]):
        def append(self, _: Any) -> None:
            super().append(None)

    assert outcome(tiny("mistral", sliding_window=500))[0] == "packed"
    monkeypatch.setattr(scorer, "Layout", Blind)
    way, reason = outcome(tiny("mistral", sliding_window=500))
    assert way == "plain"
    assert "expected [500, 500]" in reason


@pytest.mark.parametrize(
    ("made", "way", "reason"),
    [
        ({"kind": "qwen3_next"}, "packed", ""),  # its recurrent layers get rows without padding
        ({"kind": "stablelm"}, "plain", "do not call the packed attention as expected"),  # has its own attention
        ({"attention": "eager"}, "packed", ""),
        ({"kind": "gemma2", "attention": "eager", "attn_logit_softcapping": 2.0}, "packed", ""),
        ({"kind": "gpt_oss", "attention": "eager"}, "packed", ""),  # attention sinks
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "plain", "dynamic"),
        ({"kind": "gpt2", "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, "packed", ""),
    ],
)
def test_the_proof_decides_by_architecture(tiny: NewTiny, made: dict[str, Any], way: str, reason: str) -> None:
    actual = outcome(tiny(**made))
    assert actual[0] == way
    assert reason in actual[1]


def test_a_state_carried_into_the_next_text_fails_the_proof(tiny: NewTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny("qwen3_next")
    read_as_one_text(trainer.accelerator.unwrap_model(trainer.model).get_base_model(), monkeypatch)
    way, reason = outcome(trainer)
    assert way == "plain"
    assert "one completion changes the scores of another" in reason


def test_missing_attention_sinks_fail_the_proof(tiny: NewTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    right = packing.packed_attention
    monkeypatch.setattr(packing, "packed_attention", lambda *args, **more: right(*args, **{**more, "sinks": None}))
    way, reason = outcome(tiny("gpt_oss", attention="eager"))
    assert way == "plain"
    assert "differ from those of padded rows" in reason


def test_dropout_does_not_look_like_a_difference(tiny: NewTiny) -> None:
    trainer = tiny(dropout=0.5)
    score(trainer, rows_of())
    assert trainer.packing_report["packing"] == "packed"
    assert trainer.model.training
