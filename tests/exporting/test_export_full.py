"""Exports of runs that trained all weights: what they began with is what the update is found by."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from exporting_runs import make_run
from safetensors.torch import load_file, save_file

from kit.export import job
from kit.export.request import ExportRequest
from kit.runner.console import Reporter
from kit.runs.store import RunDir

WEIGHTS = "model.safetensors"


def export(run: RunDir, to: str, **options: Any) -> dict[str, Any]:
    return job.export(run, ExportRequest(to, **options).request(run), Reporter(quiet=True))


def full_run(model_folder: Path, tmp_path: Path) -> RunDir:
    """A run that trained all weights of a bfloat16 base: by 0.1 to 0.3 of a step of bfloat16, each."""
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    shutil.copytree(model_folder, base)
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    run = make_run(tmp_path / "runs", "full", base, lora=False)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(2)
        for weight in model.parameters():
            step = torch.exp2(weight.abs().clamp_min(1e-6).log2().floor() - 7)
            weight += (
                step * (0.1 + 0.2 * torch.rand_like(weight)) * weight.sign()
            )  # away from zero: no finer steps there
    model.save_pretrained(run.adapter)
    return run


def test_all_weights_trained_and_rounded_back_to_the_base_are_not_verified(model_folder: Path, tmp_path: Path) -> None:
    run = full_run(model_folder, tmp_path)
    result = export(run, "merged-16bit", dtype="bfloat16", prompts=4)
    stored, base = load_file(Path(result["path"]) / WEIGHTS), load_file(tmp_path / "base" / WEIGHTS)
    assert all(torch.equal(stored[name], base[name]) for name in stored)  # the defect: bit for bit the base
    assert any("lost in rounding" in fault for fault in result["verification"]["faults"])
    assert result["verification"]["comparison"]["training_effect"] > 0
    good = export(run, "merged-16bit", prompts=4)
    assert good["verification"]["faults"] == []
    assert good["stored"] in ("float16", "float32")
    assert 0.9 < good["verification"]["weights"]["update_kept"] < 1.1
    assert good["verification"]["weights"]["updated"] == good["verification"]["weights"]["tensors"]
    assert not any("cannot be had" in note for note in good["notes"])


def test_updates_below_the_steps_of_float16_are_stored_as_float32(model_folder: Path, tmp_path: Path) -> None:
    run = full_run(model_folder, tmp_path)
    base = load_file(tmp_path / "base" / WEIGHTS)
    trained = {name: value.float() * (1 + 2.0**-14) for name, value in base.items()}
    save_file(trained, run.adapter / WEIGHTS, {"format": "pt"})
    result = export(run, "merged-16bit", prompts=2)
    assert (result["stored"], result["verification"]["faults"]) == ("float32", [])
    assert any("stored as float32" in note for note in result["notes"])


def test_a_base_that_is_gone_is_told_and_can_be_named(model_folder: Path, tmp_path: Path) -> None:
    run = full_run(model_folder, tmp_path)
    (tmp_path / "base").rename(tmp_path / "moved")
    result = export(run, "merged-16bit", prompts=2)
    assert (result["stored"], result["verification"]["faults"]) == ("float16", [])
    assert result["verification"]["comparison"]["training_effect"] is None
    assert sum("cannot be had, so the update is not known" in note for note in result["notes"]) == 1
    named = export(run, "merged-16bit", prompts=2, base=str(tmp_path / "moved"), force=True)
    assert named["notes"] == []
    assert named["verification"]["comparison"]["training_effect"] is not None
