"""The wheel: its contents, and the quickstart from it in a new environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]


def test_the_wheel_holds_the_two_packages_with_the_models_and_nothing_else(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    (made,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with ZipFile(made) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {
        path.relative_to(ROOT).as_posix()
        for package in ("kit", "rewards")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.name not in (".gitattributes", "pyproject.toml") and "__pycache__" not in path.parts
    }
    assert names == expected
    assert Path(made).stat().st_size < 6e6


@pytest.fixture
def uv(tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs uv in `tmp_path` with the machine's cache, and returns its output."""
    places = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")
    tool = os.environ | {"UV_CACHE_DIR": subprocess.check_output(["uv", "cache", "dir"], text=True).strip()}
    tool |= {"UV_FIND_LINKS": places} if places else {}

    def run(*arguments: object) -> str:
        done = subprocess.run(["uv", *map(str, arguments)], env=tool, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.install
def test_the_quickstart_runs_from_another_folder_in_a_fresh_environment(tmp_path: Path, uv: Callable[..., str]) -> None:
    """Install a wheel that is built from the source distribution, with the other packages in the tested versions."""
    python, bare = tmp_path / "env" / "bin" / "python", {"PATH", "UV", "LANG", "SSL_CERT_FILE"}
    uv("build", "-q", "--out-dir", "made", ROOT)
    (wheel,) = (tmp_path / "made").glob("*.whl")
    pins = {package.name: package.version for package in distributions() if package.name != "grpo-kit"}
    (tmp_path / "pins.txt").write_text("".join(f"{name}=={version}\n" for name, version in sorted(pins.items())))
    uv("venv", "-q", "--python", sys.executable, "env")
    uv("pip", "install", "-q", "--python", python, "--constraint", "pins.txt", wheel)
    listed = uv("pip", "list", "--python", python)
    assert "pytest" not in listed
    assert "unsloth" not in listed

    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (package,) = (tmp_path / "env").glob("lib/*/site-packages/kit")
    before = contents(package)
    done = subprocess.run(
        [python.with_name("grpo-kit"), "quickstart", "--steps", "2", "-o", "evaluation.prompts=20"],
        env={name: value for name, value in os.environ.items() if name in bare} | {"HOME": str(home), "OMP_NUM_THREADS": "1"},
        cwd=elsewhere,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "greedy accuracy" in done.stdout
    (run,) = (elsewhere / "runs").glob("quickstart-*")
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    assert (run / "report.html").is_file()
    assert contents(package) == before
    assert list(home.rglob("*.safetensors")) == []


# Calls the rewards as three trainers do, in an environment without these trainers.
SCORING = """
import importlib.util, json, sys
from rewards import load

completions = [f"<think>6 x 12</think><answer>{n}</answer>" for n in (72, 70)]
messages = [[{"role": "assistant", "content": text}] for text in completions]
trl = load("gsm8k-reasoning").trl()
given = {"prompts": ["6 x 12?"] * 2, "completion_ids": [[1, 2]] * 2, "answer": ["72"] * 2, "trainer_state": None}
verl, easyr1 = load("math-verify", answer_in="tag").verl(), load("gsm8k-reasoning").easyr1()
print(json.dumps({
    "trl": [reward(completions=messages, **given) for reward in trl],
    "weights": trl.reward_weights,
    "verl": [verl(data_source="gsm8k", solution_str=text, ground_truth="144/2", extra_info={"split": "train"})["score"]
             for text in completions],
    "easyr1": [row["overall"] for row in easyr1(
        [{"response": text, "response_length": 2, "ground_truth": "72"} for text in completions])],
    "heavy": [name for name in ("torch", "trl", "transformers", "matplotlib", "kit") if importlib.util.find_spec(name)],
    "module": sys.modules["rewards"].__file__,
}))
"""


def test_the_rewards_alone_are_of_the_kits_version() -> None:
    kit, alone = (
        tomllib.loads((ROOT / path).read_text())["project"] for path in ("pyproject.toml", "rewards/pyproject.toml")
    )
    assert alone["version"] == kit["version"]
    assert alone["requires-python"] == kit["requires-python"]
    assert set(alone["dependencies"]) <= set(kit["dependencies"])


@pytest.mark.install
def test_the_rewards_alone_score_for_three_trainers_in_an_empty_environment(
    tmp_path: Path, uv: Callable[..., str]
) -> None:
    uv("build", "-q", "--out-dir", "made", ROOT / "rewards")
    (wheel,) = (tmp_path / "made").glob("*.whl")
    with ZipFile(wheel) as packed:
        held = {name.removeprefix("rewards/") for name in packed.namelist() if ".dist-info/" not in name}
    files = [path.relative_to(ROOT / "rewards") for path in (ROOT / "rewards").rglob("*") if path.is_file()]
    assert held == {path.as_posix() for path in files if "__pycache__" not in path.parts} - {"pyproject.toml"}
    uv("venv", "-q", "--python", sys.executable, "env")
    python = tmp_path / "env" / "bin" / "python"
    uv("pip", "install", "-q", "--python", python, wheel)
    done = subprocess.run([python, "-I", "-c", SCORING], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout)
    assert scores["trl"] == [[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    assert scores["weights"] == [1.0, 0.2, 0.1]
    assert scores["verl"] == [1.0, 0.0]
    assert scores["easyr1"] == pytest.approx([1.3, 0.3])  # 1 + 0.2 + 0.1, and 0.2 + 0.1
    assert scores["heavy"] == []
    assert scores["module"].startswith(str(tmp_path))
    (tmp_path / "mine.py").write_text(CARELESS)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "6 x 12?", "reward_model": {"ground_truth": "72"}}\n')
    command = [python.with_name("grpo-rewards"), "audit", "mine.py:compute_score", "--data", "rows.jsonl", "--json"]
    audited = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert audited.returncode == 1, audited.stderr
    assert "near-misses is paid on 1 of 1 rows" in " ".join(json.loads(audited.stdout)["problems"])


CARELESS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)
"""


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the contents of all files except compiled modules."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path: path.read_bytes() for path in paths}
