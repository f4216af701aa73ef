"""Differences between engine and trainer: metrics, and the advice of the alarm."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kit.config import load_config
from kit.objective.batch import TokenBatch
from kit.report.panels import SIMPLE
from kit.trainer.arguments import engine_settings
from kit.trainer.metric_log import SamplerAlarm, sampler_mismatch

LOG2 = math.log(2.0)


def batch() -> TokenBatch:
    """Two completions of 8 and 4 tokens; the sampler is off by log 2 at the last two tokens of the first, and has one NaN."""
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 4:] = False
    old = torch.full((2, 8), -1.0).masked_fill(~mask, 0.0)
    sampler = old.clone()
    sampler[0, 6:] -= LOG2
    sampler[1, 0] = torch.nan
    return TokenBatch(old.clone(), old, torch.ones(2, 1), mask, sampler_logps=sampler)


def test_difference_and_ratios_count_known_tokens() -> None:
    means, ratios = sampler_mismatch(batch())
    assert float(means["sampler/logp_difference"].value) == pytest.approx(2 * LOG2 / 11)  # 8 + 4 tokens, one unknown
    assert ratios[~ratios.isnan()].exp().max() == pytest.approx(2.0)
    assert int(ratios.isnan().sum()) == 5  # 4 of padding, 1 unknown


def test_the_alarm_says_once_what_to_do() -> None:
    messages: list[str] = []
    alarm, arguments = SamplerAlarm(messages.append), SimpleNamespace(bf16=True)
    for step, gap in enumerate([0.005, 0.02, 0.5]):
        alarm.on_log(arguments, SimpleNamespace(global_step=step), None, {"sampler/logp_difference": gap})
    alarm.on_log(arguments, SimpleNamespace(global_step=4), None, {"loss": 1.0})
    (message,) = messages
    assert all(word in message for word in ("Step 1", "float16", "sampler_correction"))


@pytest.mark.parametrize(
    ("load_in_4bit", "advice"),
    [
        (False, "Set model.dtype to float16, for the engine too"),
        (True, "Set model.load_in_4bit: false and model.dtype: float16"),
    ],
)
def test_the_alarm_names_no_dtype_that_has_no_effect_or_is_refused(
    new_trainer: Any, monkeypatch: pytest.MonkeyPatch, load_in_4bit: bool, advice: str
) -> None:
    """vLLM's plugin multiplies 4-bit weights in bfloat16, whatever dtype is set."""
    config, messages = load_config({"model": {"load_in_4bit": load_in_4bit, "dtype": "bfloat16"}}), list[str]()
    args = SimpleNamespace(use_vllm=True, use_cpu=False, bf16=True, fp16=False, generation_kwargs=None)
    settings = engine_settings(config, args, messages.append)

    def alarmed(**extra: Any) -> str:
        messages.clear()
        trainer = new_trainer(objective="grpo", extra={"engine": settings, **extra})
        trainer.args.bf16 = True
        trainer.callback_handler.on_log(trainer.args, trainer.state, trainer.control, {"sampler/logp_difference": 0.02})
        return "".join(messages)

    assert advice in alarmed()
    assert not re.search(r"\bfloat16", alarmed(peft_config=None))  # refused if all weights train
    monkeypatch.setattr("kit.trainer.trainer.overflows_in_float16", lambda config: True)
    assert not re.search(r"\bfloat16", alarmed())
    args.generation_kwargs = {"min_tokens": 8}  # of a probe: the engine excludes the end tokens
    assert not engine_settings(config, args, print).compared  # type: ignore[union-attr]


def test_a_step_logs_them_and_a_chart_shows_them(new_trainer: Any) -> None:
    """The engine's log-probabilities differ by up to 0.07 nats from the trainer's."""
    trainer = new_trainer(objective={"recipe": "grpo", "weights": ["sampler_correction"]}, unchecked=True)
    make = trainer._generate_and_score_completions

    def reported(rows: Any) -> Any:
        output = make(rows)
        shape = output["completion_ids"].shape
        with torch.no_grad():
            from kit.trainer.policy_loss import MicroBatch

            logps = trainer.scorer.score(trainer.model, MicroBatch(output).rows).logps
        return output | {"sampling_per_token_logps": logps - 0.01 * torch.arange(shape[1])}

    trainer._generate_and_score_completions = reported
    trainer.train()
    logged = trainer.state.log_history[0]
    assert 1.0 <= logged["sampler/ratio/p01"] <= logged["sampler/ratio/p99"]
    lines = next(lines for title, _, lines in SIMPLE if title == "Trainer against engine")
    assert all(names[0] in logged for names in lines.values())
