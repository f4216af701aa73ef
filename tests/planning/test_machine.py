"""kit.planning.machine: every check detects its planted defect."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from kit.planning import machine
from kit.planning.machine import check_machine, failed

Usage = namedtuple("Usage", "total used free")


def levels(checks: Any) -> dict[str, str]:
    return {check.name: check.level for check in checks}


def test_this_machine_can_train(tmp_path: Path) -> None:
    checks = check_machine(tmp_path)
    assert not failed(checks), [check for check in checks if check.level == "fail"]
    named = {check.name for check in checks}
    assert {
        "Python",
        "packages",
        "torch",
        "GPU",
        "run folder",
        "disk",
        "memory",
        "sandbox",
    } <= named
    assert all(check.fix for check in checks if check.level == "fail")
    assert not list(tmp_path.iterdir())


def test_a_checkout_that_is_not_installed_is_told_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> Any:
        if name == "grpo-kit":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    real = importlib.metadata.distribution
    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: absent(name).version)
    checks = check_machine(tmp_path)
    (check,) = [check for check in checks if "not installed" in check.result]
    assert (check.name, check.level, "pip install -e ." in check.fix) == ("packages", "warn", True)
    assert not [check for check in checks if "the check failed" in check.result or check.name.lower() == "python"]


def test_a_package_outside_its_range_fails_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = machine.installed
    monkeypatch.setattr(machine, "installed", lambda name: "0.1" if name == "trl" else real(name))
    checks = {check.name: check for check in machine.packages()}
    assert checks["trl"].level == "fail"
    assert checks["trl"].result.startswith("0.1, expected ")
    assert checks["trl"].fix.startswith("pip install 'trl")


@pytest.mark.parametrize(("free", "level"), [(10 * 2**20, "fail"), (3 * 2**30, "warn"), (50 * 2**30, "ok")])
def test_the_disk(free: int, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free, 0, free))
    _, check = machine.run_folder(tmp_path / "runs")
    assert check.level == level
    assert bool(check.fix) is (level != "ok")


def test_a_run_folder_that_cannot_be_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine.tempfile, "NamedTemporaryFile", refuse)
    check, _ = machine.run_folder(tmp_path)
    assert (check.level, "Permission denied" in check.result, "run.root" in check.fix) == ("fail", True, True)


def test_a_gpu_that_torch_cannot_use_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(machine, "_nvidia_device", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    (check,) = machine.torch_build()
    assert check.level == "fail"
    assert "Install torch for CUDA" in check.fix
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(machine, "_driver", lambda: "550.54.15")
    (check,) = machine.torch_build()
    assert "driver 580 or newer, and this machine has 550.54.15" in check.fix


def test_an_installation_that_made_packages_older_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_nvidia_device", lambda: False)
    before = {"pyyaml": "99.0", "pydantic": "1.0", "gone": "1.0", "odd": "not a version"}
    assert machine.main(json.dumps(before)) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "downgraded to the versions" in line]
    assert line.split(": ")[1] == f"pyyaml 99.0 -> {machine.installed('pyyaml')}"


@pytest.mark.parametrize(("capability", "level"), [((9, 0), "ok"), ((7, 5), "warn"), ((7, 0), "fail")])
def test_bfloat16_by_compute_capability(
    capability: tuple[int, int], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    card = namedtuple("Card", "name major minor total_memory")("Some GPU", *capability, 24 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_120"])  # torch for CUDA 13
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10 * 2**30, 24 * 2**30))
    by_name = levels(machine.gpu())
    assert by_name == {"GPU": "ok", "GPU memory": "warn", "bfloat16": level}
    monkeypatch.delattr(torch.cuda, "mem_get_info")  # its context would take memory from the run
    monkeypatch.setattr("kit.runs.lock.gpu_holder", lambda: "run 'mine' (process 7)")
    assert [check for check in machine.gpu() if check.result == "run 'mine' (process 7)" and check.level == "ok"]


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> Any:
        raise RuntimeError("driver mismatch")
        yield

    monkeypatch.setattr(machine, "gpu", broken)
    broken_checks = [check for check in check_machine(tmp_path) if "driver mismatch" in check.result]
    assert [check.level for check in broken_checks] == ["warn"]
