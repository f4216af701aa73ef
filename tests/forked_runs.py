"""Runs in forks of one process that has imported everything, killed at a chosen moment. A run takes one second instead of ten.

    with Forks(cwd) as forks:
        forks.run(tree, kill={"operation": 40})     # SIGKILL at the 40th change of a file of the run
        forks.run(tree, resume=True)

`kill` is one of
    {"operation": n}                        before the n-th change of a file in the run directory
    {"call": "module:Class.name", "nth": n, "when": "before" | "after"}
    {"half": name, "nth": n}                in the middle of writing a file of that name with torch.save
    {"line": text}                          in the middle of appending a line that begins with the text
    {"seconds": s}                          from outside, s seconds after the start
and may contain another `signal` by number.

    forks.run(tree, copies={"early": {"operation": 40}, ...})

does not kill, but copies the run directory at these moments while all threads stand still. `forks.copy("early")` is a root
directory as a SIGKILL would have left it, so one run gives many.

`made=True` creates the run's directory first, as the command line and the page do for their child processes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

Tree = dict[str, Any]
COPIES, STOPPED = "copies", "stopped.json"
"""In the folder of the process that forks: a folder of copies, and a file that names the copy to make of a stopped run."""
STANDING = threading.Lock()


class Forks:
    """Client of the process that forks the runs."""

    def __init__(self, folder: Path) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.folder, self.log = folder, folder / "forks.txt"
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            cwd=folder,
            env=environment,
        )

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)

    def copy(self, moment: str) -> Path:
        """Return the root directory of the copy that was made at this moment of `copies`."""
        return self.folder / COPIES / moment

    def run(
        self, tree: Tree, *overrides: str, kill: Tree | None = None, copies: dict[str, Tree] | None = None, **ways: bool
    ) -> Tree:
        """Run; return `signal` (None unless killed), `code`, `error`, `shown` (output), `operations` (changes) and `seconds`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"config": tree, "overrides": overrides, "kill": kill, "copies": copies or {}, "ways": ways}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, self.log.read_text()[-4000:]
        return json.loads(answer)


def serve() -> None:
    """Answer each request on stdin with a line on stdout; other output goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warm_up()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def warm_up() -> None:
    """Import all modules of a run."""
    import torch

    torch.set_num_threads(1)
    for name in (
        "datasets", "math_verify", "peft", "pyarrow.parquet", "reasoning_gym", "rewards", "transformers.models.qwen3",
        "trl", "kit.train", "kit.evaluation.heldout", "kit.runner.evaluation", "kit.runner.prepare",
        "kit.runner.build", "kit.runner.recording", "kit.runner.resume", "kit.runner.trackers",
    ):  # fmt: skip
        importlib.import_module(name)
    import kit.runner.console
    import kit.trainer.trainer  # so that no fork imports it

    kit.runner.console.draw_report = lambda *_, **__: None  # the report has its own tests
    gc.collect()
    gc.freeze()


def answer(request: Tree) -> Tree:
    result_file, shown = Path("result.json"), Path("shown.txt")
    result_file.unlink(missing_ok=True)
    kill, started = request["kill"] or {}, time.monotonic()
    before = os.times().children_user + os.times().children_system
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            work(request, result_file, shown)
        os._exit(70)
    if "seconds" in kill:
        timer = threading.Timer(kill["seconds"], os.kill, (child, signal.SIGKILL))
        timer.start()
    while True:
        _, status = os.waitpid(child, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            break
        copy_run(**json.loads(Path(STOPPED).read_text()))
        os.kill(child, signal.SIGCONT)
    if "seconds" in kill:
        timer.cancel()
    result = {
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        "code": os.waitstatus_to_exitcode(status),
    }
    outcome = json.loads(result_file.read_text()) if result_file.exists() else {}
    used = os.times()
    cpu = used.children_user + used.children_system - before
    return result | {"shown": shown.read_text(), "seconds": time.monotonic() - started, "cpu": cpu} | outcome


def copy_run(moment: str, run: str, half: str) -> None:
    copied = Path(COPIES, moment, Path(run).name)
    shutil.copytree(run, copied, symlinks=True)
    if half:
        file = copied / Path(half).relative_to(run)
        os.truncate(file, file.stat().st_size // 2)


def work(request: Tree, result_file: Path, shown: Path) -> None:
    """Execute one run in the child and write its result."""
    for target in (1, 2):
        os.dup2(os.open(shown, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), target)
    import kit.launch
    import kit.train
    from kit.config import load_config
    from kit.errors import KitError

    config = load_config(request["config"], request["overrides"])
    run = Path(config.run.root) / str(config.run.id)
    for moment, place in request["copies"].items():
        plant(place | {"copy": {"moment": moment, "run": str(run.resolve())}}, run)
    count = plant(request["kill"] or {}, run)
    error, code, ways = None, 0, request["ways"]
    try:
        if ways.pop("made", False):
            kit.launch.create_run(config)
            ways["adopt"] = True
        kit.train.run(config, **ways)
    except KitError as found:
        error, code = str(found), found.exit_code
    except BaseException as found:
        import traceback

        error, code = f"{type(found).__name__}: {found}\n{traceback.format_exc()}", 1
    sys.stdout.flush()
    result_file.write_text(json.dumps({"error": error, "operations": len(count)}))
    os._exit(code)


def die(kill: Tree, half: str = "") -> None:
    """Kill the run now, or stop it until it is copied; `half` names a file to truncate to half its size."""
    if "copy" in kill:
        with STANDING:
            Path(STOPPED).write_text(json.dumps(kill["copy"] | {"half": half}))
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # stops the process, with this thread here
        return
    if half:
        os.truncate(half, os.path.getsize(half) // 2)
    os.kill(os.getpid(), kill.get("signal", signal.SIGKILL))


def plant(kill: Tree, run: Path) -> list[str]:
    """Install the trap of `kill`; return a list that grows with each change of a file in the run directory."""
    if "call" in kill:
        trap_call(kill)
    elif "half" in kill:
        trap_save(kill)
    elif "line" in kill:
        trap_line(kill)
    changes: list[str] = []
    inside = str(run.resolve())

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"):
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if isinstance(args[0], (str, Path)) and os.path.abspath(args[0]).startswith(inside):
            changes.append(f"{event} {args[0]}")
            if len(changes) == kill.get("operation"):
                die(kill)

    sys.addaudithook(watch)
    return changes


def trap_call(kill: Tree) -> None:
    module, _, name = kill["call"].partition(":")
    *owners, name = name.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original, calls = getattr(owner, name), []

    @functools.wraps(original)
    def trapped(*args: Any, **keywords: Any) -> Any:
        calls.append(None)
        mine = len(calls) == kill["nth"]
        if mine and kill.get("when") != "after":
            die(kill)
        result = original(*args, **keywords)
        if mine and kill.get("when") == "after":
            die(kill)
        return result

    setattr(owner, name, trapped)


def trap_save(kill: Tree) -> None:
    import torch

    original, calls = torch.save, []

    def trapped(content: Any, where: Any, *args: Any, **keywords: Any) -> None:
        original(content, where, *args, **keywords)
        if Path(str(where)).name == kill["half"]:
            calls.append(None)
            if len(calls) == kill["nth"]:
                die(kill, half=os.path.abspath(where))

    torch.save = trapped


def trap_line(kill: Tree) -> None:
    original = os.write

    def trapped(handle: int, data: bytes) -> int:
        if data.startswith(kill["line"].encode()):
            half = original(handle, data[: len(data) // 2])
            die(kill)
            return half + original(handle, data[half:])
        return original(handle, data)

    os.write = trapped


# --- comparing -------------------------------------------------------------------------------------------------------

CLOCKS = re.compile(r"time|step_time|.*seconds?.*|.*latency.*|memory/.*")
OF_THE_PROCESS = ("resumed", "memory", "packing")
"""Kinds of events that every process of a run writes; a resumed run has had several processes."""


def without_clocks(value: Any) -> Any:
    """Remove times and durations from a value of nested lists and dicts."""
    if isinstance(value, dict):
        return {key: without_clocks(item) for key, item in value.items() if not CLOCKS.fullmatch(key)}
    return [without_clocks(item) for item in value] if isinstance(value, list) else value


def trace(run: Path) -> Tree:
    """Return, by file, the contents of a run that must not depend on interruptions."""
    import pyarrow.parquet as pq

    traced: Tree = {}
    for name in ("metrics.jsonl", "events.jsonl"):
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
        traced[name] = [without_clocks(line) for line in lines if line.get("kind") not in OF_THE_PROCESS]
    for path in [*sorted((run / "eval").glob("*.json")), run / "best.json"]:
        if path.exists():
            traced[path.name] = without_clocks(json.loads(path.read_text()))
    for path in sorted((run / "completions").iterdir()):
        traced[path.name] = without_clocks(pq.read_table(path).to_pydict())
    for folder in [run / "adapter", *sorted(run.glob("checkpoint-*"))]:
        traced |= {f"{folder.name}/{key}": value for key, value in folder_trace(folder).items()}
    status = json.loads((run / "status.json").read_text())
    return traced | {"status": {key: status[key] for key in ("state", "step", "total_steps", "exit", "reason")}}


def folder_trace(folder: Path) -> Tree:
    traced: Tree = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".pt", ".pth"):
            traced[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.name in ("objective_state.json", "progress.json"):
            traced[path.name] = json.loads(path.read_text())
        elif path.name == "trainer_state.json":
            state = without_clocks(json.loads(path.read_text()))
            traced[path.name] = state | {"best_model_checkpoint": Path(str(state["best_model_checkpoint"])).name}
    return traced


def different(first: Tree, second: Tree) -> dict[str, Tree]:
    """Return the contents of the files that differ between two traces, each cut to 1500 characters."""
    names = [name for name in sorted(first.keys() | second.keys()) if first.get(name) != second.get(name)]
    return {name: {"first": str(first.get(name))[:1500], "second": str(second.get(name))[:1500]} for name in names}


if __name__ == "__main__":
    serve()
