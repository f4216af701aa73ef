"""kit.runs.lock and the queue: one run per GPU at a time, and no lock outlives its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import dead, kill, wait_for

from kit import api
from kit.errors import RunError
from kit.runs import lock, supervisor
from kit.runs.lock import GpuLock, gpu_holder, gpus, held_gpu
from kit.runs.store import RunDir, RunStore

pytestmark = pytest.mark.survival

ME = {"run": "mine", "pid": 1}


@pytest.fixture
def gpu(tmp_path: Path, write_job: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one GPU, for this process and the supervisors that it starts."""
    devices = tmp_path / "dev"
    devices.mkdir()
    (devices / "nvidia0").touch()
    (tmp_path / "sitecustomize.py").write_text(
        f"import kit.runs.lock, pathlib\nkit.runs.lock.gpus.__defaults__ = (None, pathlib.Path({str(devices)!r}))\n"
    )
    monkeypatch.setattr(lock.gpus, "__defaults__", (None, devices))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(supervisor, "QUEUE_POLL_SECONDS", 0.05)


@pytest.mark.parametrize(
    ("files", "visible", "expected"),
    [
        ([], None, []),
        (["nvidiactl", "nvidia-uvm"], None, []),
        (["nvidia0"], None, ["0"]),
        (["nvidia0", "nvidia1"], None, ["0"]),  # the trainer is shown the first one
        (["nvidia0", "nvidia1"], "1,0", ["0", "1"]),
        (["nvidia0"], "", []),
        (["nvidia0"], "-1", []),
        (["nvidia0", "nvidia1"], "1,-1,0", ["1"]),
        (["nvidia0"], "GPU-8a5c", ["0"]),  # the only one, by another name
        (["nvidia0", "nvidia1"], "GPU-8a5c", ["GPU-8a5c"]),
        (["nvidia0"], "MIG-8a5c", ["MIG-8a5c"]),
        (["dxg"], None, ["0"]),
    ],
)
def test_the_gpus_of_a_run_are_known_without_torch(
    tmp_path: Path, files: list[str], visible: str | None, expected: list[str]
) -> None:
    for name in files:
        (tmp_path / name).touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpus(environment, tmp_path) == expected


def test_whoever_measures_evaluates_or_exports_says_who_has_the_gpu(gpu: None, tmp_path: Path) -> None:
    """They would run out of memory beside a run, or make the run halve its batches for good."""
    from kit.export.job import export_run
    from kit.planning import probe, signal
    from kit.runner.evaluate import evaluate_run

    run = GpuLock(gpus())
    assert run.take({"run": "a", "pid": 12}) is None
    request = {"run_dir": str(tmp_path / "runs" / "b"), "config": {}, "format": "merged-16bit", "verify": True}
    for job in (probe.job, signal.job, evaluate_run, export_run):
        with pytest.raises(RunError, match=r"GPU 0, which run 'a' \(process 12\) uses"):
            job(request, True)
    run.release()
    with held_gpu("an evaluation"):
        other = GpuLock(gpus())
        assert other.take(ME) == f"GPU 0, which an evaluation (process {os.getpid()}) uses"
    assert other.take(ME) is None
    assert "run 'mine'" in str(gpu_holder())
    other.release()
    assert gpu_holder() is None


def test_a_lock_that_a_forked_process_has_inherited_is_given_back_all_the_same(tmp_path: Path) -> None:
    mine, other = GpuLock(["0"], tmp_path), GpuLock(["0"], tmp_path)
    mine.take(ME)
    with subprocess.Popen(["sleep", "60"], pass_fds=mine.handles) as child:
        mine.release()
        assert other.take(ME) is None
        other.release()
        child.kill()


# --- the queue -------------------------------------------------------------------------------------------------------


def queued(run: RunDir) -> bool:
    return run.status()["state"] == "queued"


def test_a_second_run_waits_its_turn_and_says_for_whom(gpu: None, start: Callable[..., RunDir]) -> None:
    first = start("first")
    wait_for(lambda: first.status()["state"] == "running")
    second = start("second")
    wait_for(lambda: queued(second))
    holder = first.status()["supervisor"]["pid"]
    assert second.status()["reason"] == f"waits for GPU 0, which run 'first' (process {holder}) uses"
    api.Run("first").stop()
    wait_for(lambda: second.status()["state"] == "running")
    assert second.status()["reason"] is None
    api.Run("second").stop()


def test_a_gpu_stays_taken_while_a_trainer_lives_on_without_its_supervisor(
    gpu: None, start: Callable[..., RunDir]
) -> None:
    first = start("first")
    wait_for(lambda: first.status()["state"] == "running" and first.status().get("supervisor"))
    kill(first.status()["supervisor"])
    second = start("second")
    wait_for(lambda: queued(second))
    assert first.status()["state"] == "running"
    kill(first.status())
    wait_for(lambda: second.status()["state"] == "running")
    api.Run("second").stop()


@pytest.mark.parametrize("how", ["sentinel", "sigterm", "sigkill"])
def test_a_run_that_waits_can_be_stopped(gpu: None, start: Callable[..., RunDir], how: str) -> None:
    first = start("first")
    wait_for(lambda: first.status()["state"] == "running")
    second = start("second")
    wait_for(lambda: queued(second))
    watcher = second.status()["supervisor"]
    assert second.record()["face"] is False
    if how == "sentinel":
        assert api.Run("second").stop()["state"] == "stopped"
        assert "while waiting for a GPU" in second.status()["reason"]
    else:
        os.kill(watcher["pid"], signal.SIGTERM if how == "sigterm" else signal.SIGKILL)
    wait_for(lambda: dead(watcher))
    assert second.status()["state"] == ("interrupted" if how == "sigkill" else "stopped")
    assert first.status()["state"] == "running"
    api.Run("first").stop()


def test_a_face_that_waits_for_a_gpu_makes_the_run_to_be_seen(
    gpu: None, start: Callable[..., RunDir], write_job: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    held = GpuLock(gpus())
    held.take({"run": "first", "pid": 12})
    write_job("run.write_status('finished')")
    code = "import kit; from kit import launch; launch.TRAINER = 'a_job'; print(kit.train('quickstart', run_id='one').status)"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as face:
        run = wait_for(lambda: Path("runs/one/config.yaml").exists() and RunStore("runs").open("one"))
        wait_for(lambda: queued(run))
        assert run.config.is_file()
        assert run.record()["face"] is True  # `stop` leaves that to the supervisor
        held.release()
        assert face.wait(30) == 0
    assert run.status()["state"] == "finished"
    assert "Waiting for GPU 0, which run 'first'" in capfd.readouterr().err
