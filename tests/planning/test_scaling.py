"""`grpo-kit scale`: the files for verl, and the settings reported as unsupported. In verl: tests/verl_trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import yaml
from scripts import load_script
from typer.testing import CliRunner

from kit.cli.app import app
from kit.config import load_config
from kit.config.loading import leaves
from kit.errors import ConfigError
from kit.planning.scaling import Scaled, scale
from kit.runner.prepare import build_reward

Tree = dict[str, Any]


@pytest.fixture
def run(tmp_path: Path) -> Tree:
    rows = "".join(f'{{"question": "What is {n} + 1?", "answer": "#### {n + 1}"}}\n' for n in range(40))
    (tmp_path / "rows.jsonl").write_text(rows)
    return {
        "model": {
            "name": "Qwen/Qwen2.5-0.5B-Instruct",
            "lora": {"rank": 8, "alpha": 16, "targets": ["q_proj", "v_proj"]},
        },
        "data": {"source": str(tmp_path / "rows.jsonl"), "heldout": 8},
        "reward": {"preset": "gsm8k-hash"},
        "objective": {"recipe": "grpo"},
        "generation": {"num_generations": 4, "top_p": 0.9, "vllm": {"eager": True}},
        "optimisation": {"batch_size": 32, "steps": 30, "iterations": 2, "learning_rate": 2e-6, "schedule": "cosine"},
        "evaluation": {"every": 6},
        "run": {"seed": 3, "save_every": 0},
    }


def scaled(tree: Tree, folder: Path) -> Scaled:
    return scale(load_config(tree), folder)


def test_values_stand_under_verls_names(run: Tree, tmp_path: Path) -> None:
    run["objective"] = {"recipe": "gspo", "clip": {"eps_high": 3e-3}, "regularizers": [{"name": "kl", "coef": 0.02}]}
    run["optimisation"] |= {"micro_batch_size": 8, "optimizer": "adamw_8bit"}
    run["data"] |= {"system_prompt": "Think.", "chat_template_kwargs": {"enable_thinking": False}}
    out = scaled(run, tmp_path / "out")
    out.write(tmp_path / "out", force=False)
    assert out.left == []
    there = dict(leaves(yaml.safe_load((tmp_path / "out/verl.yaml").read_text())))
    actor = "actor_rollout_ref.actor"
    expected = {
        "actor_rollout_ref.model.path": "Qwen/Qwen2.5-0.5B-Instruct", "actor_rollout_ref.model.lora_rank": 8,
        "actor_rollout_ref.model.target_modules": ["q_proj", "v_proj"], "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.top_p": 0.9, "actor_rollout_ref.rollout.top_k": -1,
        "actor_rollout_ref.rollout.enforce_eager": True, "data.seed": 3, "data.train_batch_size": 8,
        f"{actor}.ppo_micro_batch_size_per_gpu": 8, f"{actor}.optim.lr": 2e-6, f"{actor}.optim.lr_scheduler_type": "cosine",
        f"{actor}.optim.optimizer": "AdamW8bit", f"{actor}.use_kl_loss": True, f"{actor}.kl_loss_coef": 0.02,
        "data.apply_chat_template_kwargs.enable_thinking": False, "trainer.save_freq": -1,
    }  # fmt: skip
    assert {name: there.get(name) for name in expected} == expected
    assert there["grpo_kit.loss.clip.eps_high"] == 3e-3


def test_steps_are_counted_in_batches_there(run: Tree, tmp_path: Path) -> None:
    run["optimisation"] |= {"steps": 40, "iterations": 4, "warmup_steps": 8}
    run["evaluation"]["every"], run["run"]["save_every"] = 12, 20
    out = scaled(run, tmp_path / "out")
    assert out.left == []
    there = dict(leaves(out.tree))
    assert [there[f"trainer.{name}"] for name in ("total_training_steps", "test_freq", "save_freq")] == [10, 3, 5]
    actor = "actor_rollout_ref.actor"
    assert (there[f"{actor}.optim.lr_warmup_steps"], there[f"{actor}.ppo_epochs"]) == (2, 4)
    run["optimisation"]["warmup_steps"] = 9
    assert scaled(run, tmp_path / "out").left == [
        "optimisation.warmup_steps: 9: verl counts batches of 4 steps: 3 batches"
    ]


def written_reward(folder: Path) -> Any:
    return load_script(folder / "grpo_kit_rewards.py").compute_score


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("first", ["gsm8k-hash", None])
def test_further_presets_are_written_as_presets(first: str | None, own: bool, run: Tree, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def mine(completions, **_):\n    return [0.5] * len(completions)\n")
    run["data"]["system_prompt"] = "Think."
    further = {"path": "preset:length-target", "weight": 0.5, "params": {"target": 3, "tolerance": 2}}
    functions = [further, {"path": f"{tmp_path}/mine.py:mine", "weight": 2.0}]
    run["reward"] = {"preset": first, "functions": functions if own else [further]}
    out = scaled(run, tmp_path / "out")
    out.write(tmp_path / "out", force=False)
    compute_score = written_reward(tmp_path / "out")
    rows, heldout = (
        pyarrow.parquet.read_table(tmp_path / f"out/{name}.parquet").to_pylist() for name in ("train", "val")
    )
    assert (len(rows), len(heldout)) == (32, 8)
    row = rows[0]
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    answer = row["reward_model"]["ground_truth"]
    reward = build_reward(load_config(run)).verl()
    for text in (answer, "a b c", "no"):
        arguments = (row["data_source"], text, answer, row["extra_info"])
        score, expected = compute_score(*arguments), reward(*arguments)
        assert score["score"] == pytest.approx(expected["score"])
        assert score.get("mine", 0.5) == 0.5
        assert score.keys() >= {name for name in ("mine",) if own}
    assert "preset:" not in (tmp_path / "out/grpo_kit_rewards.py").read_text()


def test_what_has_no_place_there_is_told(run: Tree, tmp_path: Path) -> None:
    run["generation"]["min_p"] = 0.1
    run["selection"] = {"dynamic_sampling": {"max_rounds": 3}}
    run["optimisation"] |= {"schedule": "linear"}
    run["objective"] = {
        "recipe": "dapo", "weights": ["drop_truncated"],
        "clip": {"name": "ppo_clip", "eps_high": "linear(0.2, 0.3, 10)"},
        "regularizers": [{"name": "kl", "coef": "adaptive_kl(0.05)"}, {"name": "nll_on_correct"}],
    }  # fmt: skip
    out = scaled(run, tmp_path / "out")
    expected = ["generation.min_p: 0.1", "selection.dynamic_sampling.max_rounds: 3",
                "optimisation.schedule: \"linear\"", "weights drop_truncated",
                "clip ppo_clip: eps_high stays", "regularizers kl: coef stays at", "regularizers nll_on_correct"]  # fmt: skip
    for words in expected:
        assert any(words in line for line in out.left), (words, out.left)
    assert len(out.left) == len(expected), out.left
    assert out.tree["actor_rollout_ref"]["actor"]["optim"]["lr_scheduler_type"] == "constant"


@pytest.mark.parametrize(("change", "words"), [
    ({"model": {"name": "embedded"}}, "only available in the kit"),
    ({"optimisation": {"learning_rate": "auto"}}, "Set a number"),
    ({"generation": {"tools": ["a.py:b"]}}, "generation.tools"),
    ({"objective": {"recipe": "ppo"}}, "advantage 'gae' needs values"),
    ({"objective": {"recipe": "vespo", "clip": {"sampler_cap": 2.0}, "weights": ["sampler_correction"]}},
     "verl bounds it once"),
    ({"optimisation": {"batch_size": 400}}, "32 training rows, but a step needs 100"),
])  # fmt: skip
def test_what_cannot_be_carried_is_refused(change: Tree, words: str, run: Tree, tmp_path: Path) -> None:
    for section, values in change.items():
        run[section] = {**run.get(section, {}), **values}
    with pytest.raises(ConfigError, match=words):
        scaled(run, tmp_path / "out")


def test_the_command_writes_and_tells(run: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run["generation"]["min_p"] = 0.1
    Path("run.yaml").write_text(yaml.safe_dump(run))
    answer = CliRunner().invoke(app, ["scale", "run.yaml", "--to", "verl", "--out", "out", "--gpus", "2"])
    assert answer.exit_code == 0, answer.output
    assert "not converted: generation.min_p: 0.1: verl has no such setting" in answer.output
    assert f"--config-path={tmp_path / 'out'} --config-name=verl" in answer.output
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "grpo_kit_objective.py", "grpo_kit_rewards.py", "train.parquet", "val.parquet", "verl.yaml"
    ]  # fmt: skip
    assert yaml.safe_load(Path("out/verl.yaml").read_text())["trainer"]["n_gpus_per_node"] == 2
    again = CliRunner().invoke(app, ["scale", "run.yaml", "--out", "out"])
    assert again.exit_code == 2
    assert "verl" not in sys.modules
