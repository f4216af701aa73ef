"""`grpo-kit scale`: what verl and EasyR1 get, what is told, what `grpo-kit import` reads back. In verl: tests/verl_trainer."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import yaml
from typer.testing import CliRunner

from kit.cli.app import app
from kit.config import load_config
from kit.config.loading import leaves
from kit.errors import ConfigError
from kit.planning.importing import import_file
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


def scaled(tree: Tree, trainer: str, folder: Path) -> Scaled:
    return scale(load_config(tree), trainer, folder)


def test_what_scale_wrote_is_imported_as_the_same_run(run: Tree, tmp_path: Path) -> None:
    """Every value of the configuration, for verl; objective, reward and data lie in a section of their own."""
    run["objective"] = {"recipe": "gspo", "clip": {"eps_high": 3e-3}, "regularizers": [{"name": "kl", "coef": 0.02}]}
    run["optimisation"] |= {"micro_batch_size": 8, "optimizer": "adamw_8bit"}
    run["data"] |= {"system_prompt": "Think.", "chat_template_kwargs": {"enable_thinking": False}}
    out = scaled(run, "verl", tmp_path / "out")
    out.write(tmp_path / "out", force=False)
    assert out.left == []
    back = import_file(tmp_path / "out/verl.yaml")
    assert dict(leaves(load_config(back.tree).model_dump())) == dict(leaves(load_config(run).model_dump()))
    assert not back.mistakes or "at most 256 tokens" in back.mistakes[0]


@pytest.mark.parametrize("trainer", ["verl", "easyr1"])
def test_steps_are_counted_in_batches_there(trainer: str, run: Tree, tmp_path: Path) -> None:
    run["optimisation"] |= {"steps": 40, "iterations": 4, "warmup_steps": 8}
    run["evaluation"]["every"], run["run"]["save_every"] = 12, 20
    out = scaled(run, trainer, tmp_path / "out")
    out.write(tmp_path / "out", force=False)
    assert out.left == []
    there = dict(leaves(out.tree))
    actor = "actor_rollout_ref.actor" if trainer == "verl" else "worker.actor"
    steps, looks = ("total_training_steps", "test_freq") if trainer == "verl" else ("max_steps", "val_freq")
    assert [there[f"trainer.{name}"] for name in (steps, looks, "save_freq")] == [10, 3, 5]
    assert (there[f"{actor}.optim.lr_warmup_steps"], there[f"{actor}.ppo_epochs"]) == (2, 4)
    back = load_config(import_file(tmp_path / f"out/{trainer}.yaml").tree)
    assert (back.optimisation.steps, back.optimisation.iterations, back.optimisation.warmup_steps) == (40, 4, 8)
    assert (back.evaluation.every, back.run.save_every) == (12, 20)
    run["optimisation"]["warmup_steps"] = 9
    assert scaled(run, trainer, tmp_path / "out").left == [
        f"optimisation.warmup_steps: 9: {trainer} counts batches of 4 steps, and gets 3 of them"
    ]


@pytest.mark.parametrize("objective", [
    {"recipe": "grpo", "clip": {"eps_low": 0.1, "eps_high": 0.3}, "regularizers": [{"name": "kl", "coef": 0.01}]},
    {"recipe": "gspo"}, {"recipe": "sapo", "clip": {"tau_pos": 1.5}, "reduction": "token_mean"},
    {"recipe": "cispo", "clip": {"eps_high": 4.0}, "reduction": "token_mean"},
    {"recipe": "grpo", "advantage": "leave_one_out"},
])  # fmt: skip
def test_easyr1_has_the_objective_in_its_own_keys(objective: Tree, run: Tree, tmp_path: Path) -> None:
    from kit.objective import Objective

    out = scaled({**run, "objective": objective}, "easyr1", tmp_path / "out")
    out.write(tmp_path / "out", force=False)
    assert out.left == []
    back = load_config(import_file(tmp_path / "out/easyr1.yaml").tree)
    seen = Objective.from_spec(back.objective.model_dump(exclude_none=True)).to_spec()
    assert seen == Objective.from_spec(objective).to_spec()
    before = dict(leaves(load_config(run).model_dump()))
    for section in ("model", "generation", "optimisation", "evaluation", "run"):
        for key, value in leaves(back.model_dump()[section], section):
            assert value == before[key], key


def test_rows_and_reward_are_what_the_trainers_ask_for(
    run: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run["data"]["system_prompt"] = "Think."
    (tmp_path / "mine.py").write_text("def mine(completions, **_):\n    return [0.5] * len(completions)\n")
    run["reward"]["functions"] = [{"path": f"{tmp_path}/mine.py:mine", "weight": 2.0}]
    verl, easy = (scaled(run, trainer, tmp_path / trainer) for trainer in ("verl", "easyr1"))
    assert any("several messages" in line for line in easy.left)
    for out in (verl, easy):
        out.write(tmp_path / out.trainer, force=False)
        rows = pyarrow.parquet.read_table(tmp_path / out.trainer / "train.parquet").to_pylist()
        heldout = pyarrow.parquet.read_table(tmp_path / out.trainer / "val.parquet").to_pylist()
        assert (len(rows), len(heldout)) == (32, 8)
        spec = importlib.util.spec_from_file_location("theirs", tmp_path / out.trainer / "grpo_kit_rewards.py")
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        row = rows[0]
        if out is verl:
            answer = row["reward_model"]["ground_truth"]
            assert [one["role"] for one in row["prompt"]] == ["system", "user"]
            score = module.compute_score(row["data_source"], answer, answer, row["extra_info"])
            total = score["score"]
        else:
            assert row["prompt"].startswith("Think.\n\nWhat is")
            score = module.compute_score(
                [{"response": row["answer"], "ground_truth": row["answer"], "response_length": 3}]
            )[0]
            total = score["overall"]
        assert (score["accuracy"], score["mine"]) == (1.0, 0.5)
        assert total == pytest.approx(1.1 + 2.0 * 0.5)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("first", ["gsm8k-hash", None])
def test_further_presets_are_written_as_presets(first: str | None, own: bool, run: Tree, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def mine(completions, **_):\n    return [0.5] * len(completions)\n")
    further = {"path": "preset:length-target", "weight": 0.5, "params": {"target": 3, "tolerance": 2}}
    functions = [further, {"path": f"{tmp_path}/mine.py:mine", "weight": 2.0}]
    run["reward"] = {"preset": first, "functions": functions if own else [further]}
    out = scaled(run, "verl", tmp_path / "out")
    out.write(tmp_path / "out", force=False)
    spec = importlib.util.spec_from_file_location("theirs", tmp_path / "out/grpo_kit_rewards.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    row = pyarrow.parquet.read_table(tmp_path / "out/train.parquet").to_pylist()[0]
    answer = row["reward_model"]["ground_truth"]
    theirs = build_reward(load_config(run)).verl()
    for text in (answer, "a b c", "no"):
        given = (row["data_source"], text, answer, row["extra_info"])
        found, expected = module.compute_score(*given), theirs(*given)
        assert found["score"] == pytest.approx(expected["score"])
        assert found.keys() >= {name for name in ("mine",) if own}
    assert "preset:" not in (tmp_path / "out/grpo_kit_rewards.py").read_text()


def test_what_has_no_place_there_is_told(run: Tree, tmp_path: Path) -> None:
    run["generation"]["min_p"] = 0.1
    run["selection"] = {"pods": {"keep": 2}}
    run["optimisation"] |= {"schedule": "linear"}
    run["objective"] = {
        "recipe": "dapo", "weights": ["drop_truncated"],
        "clip": {"name": "ppo_clip", "eps_high": "linear(0.2, 0.3, 10)"},
        "regularizers": [{"name": "kl", "coef": "adaptive_kl(0.05)"}, {"name": "length_penalty"}],
    }  # fmt: skip
    out = scaled(run, "verl", tmp_path / "out")
    expected = ["generation.min_p: 0.1", "selection.pods.keep: 2", "optimisation.schedule: \"linear\"", "weights drop_truncated",
                "clip ppo_clip: eps_high stays", "regularizers kl: coef stays at", "regularizers length_penalty"]  # fmt: skip
    for words in expected:
        assert any(words in line for line in out.left), (words, out.left)
    assert len(out.left) == len(expected), out.left
    assert out.tree["actor_rollout_ref"]["actor"]["optim"]["lr_scheduler_type"] == "constant"


@pytest.mark.parametrize(("change", "trainer", "words"), [
    ({"model": {"name": "embedded"}}, "verl", "comes with the kit"),
    ({"optimisation": {"learning_rate": "auto"}}, "verl", "Set the number"),
    ({"generation": {"tools": ["a.py:b"]}}, "verl", "generation.tools"),
    ({"objective": {"recipe": "ppo"}}, "verl", "advantage 'gae' needs values"),
    ({"objective": {"recipe": "vespo"}}, "easyr1", "verl takes any"),
    ({"objective": {"recipe": "vespo", "clip": {"sampler_cap": 2.0}, "weights": ["sampler_correction"]}}, "verl",
     "bounds them once"),
    ({"optimisation": {"batch_size": 400}}, "verl", "32 rows to train on, and a step takes 100"),
    ({}, "nemo", "known are verl, easyr1"),
])  # fmt: skip
def test_what_cannot_be_carried_is_refused(change: Tree, trainer: str, words: str, run: Tree, tmp_path: Path) -> None:
    for section, values in change.items():
        run[section] = {**run.get(section, {}), **values}
    with pytest.raises(ConfigError, match=words):
        scaled(run, trainer, tmp_path / "out")


def test_the_command_writes_and_tells(run: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run["generation"]["min_p"] = 0.1
    Path("run.yaml").write_text(yaml.safe_dump(run))
    answer = CliRunner().invoke(app, ["scale", "run.yaml", "--to", "verl", "--out", "out", "--gpus", "2"])
    assert answer.exit_code == 0, answer.output
    assert "not carried: generation.min_p: 0.1: verl has no such setting" in answer.output
    assert f"--config-path={tmp_path / 'out'} --config-name=verl" in answer.output
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "grpo_kit_objective.py", "grpo_kit_rewards.py", "train.parquet", "val.parquet", "verl.yaml"
    ]  # fmt: skip
    assert yaml.safe_load(Path("out/verl.yaml").read_text())["trainer"]["n_gpus_per_node"] == 2
    again = CliRunner().invoke(app, ["scale", "run.yaml", "--out", "out"])
    assert again.exit_code == 2
    assert "verl" not in sys.modules
