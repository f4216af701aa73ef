"""What `pip install .` brings: the wheel's contents, and the quickstart from it in a fresh environment."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZipFile

import pytest

from kit.config import EMBEDDED_MODELS
from kit.models.embedded import checked

ROOT = Path(__file__).parents[1]


def test_the_wheel_holds_the_two_packages_with_the_models_and_nothing_else(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    (made,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with ZipFile(made) as wheel:
        wheel.extractall(tmp_path / "in")
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {
        path.relative_to(ROOT).as_posix()
        for package in ("kit", "rewards")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.name != ".gitattributes" and "__pycache__" not in path.parts
    }
    assert names == expected
    for name in EMBEDDED_MODELS:
        checked(tmp_path / "in" / "kit" / "models" / "shipped" / name)
    assert Path(made).stat().st_size < 6e6


@pytest.mark.install
def test_the_quickstart_runs_from_another_folder_in_a_fresh_environment(tmp_path: Path) -> None:
    """As `pip install .` does it: by way of a source distribution; the other packages in the versions that are tested here."""
    python, bare = tmp_path / "env" / "bin" / "python", {"PATH", "UV", "LANG", "SSL_CERT_FILE"}
    tool = os.environ | {"UV_CACHE_DIR": subprocess.check_output(["uv", "cache", "dir"], text=True).strip()}

    def uv(*arguments: object) -> None:
        done = subprocess.run(["uv", *map(str, arguments)], env=tool, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    uv("build", "-q", "--out-dir", "made", ROOT)
    (wheel,) = (tmp_path / "made").glob("*.whl")
    pins = {found.name: found.version for found in distributions() if found.name != "grpo-kit"}
    (tmp_path / "pins.txt").write_text("".join(f"{name}=={version}\n" for name, version in sorted(pins.items())))
    uv("venv", "-q", "--python", sys.executable, "env")
    uv("pip", "install", "-q", "--python", python, "--constraint", "pins.txt", wheel)
    listed = subprocess.check_output(["uv", "pip", "list", "--python", python], env=tool, cwd=tmp_path, text=True)
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


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file but compiled modules."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path: path.read_bytes() for path in found}
