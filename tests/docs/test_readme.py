"""The README's length, commands, code and numbers."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from code_blocks import ROOT, blocks, the_block

PAGE = ROOT / "README.md"
README = PAGE.read_text(encoding="utf-8")
HOOKS = ROOT / "docs/custom-hook.md"


def test_it_is_read_in_a_few_minutes() -> None:
    assert len(README.split()) <= 700  # as `wc -w` counts


def test_two_commands_do_the_set_up_and_ci_runs_the_same() -> None:
    typed = the_block(PAGE, "bash", "grpo-kit quickstart   #")
    commands = [line.partition("#")[0].strip() for line in typed.splitlines()]
    assert commands == ["pip install -q uv && uv run grpo-kit quickstart", "pip install -q uv && uv run --dev pytest"]
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in commands:
        install, _, run = command.partition(" && ")
        assert install in ci
        assert run in ci


def test_the_scores_are_those_that_the_benchmark_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import quickstart_seeds

    runs = json.loads((ROOT / "benchmarks/results/quickstart_seeds.json").read_text())["runs"]
    assert quickstart_seeds.scores(runs[0]) in README
    started = (ROOT / "docs/getting-started.md").read_text(encoding="utf-8")
    assert quickstart_seeds.step(runs[0]) in started
    assert quickstart_seeds.table(runs) in started
    for name in ("greedy_accuracy", "pass@1", "pass@4"):  # the table that the run itself prints
        before, after = (quickstart_seeds.cell(runs[0][when][name]) for when in ("before", "after"))
        assert f"│ {name.replace('_', ' '):<17} │ {before} │ {after} │" in started


def test_the_claim_of_speed_is_what_the_benchmark_wrote() -> None:
    rows = json.loads((ROOT / "benchmarks/results/real_model.json").read_text(encoding="utf-8"))["rows"]
    stock, kit = (row["step_seconds"] / sum(row["mean_tokens"]) for row in (rows["stock TRL"], rows["kit"]))
    text, same = " ".join(README.split()), rows["kit, TRL's generation"]
    assert f"{stock / kit:.1f} times as fast per token" in text
    assert f"with {rows['kit']['memory_gib'] / rows['stock TRL']['memory_gib']:.2f} of the memory" in text
    assert f"{rows['stock TRL']['step_seconds'] / same['step_seconds']:.1f} times with TRL's generation" in text
    assert same["losses"] == pytest.approx(rows["stock TRL"]["losses"], abs=1e-6)


# --- code blocks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of hooks from docs/custom-hook.md, whose first hook README shows."""
    code = the_block(HOOKS, "python", "def tanh_clip")
    assert the_block(PAGE, "python", "def tanh_clip").partition("def ")[2] in code
    (tmp_path / "my_hooks.py").write_text(code)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("hooks")
def test_the_hooks_compute_what_they_say() -> None:
    import torch

    from kit.objective import LossScale, Objective, TokenBatch

    objective = Objective(
        clip="my_hooks.py:tanh_clip",
        regularizers=[{"name": "my_hooks.py:long_tail", "coef": 0.5, "start": 1}],
        reduction="token_mean",
    )
    logps = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    old = torch.tensor([[-1.0, -2.1]])
    batch = TokenBatch(logps=logps, old_logps=old, advantages=torch.ones(1, 1), mask=torch.ones(1, 2, dtype=torch.bool))
    loss = objective.loss(batch, LossScale()).loss
    # tokens: -0.2·tanh(0/0.2) = 0 and -0.2·tanh(0.1/0.2) = -0.092423; the second is after `start`: + 0.5·(-2)
    assert loss.item() == pytest.approx((0.0 - 0.092423 - 1.0) / 2, abs=1e-5)
    loss.backward()
    # d/dlogp of -0.2·tanh(x/0.2) is -sech²(x/0.2): -1 at 0, and -(1 - 0.462117²) = -0.786448 at 0.1
    assert logps.grad is not None
    assert logps.grad.tolist()[0] == pytest.approx([-1.0 / 2, (-0.786448 + 0.5) / 2], abs=1e-5)


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize("page", [PAGE, HOOKS], ids=lambda page: page.name)
def test_the_command_with_the_hooks_is_accepted(page: Path) -> None:
    from kit.config import load_config
    from kit.runner.prepare import build_objective

    typed = the_block(page, "bash", "my_hooks.py:tanh_clip").replace("\\\n", " ").splitlines()
    words = shlex.split(next(line for line in typed if "objective.clip=" in line))
    assert "quickstart" in words
    overrides = [words[place + 1] for place, word in enumerate(words) if word == "-o"]
    spec = build_objective(load_config("quickstart", overrides)).to_spec()
    assert spec["clip"]["name"] == "my_hooks.py:tanh_clip"
    if page == HOOKS:
        assert spec["clip"]["width"] == 0.3
        assert spec["regularizers"][0]["start"] == 16


def test_the_reward_of_custom_reward_scores_as_it_says() -> None:
    names: dict[str, Any] = {}
    exec(the_block(ROOT / "docs/custom-reward.md", "python", "def ticket"), names)
    texts = ['{"category": "bug", "summary": "it stops here"}', '{"category": "bug", "summary": "no"}', "[" * 9]
    assert names["ticket"](texts, ["bug"] * 3) == [1.0, 0.2, 0.0]


def test_the_trainer_of_ones_own_is_built(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(model_folder),
        "dataset": Dataset.from_list([{"prompt": [{"role": "user", "content": "1 + 1 ="}], "reference": "2"}] * 8),
    }
    code = the_block(PAGE, "python", "from trl import GRPOConfig")
    exec(code.replace("GRPOConfig(", "GRPOConfig(use_cpu=True, "), names)  # TRL's defaults are those of a GPU
    weights: Callable[[], list[float]] = names["trainer"].reward_weights.tolist
    assert weights() == pytest.approx([1.0, 0.2, 0.1])


def test_the_counts_of_presets_and_recipes_are_true() -> None:
    import rewards
    from kit.objective import recipe_names

    started = (ROOT / "docs/getting-started.md").read_text(encoding="utf-8")
    assert f"one of {len(rewards.names())} presets" in started
    assert f"one of {len(recipe_names())} recipes" in started


def test_sizes_are_those_of_getting_started() -> None:
    sizes = re.findall(r"[\d.]+ GB", README)
    assert len(sizes) == 4  # to download and on disk, for each command
    started = (ROOT / "docs/getting-started.md").read_text(encoding="utf-8")
    assert [size for size in sizes if size not in started] == []


def test_every_block_is_short() -> None:
    assert [str(block) for block in blocks(PAGE) if len(block.text.splitlines()) > 12] == []
