"""A run directory that looks trained: the tiny embedded model with an adapter of clear effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kit.config import load_config
from kit.data import load_data
from kit.runs.store import RunDir, RunStore


def finished_run(root: Path) -> RunDir:
    """Write a finished run of the quickstart whose files of weights cannot be loaded."""
    run = RunStore(root).create("it")
    run.write_text("config.yaml", load_config("quickstart").to_yaml())
    run.write_json("adapter/adapter_config.json", {})
    run.write_json("checkpoint-30/trainer_state.json", {})
    run.write_status("finished", step=60)
    return run


def make_run(
    root: Path, run_id: str, model_folder: Path, *, lora: bool = True, more: dict[str, Any] | None = None
) -> RunDir:
    """Write a finished run with weights of step 2, and scores before and after; `more` replaces sections of the configuration."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoTokenizer

    from kit.models.family import auto_class
    from kit.runner.prepare import fit_prompts

    tree: dict[str, Any] = {
        "model": {"name": str(model_folder), "dtype": "float32", "lora": {"rank": 4, "alpha": 8} if lora else None},
        "data": {
            "source": "reasoning-gym:chain_sum",
            "task_params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            "limit": 60,
            "heldout": 20,
        },
        "generation": {"num_generations": 4, "max_completion_tokens": 16},
        "optimisation": {"steps": 2, "batch_size": 8},
        "run": {"id": run_id, "root": str(root)},
    }
    run = RunStore(root).create(run_id)
    tree = tree if more is None else {**tree, **more}
    config = load_config(tree)
    run.write_text("config.yaml", config.to_yaml())
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    data = fit_prompts(config, load_data(config.data), tokenizer)
    run.write_json("data.json", data.info)
    data.heldout.to_parquet(run.heldout)
    model = auto_class(AutoConfig.from_pretrained(model_folder)).from_pretrained(model_folder)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        if lora:
            model = get_peft_model(
                model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
            )
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.02)
            elif not lora and weight.ndim == 2:
                weight.data += 0.005 * torch.randn_like(weight)
    model.save_pretrained(run.adapter)
    tokenizer.save_pretrained(run.adapter)
    for name, step, right in (("before", 0, 0.25), ("after", 2, 0.5)):
        score = {"value": right, "low": right - 0.1, "high": right + 0.1}
        run.write_json(f"eval/{name}.json", {"step": step, "problems": 20, "checker": "x/y", "pass@1": score})
    run.write_json("env.json", {"packages": {"trl": "1.15.0"}})
    run.write_status("finished", step=2, total_steps=2)
    return run
