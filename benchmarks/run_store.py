"""What supervision and the run store cost: `python benchmarks/run_store.py [--out FILE]`.

- overhead: what a step pays for its line, status, heartbeat and the look at its sentinels; and the supervisor's own work.
- ps: `grpo-kit ps` over 1,000 run directories of 60 steps, the whole command.
- load: the numbers of 100,000 metric lines of 60 keys, as a chart reads them, kept by the supervisor and not; as dicts.
- stop: a detached run of the quickstart with half its batch, from the call of `stop` to the end with its checkpoint,
  beside the time of a step.

Wall-clock times, best and median of several tries. Exits with 1 if one of the limits is not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.api import launch as api
from kit.runs.process import identity
from kit.runs.store import RunDir, RunStore
from kit.runs.supervisor import Heartbeat

LIMITS = {"overhead_ms": 20.0, "ps_seconds": 0.5, "load_seconds": 1.0, "stop_beyond_a_step_seconds": 5.0}
KEYS = 60


def timed(work: Callable[[], object], tries: int = 5) -> dict[str, float]:
    """Seconds of the best try and of the median one."""
    taken = []
    for _ in range(tries):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return {"best": round(min(taken), 4), "median": round(statistics.median(taken), 4)}


def metric_line(step: int, draw: random.Random) -> dict[str, Any]:
    """A line as wide as those of a run with two reward components."""
    named = {f"rewards/component-{number}/value": draw.random() for number in range(KEYS - 3)}
    return {"step": step, "time": time.time(), "reward": draw.random(), **named}


def overhead(folder: Path) -> dict[str, float]:
    """Milliseconds a step: line, status and sentinels, with a supervisor's thread writing signs of life beside it."""
    run, draw, steps = RunStore(folder).create("overhead"), random.Random(0), 300
    run.write_status("running")
    lines = [metric_line(step, draw) for step in range(steps)]
    watch, taken = Heartbeat(run, adopted=False), []
    cpu = time.process_time()
    with watch:
        watch.started(os.getpid())
        for step, line in enumerate(lines):
            began = time.perf_counter()
            run.append_metrics(line)
            run.write_status("running", step=step, total_steps=steps, eta_seconds=1.0)  # in training once a second
            (run.control / "save").exists()
            (run.control / "stop").exists()
            taken.append((time.perf_counter() - began) * 1000)
    return {
        "mean_ms": round(statistics.fmean(taken), 2),
        "p95_ms": round(statistics.quantiles(taken, n=20)[-1], 2),
        "cpu_ms": round((time.process_time() - cpu) * 1000 / steps, 2),
    }


def ps(folder: Path) -> dict[str, float]:
    """Seconds of the whole command over 1,000 runs, ten of them live."""
    draw = random.Random(0)
    metrics = "".join(json.dumps(metric_line(step, draw)) + "\n" for step in range(60))
    common = {"step": 60, "total_steps": 60, "host": platform.node(), "reason": None, "supervisor": identity()}
    for number in range(1000):
        run = folder / f"run-{number}"
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text(metrics)
        state = {"state": "finished" if number % 100 else "running", "started": 1.7e9 + number}
        (run / "status.json").write_text(json.dumps(common | identity() | state))
    command = [sys.executable, "-m", "kit.cli", "ps", "--root", str(folder)]
    before = os.times()
    whole = timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL), 7)
    after = os.times()
    cpu = (after.children_user + after.children_system - before.children_user - before.children_system) / 7
    listing = timed(lambda: RunStore(folder).statuses())
    return {
        "seconds": whole["best"],
        "median_seconds": whole["median"],
        "mean_cpu_seconds": round(cpu, 4),
        "of_it_listing_seconds": listing["best"],
    }


def load(folder: Path) -> dict[str, Any]:
    """Seconds for 100,000 lines."""
    run, draw = RunStore(folder).create("long"), random.Random(0)
    with open(run.metrics_file, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(metric_line(step, draw)) + "\n" for step in range(100_000))
    first = timed(run.columns, 1)["best"]
    assert len(run.columns()["reward"]) == 100_000
    return {
        "megabytes": round(run.metrics_file.stat().st_size / 1e6),
        "columns_seconds": timed(run.columns)["best"],
        "columns_unkept_seconds": first,
        "dicts_seconds": timed(run.metrics, 2)["best"],
        "last_lines_seconds": timed(lambda: next(run.last_metrics()))["best"],
    }


def stop(folder: Path, tries: int = 3) -> list[dict[str, Any]]:
    """Seconds from the call to the end, at several moments of a step; each try resumes the run of the one before."""
    settings = [f"run.root={folder}", "evaluation.before=false", "evaluation.every=0", "optimisation.batch_size=64"]
    run, found = api.start("quickstart", run_id="stopped", overrides=settings), []
    try:
        for number in range(tries):
            _await_steps(run, (run.status.get("step") or 0) + 3)
            time.sleep(0.37 * number)
            began = time.perf_counter()
            status = run.stop()
            taken = time.perf_counter() - began
            step_time = max(line["step_time"] for line in run.metrics()[-5:])
            saved = (RunDir(run.path).checkpoints or [Path()])[-1].name == f"checkpoint-{status['step']}"
            found.append({"seconds": round(taken, 2), "step_seconds": round(step_time, 2), "saved": saved})
            if number + 1 < tries:
                run = api.resume("stopped", folder, detach=True)
    finally:
        run.stop(now=True)
    return found


def _await_steps(run: api.Run, step: int) -> None:
    while not ((status := run.status)["state"] == "running" and (status.get("step") or 0) >= step):
        if status["state"] not in ("starting", "running"):
            raise SystemExit(f"the run is {status}")
        time.sleep(0.2)


def kept(result: dict[str, Any]) -> dict[str, bool]:
    """Which of the limits are kept, of those that were measured."""
    beyond = [each["seconds"] - each["step_seconds"] for each in result.get("stop", [])]
    measured = {
        "overhead_ms": result.get("overhead", {}).get("mean_ms"),
        "ps_seconds": result.get("ps", {}).get("seconds"),
        "load_seconds": result.get("load", {}).get("columns_seconds"),
        "stop_beyond_a_step_seconds": max(beyond, default=None),
    }
    held = {name: value < LIMITS[name] for name, value in measured.items() if value is not None}
    return held | {"stop_saved": all(each["saved"] for each in result.get("stop", []))}


PARTS: dict[str, Callable[[Path], Any]] = {"overhead": overhead, "ps": ps, "load": load, "stop": stop}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "run_store.json")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="others are kept from OUT")
    arguments = parser.parse_args()
    result: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    result |= {"machine": {"cores": os.cpu_count(), "python": platform.python_version()}, "limits": LIMITS}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run that was started is stopped, too
    with tempfile.TemporaryDirectory(prefix="run-store-") as folder:
        for name in arguments.parts:
            result[name] = PARTS[name](Path(folder, name))
            print(name, result[name], flush=True)
            result["kept"] = kept(result)
            arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print("kept", result["kept"])
    return 0 if all(result["kept"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
