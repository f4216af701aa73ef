"""Training from an adapter: initial policy, reference, resuming, and export."""

from __future__ import annotations

import copy
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import kit.runner.resume
import kit.train
from kit.chat.answering import ChatModels
from kit.config import ModelConfig, load_config
from kit.errors import ConfigError, KitError, ModelError
from kit.export import job
from kit.export.request import ExportRequest
from kit.generation.vllm import merged_weights
from kit.models.loading import find_model
from kit.models.start import REFERENCE, untrained
from kit.runner.console import Reporter
from kit.runs.store import RunDir

TOKENS = torch.arange(5, 15)[None]


@pytest.fixture(scope="module")
def sft(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter with a large effect, whose rank and targets differ from those of the runs."""
    folder = tmp_path_factory.mktemp("sft") / "adapter"
    with torch.random.fork_rng():
        torch.manual_seed(5)
        lora = LoraConfig(r=3, lora_alpha=9, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), lora)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.05)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def started(
    tree: Any, sft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> dict[str, torch.Tensor]:
    """Set `tree` to start from the adapter `sft`, with a KL term; return the log-probabilities recorded by its run."""
    tree["model"]["adapter"] = str(sft)
    tree["objective"] = {"recipe": "grpo", "regularizers": [{"name": "kl", "coef": 0.5}]}
    tree["optimisation"]["learning_rate"] = 1e-2
    (tmp_path / "placed.py").write_text(
        "def placed(completion_ids, **_):\n"
        "    return [sum(at * token for at, token in enumerate(ids, 1)) % 101 / 101 for ids in completion_ids]\n"
    )
    tree["reward"] = {"functions": [{"path": f"{tmp_path}/placed.py:placed"}]}
    train_on, logps = kit.runner.resume.train_on, {}
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        logps["base"] = base(TOKENS).logits.log_softmax(-1)
        logps["sft"] = PeftModel.from_pretrained(base, sft).eval()(TOKENS).logits.log_softmax(-1)

    def watched(trainer: Any, resumption: Any) -> None:
        def says() -> torch.Tensor:
            with torch.no_grad():
                return trainer.model.eval()(TOKENS).logits.log_softmax(-1)

        logps["start"] = says()
        engine = AutoModelForCausalLM.from_pretrained(trainer.model.get_base_model().name_or_path)
        engine.load_state_dict(dict(merged_weights(trainer.model) or ()), strict=False)  # as vLLM receives them
        with torch.no_grad():
            logps["engine"] = engine(TOKENS).logits.log_softmax(-1)
        train_on(trainer, resumption)
        logps["end"] = says()
        with untrained(trainer.model):
            logps["reference"] = says()

    monkeypatch.setattr("kit.runner.resume.train_on", watched)
    return logps


def test_a_run_starts_as_the_adapter_which_stays_its_reference_and_exports_what_was_trained(
    attempt: Any, started: dict[str, torch.Tensor], model_folder: Path, tmp_path: Path
) -> None:
    done = attempt()
    assert done.code == 0, done.message
    torch.testing.assert_close(started["start"], started["sft"], atol=1e-5, rtol=0)
    torch.testing.assert_close(started["engine"], started["sft"], atol=1e-5, rtol=0)
    torch.testing.assert_close(started["reference"], started["sft"], atol=1e-5, rtol=0)
    assert (started["sft"] - started["base"]).abs().max() > 0.1
    assert (started["end"] - started["start"]).abs().max() > 1e-3
    first, second = [line for line in done.folder.metrics() if "kl/k3" in line][:2]
    assert first["kl/k3"] == pytest.approx(0, abs=1e-6)
    assert second["kl/k3"] > 1e-6
    lora = load_config(done.folder.config).model.lora
    assert lora is not None
    assert lora.rank == 3
    chat = ChatModels(done.folder, None)
    for side, key in (("base", "sft"), ("tuned", "end")):
        with untrained(chat.tuned) if side == "base" else nullcontext(), torch.no_grad():
            logps = chat.tuned(TOKENS).logits.log_softmax(-1)
        torch.testing.assert_close(logps, started[key], atol=1e-5, rtol=0)
    for to in ("adapter", "merged_16bit"):
        place = tmp_path / to
        request = ExportRequest(to, out=place, prompts=3).for_run(done.folder) | {"dtype": "float32"}
        assert job.export(done.folder, request, Reporter(quiet=True))["verification"]["faults"] == []
        if to == "adapter":
            model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), place).eval()
        else:
            model = AutoModelForCausalLM.from_pretrained(place).eval()
        with torch.no_grad():
            torch.testing.assert_close(model(TOKENS).logits.log_softmax(-1), started["end"], atol=1e-5, rtol=0)


def test_a_run_from_an_adapter_resumes_to_the_bit(
    tree: Any, attempt: Any, started: dict[str, torch.Tensor], sft: Path
) -> None:
    override = "run.save_every=1"
    once = attempt(override, "run.id=whole", "optimisation.steps=3").folder
    assert attempt(override, "run.id=parts", "optimisation.steps=2").code == 0
    longer = load_config(copy.deepcopy(tree), [override, "run.id=parts", "optimisation.steps=3"])
    parts: RunDir = kit.train.run(longer, quiet=True, resume=True)
    torch.testing.assert_close(started["reference"], started["sft"], atol=1e-5, rtol=0)
    name = "adapter_model.safetensors"
    assert (parts.adapter / name).read_bytes() == (once.adapter / name).read_bytes()
    assert not (once.adapter / REFERENCE).exists()
    last = [
        line["kl/k3"] for run in (once, parts) for line in run.metrics() if line.get("step") == 3 and "kl/k3" in line
    ]
    assert last[0] == last[1] > 0


def test_unusable_start_adapters_are_refused(model_folder: Path, sft: Path, tmp_path: Path) -> None:
    def config(**changes: Any) -> ModelConfig:
        return ModelConfig(**{"name": str(model_folder), "adapter": str(sft), "dtype": "float32"} | changes)

    with pytest.raises(ModelError, match=r"no adapter_config\.json"):
        find_model(config(adapter=str(model_folder)), chat=True)
    with pytest.raises(ModelError, match="there is no folder"):
        find_model(config(adapter="./nowhere"), chat=True)
    odd = tmp_path / "odd"
    shutil.copytree(sft, odd)
    text = (odd / "adapter_config.json").read_text().replace('"use_dora": false', '"use_dora": true')
    (odd / "adapter_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"use_dora.*merge_and_unload"):
        find_model(config(adapter=str(odd)), chat=True)
    with pytest.raises(ConfigError, match="lora is null"):
        load_config({"model": {"adapter": str(sft), "lora": None}})
    assert issubclass(ModelError, KitError)
