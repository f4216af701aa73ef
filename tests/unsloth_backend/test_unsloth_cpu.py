"""`model.backend: unsloth-cpu` in real runs: the steps of transformers, and resuming."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_processes
import yaml

pytestmark = [pytest.mark.unsloth, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
PER_MACHINE = ("seconds", "time", "latency", "per_second", "runtime", "memory")
Tree = dict[str, Any]


def command(folder: Path, *words: str) -> str:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "kit.cli", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metrics(folder: Path, run: str) -> list[dict[str, float]]:
    lines = (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not any(word in name for word in PER_MACHINE)}
        for line in lines
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("unsloth-cpu")


@pytest.fixture
def config(tree: Tree, folder: Path) -> str:
    tree["run"] = {"root": "runs", "threads": 1, "save_every": 2}
    tree["optimisation"] |= {"steps": 2, "micro_batch_size": 4, "schedule": "constant"}
    tree["generation"] |= {"engine": "hf", "max_completion_tokens": 12}
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return "run.yaml"


def test_the_same_yaml_is_the_same_run_and_goes_on(folder: Path, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIT_FAST_DECODING", "0")  # Unsloth's own `generate` draws like transformers'
    command(folder, "train", config, "-o", "run.id=plain", "-o", "optimisation.steps=4")
    with warm_processes.cold():  # warm processes have imported TRL, but Unsloth must be imported first
        command(folder, "train", config, "-o", "run.id=unsloth", "-o", "model.backend=unsloth-cpu")
        command(folder, "resume", "unsloth", "--force", "-o", "optimisation.steps=4")

    on_unsloth, expected = metrics(folder, "unsloth"), metrics(folder, "plain")
    assert len(on_unsloth) == len(expected) == 4
    assert any(plain["loss"] for plain in expected), "the comparison would be empty"
    for mine, plain in zip(on_unsloth, expected, strict=True):
        assert mine["loss"] == pytest.approx(plain["loss"], rel=1e-5, abs=1e-7)
        assert mine["reward"] == pytest.approx(plain["reward"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)

    records = [json.loads((folder / "runs" / run / "env.json").read_text()) for run in ("unsloth", "plain")]
    assert records[0]["backend"]["name"] == "unsloth-cpu"
    assert "changed_by_backend" not in records[0]
    differing = ("output_dir", "run_name", "max_steps")  # env.json describes the run before it was resumed
    arguments = [
        {name: value for name, value in record["trainer_arguments"].items() if name not in differing}
        for record in records
    ]
    assert arguments[0] == arguments[1]
    assert "unsloth:" in (folder / "runs" / "unsloth" / "log.txt").read_text()
    assert not list(folder.glob("unsloth_compiled_cache"))


PREPARE = """
import sys
from kit.config import load_config, preset_names
from kit.runner.prepare import prepare

for name in preset_names():
    asked = load_config(name)
    model = "embedded-tools" if asked.generation.tools or asked.generation.environment else "embedded"
    changes = [f"model.name={model}", "model.backend=unsloth-cpu", "model.load_in_4bit=false", "data.chat_template_kwargs={}"]
    changes += ["model.dtype=float32", "optimisation.optimizer=adamw", "generation.max_completion_tokens=64"]
    changes += ["data.limit=24", "data.heldout=2"]  # some presets need seconds to generate problems
    if not asked.data.source.startswith("reasoning-gym:"):
        changes += ["data.source=rows.jsonl", "data.subset=null", "data.limit=null"]
        changes += ["reward.preset=gsm8k-reasoning", "reward.params={}"]
    prepare(load_config(name, changes))
    assert "trl" not in sys.modules, name
    print(name)
"""


def test_no_preset_imports_trl_before_its_backend_is_active(folder: Path) -> None:
    """TRL must not be imported before Unsloth, which rewrites TRL only while TRL is imported."""
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(80)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_rewards.py").write_text(
        "def short(prompts, completions, **_):\n    return [0.0] * len(completions)\n"
    )
    with warm_processes.cold():
        done = subprocess.run(
            [sys.executable, "-c", PREPARE],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "calculator" in done.stdout.split()
    assert len(done.stdout.split()) >= 8
