"""Scores and gradients of packs against TRL's layout, on tiny models of real architectures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kit.model_check.tiny import tiny_config, tiny_model
from kit.scoring import scorer
from kit.scoring.packing import lay_out
from kit.scoring.scorer import ExtraOutputs, Rows

from .packs import assert_same, plainly, rows_of, score
from .rollouts import (
    NewTrainer,
)

WINDOW = 6
NewPacked = Callable[..., Any]


@pytest.fixture(scope="module")
def packed(new_trainer: NewTrainer, tokenizer: Any) -> NewPacked:
    """Return a factory of trainers of a tiny model by type, with any sliding windows shorter than the rows; "" is tiny_qwen."""

    def make(kind: str = "", objective: Any = "grpo", share: bool = True, **options: Any) -> Any:
        extra: dict[str, Any] = {"share_prompts": share}
        if kind:
            from peft import LoraConfig
            from transformers import AutoConfig

            config = tiny_config(AutoConfig.for_model(kind), len(tokenizer))
            if getattr(config, "sliding_window", None):
                config.sliding_window = WINDOW
            lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
            extra |= {"model": tiny_model(config), "peft_config": lora}
        trainer = new_trainer(objective=objective, extra=extra, unchecked=True, **options)
        trainer.model.train()
        return trainer

    return make


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("kind", ["", "mistral", "gemma2", "gemma3_text", "mixtral", "llama"])
def test_scores_and_gradients_are_those_of_trls_layout(packed: NewPacked, kind: str, share: bool) -> None:
    """Ragged prompts, shuffled rows, completions of no, one and all tokens, windows, grouped queries and tied heads."""
    trainer, rows = packed(kind, share=share), rows_of()
    assert_same(score(trainer, rows), plainly(trainer, rows))
    assert trainer.packing_report == {"packing": "packed", "share_prompts": share, "reason": ""}
    text = trainer.accelerator.unwrap_model(trainer.model).config.get_text_config()
    assert kind in ("", "mixtral", "llama") or (rows.mask.sum(1).max() > WINDOW and text.sliding_window == WINDOW)


@pytest.mark.parametrize("reentrant", [False, True])
def test_packed_scores_are_exact_with_gradient_checkpointing(packed: NewPacked, reentrant: bool) -> None:
    trainer, rows = packed(), rows_of()
    expected = plainly(trainer, rows)
    trainer.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    trainer.model.enable_input_require_grads()
    calls: list[int] = []
    layer = next(module for name, module in trainer.model.named_modules() if name.endswith("layers.0.input_layernorm"))
    layer.register_forward_hook(lambda *_: calls.append(1))
    assert_same(score(trainer, rows), expected)
    assert trainer.packing_report["packing"] == "packed"
    assert len(calls) == 3 + 2  # three in the proof, one in the forward pass, one recomputed in the backward pass


def test_inputs_of_checkpointed_blocks_wait_in_main_memory(packed: NewPacked, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, rows = packed(), rows_of()
    trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    trainer.model.enable_input_require_grads()
    plain = score(trainer, rows)
    moved: list[tuple[int, ...]] = []

    def recorded() -> Any:
        hooks = original()
        pack = hooks.pack_hook

        def noted(tensor: torch.Tensor) -> Any:
            packed_tensor = pack(tensor)
            if packed_tensor is not tensor:
                assert packed_tensor[1].data_ptr() != tensor.data_ptr()
                moved.append(tuple(tensor.shape))
            return packed_tensor

        hooks.pack_hook = noted
        return hooks

    original = scorer.offload_checkpointed
    monkeypatch.setattr(scorer, "offload_checkpointed", recorded)
    monkeypatch.setattr(scorer, "OFFLOAD_FROM", "cpu")
    trainer.scorer.offload = True
    assert_same(score(trainer, rows), plain)
    assert not moved  # too few tokens to gain from it
    monkeypatch.setattr(scorer, "OFFLOAD_MIN_BYTES", 1)
    moving = score(trainer, rows)
    for value, other in zip((*moving[:2], *moving[2].values()), (*plain[:2], *plain[2].values()), strict=True):
        assert torch.equal(value, other)
    config = trainer.model.config
    (pack,) = lay_out(rows.ids, rows.mask, rows.completion)
    boundary = (1, pack.tokens, config.hidden_size)
    # The input of each block, and the tensors that the last norm saves.
    assert config.num_hidden_layers <= moved.count(boundary) <= len(moved) <= config.num_hidden_layers + 4
    with torch.no_grad():
        count = len(moved)
        trainer.scorer.score(trainer.model, rows)
        assert len(moved) == count


def test_in_half_precision_the_scores_are_as_close_as_rounding_lets_them(packed: NewPacked) -> None:
    trainer, rows = packed(bf16=True), rows_of()
    assert trainer.accelerator.mixed_precision == "bf16"
    (logps, _, gradients), (expected, _, wanted_gradients) = score(trainer, rows), plainly(trainer, rows)
    assert trainer.packing_report["packing"] == "packed"
    assert 0 < (logps - expected).abs().max() < 0.1
    for name, gradient in wanted_gradients.items():
        assert (gradients[name] - gradient).norm() < 0.1 * gradient.norm(), name


@pytest.mark.parametrize("tokens", [1, 15, 30])
def test_several_packs_give_the_same(packed: NewPacked, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.scoring.scorer.LONG_PROMPT", 0)
    trainer, rows = packed(), rows_of()
    expected = score(trainer, rows)
    trainer.scorer.pack_tokens, pass_tokens = tokens, watch(trainer)
    assert_same(score(trainer, rows), expected)
    assert len(pass_tokens) > 1


def watch(trainer: Any) -> list[int]:
    """Record the number of tokens of each later forward pass; return the list."""
    pass_tokens: list[int] = []
    backbone = trainer.accelerator.unwrap_model(trainer.model).get_base_model().base_model
    backbone.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: pass_tokens.append(inputs[0].numel()))
    return pass_tokens


def hidden(trainer: Any, rows: Rows, **options: Any) -> Any:
    """The hidden states that enter the head, and the head."""
    return trainer.scorer.score(trainer.model, rows, ExtraOutputs(hidden=True), **options).projection


def test_hidden_states_come_out_in_the_order_of_live_tokens(packed: NewPacked) -> None:
    trainer, rows = packed("gemma2"), rows_of()
    passes = []
    for on in (True, False):
        trainer.scorer.packing = on
        passes.append(hidden(trainer, rows))
    assert len(passes[1].hidden) == rows.live.sum()
    torch.testing.assert_close(passes[0].hidden, passes[1].hidden, atol=1e-5, rtol=1e-5)
    assert passes[0].softcap == passes[1].softcap is not None
    assert passes[0].hidden.requires_grad


def test_rows_with_gaps_are_scored_another_way(packed: NewPacked, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, rows = packed(), rows_of()
    mask = rows.mask.clone()
    mask[:, 4] = 0
    gapped = Rows(rows.ids, mask, rows.completion)
    score(trainer, rows)
    monkeypatch.setattr(scorer, "score_packs", None)  # must not be called
    assert_same(score(trainer, gapped), plainly(trainer, gapped))


def test_inputs_beside_text_are_scored_in_trls_layout(packed: NewPacked) -> None:
    trainer, rows, calls = packed(), rows_of(), []
    score(trainer, rows)
    trainer.family.__dict__["accepts"] = trainer.family.accepts | {"token_type_ids"}  # a frozen dataclass
    model, forward = trainer.model, trainer.model.forward

    def taking(token_type_ids: Any = None, **inputs: Any) -> Any:
        calls.append((token_type_ids, inputs["input_ids"].shape))
        return forward(**inputs)

    model.forward = taking

    kinds = torch.arange(rows.ids.numel()).view(rows.ids.shape)
    output = trainer.scorer.score(model, dataclasses.replace(rows, fields={"token_type_ids": kinds}), batch_size=5)
    assert [tuple(shape) for _, shape in calls] == [(5, rows.ids.shape[1])] * 2 + [(2, rows.ids.shape[1])]
    assert torch.equal(torch.cat([type_ids for type_ids, _ in calls]), kinds)
    torch.testing.assert_close(output.logps, plainly(trainer, rows)[0], atol=1e-5, rtol=0)
    calls.clear()
    trainer.scorer.score(model, dataclasses.replace(rows, fields={"unknown": kinds}))  # the model has no such argument
    assert {type_ids for type_ids, _ in calls} == {None}


def test_rows_with_a_balancing_loss_are_not_packed(packed: NewPacked) -> None:
    trainer, rows = packed("mixtral"), rows_of()
    results = []
    for on in (True, False):
        trainer.scorer.packing = on
        logps, _, loss = trainer._get_per_token_logps_and_entropies(
            trainer.model, rows.ids, rows.mask, rows.completion, compute_aux_loss=True
        )
        results.append((logps.detach(), loss.detach()))
    assert results[0][1] > 0
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-6)
