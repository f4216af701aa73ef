"""What the README promises is true: its commands, its code, its tree."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str, containing: str) -> str:
    """The one code block of that language which contains a text."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    found = [text for kind, text in fenced if kind == language and containing in text]
    assert len(found) == 1, f"{len(found)} {language} blocks contain {containing!r}"
    return str(found[0])


def test_two_commands_do_the_set_up_and_ci_runs_the_same() -> None:
    commands = [line.partition("#")[0].strip() for line in block("bash", "grpo-kit quickstart   #").splitlines()]
    assert commands == ["pip install -q uv && uv run grpo-kit quickstart", "pip install -q uv && uv run pytest"]
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in commands:
        install, _, run = command.partition(" && ")
        assert install in ci
        assert run in ci


OPENED_FIRST = {"kit/train.py", "kit/api.py", "kit/run.py", "kit/cli.py", "kit/config.py", "rewards/preset.py"}


def tree_faults(tree: str) -> list[str]:
    """Names in a tree that do not exist, folders of modules and files to open first that it leaves out."""
    named = re.findall(r"(?:^|  )((?:kit|rewards|tests|benchmarks|\.ci)/[\w./]*)", tree, re.MULTILINE)
    modules = [path for part in ("kit", "rewards") for path in (ROOT / part).rglob("*.py")]
    folders = {f"{path.parent.relative_to(ROOT).as_posix()}/" for path in modules}
    return [
        *(f"{name} does not exist" for name in named if not (ROOT / name).exists()),
        *(f"{folder} has no line" for folder in sorted(folders) if not any(name.startswith(folder) for name in named)),
        *(f"{name} has no line" for name in sorted(OPENED_FIRST - set(named))),
    ]


def test_the_tree_names_every_folder_and_the_files_to_open_first() -> None:
    assert tree_faults(block("", "kit/train.py ")) == []


def test_a_tree_with_a_fault_is_found() -> None:
    tree = block("", "kit/train.py ")
    without = "".join(line for line in tree.splitlines(keepends=True) if "kit/sweeps/" not in line)
    for planted, fault in (
        (tree + "kit/nothing.py   gone\n", "kit/nothing.py does not exist"),
        (without, "kit/sweeps/ has no line"),
        (tree.replace("kit/run.py ", "kit/api.py "), "kit/run.py has no line"),
    ):
        assert set(tree_faults(planted)) - set(tree_faults(tree)) == {fault}


def test_pictures_and_links_exist() -> None:
    local = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if not target.startswith("http")]
    assert "docs/images/quickstart.png" in local
    assert [target for target in local if not (ROOT / target).exists()] == []


def test_the_numbers_are_those_that_the_benchmarks_wrote() -> None:
    import json

    seeds = json.loads((ROOT / "benchmarks/results/quickstart_seeds.json").read_text())
    for run in seeds["runs"]:
        for when in ("before", "after"):
            score = run[when]["greedy_accuracy"]
            assert f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]" in README
    for row in json.loads((ROOT / "benchmarks/results/head.json").read_text())["rows"]:
        plain, ours, middle = row["peak_mb"]["plain"], row["peak_mb"]["ours"], row["median"]
        entropy = "yes" if row["entropy_gradient"] else "no"
        cells = f"| {row['head']} | {entropy} | {row['vocab']:,} | {plain:,.0f} MB | {ours:.0f} MB |"
        assert f"{cells} {middle['ours'] / middle['plain']:.2f} | {middle['ours'] / middle['trl']:.2f} |" in README


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_hooks.py").write_text(block("python", "def tanh_clip"))
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
def test_the_command_with_the_hooks_is_accepted() -> None:
    import shlex

    from kit.config import load_config
    from kit.training.preparation import build_objective

    words = shlex.split(block("bash", "my_hooks.py:tanh_clip").replace("\\\n", " "))
    assert words[:4] == ["uv", "run", "grpo-kit", "quickstart"]
    overrides = [words[place + 1] for place, word in enumerate(words) if word == "-o"]
    spec = build_objective(load_config("quickstart", overrides)).to_spec()
    assert spec["clip"] == {"name": "my_hooks.py:tanh_clip", "width": 0.2}
    assert spec["regularizers"][0]["start"] == 40


def test_the_trainer_of_ones_own_is_built(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(model_folder),
        "dataset": Dataset.from_list([{"prompt": [{"role": "user", "content": "1 + 1 ="}], "reference": "2"}] * 8),
    }
    code = block("python", "from trl import GRPOConfig")
    exec(code.replace("GRPOConfig(", "GRPOConfig(use_cpu=True, "), names)  # TRL's defaults are those of a GPU
    weights: Callable[[], list[float]] = names["trainer"].reward_weights.tolist
    assert weights() == pytest.approx([1.0, 0.2, 0.1])
