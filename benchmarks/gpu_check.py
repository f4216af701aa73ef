"""Run the checks that need CUDA, in stages, most informative stage first. Nothing is downloaded.

`python benchmarks/gpu_check.py --budget MINUTES [--stages 1 2] [--models ...] [--out FILE]`

    1  doctor, quickstart, and runs with all checks of the first steps: with Unsloth and with transformers, 4-bit weights
       first, and, if vLLM is installed, with its engine awake and in standby
    2  gradients of the packed, the padded and the backend's own loss, compared with TRL's in float32 on the same weights
    3  seconds, tokens a second and peak memory of an update: the kit's, TRL's own and Unsloth's own, on the same rollouts
    4  the memory plan compared with measured memory (`grpo-kit plan --probe`)
    5  variants of the kit's update; attention and head alone
    6  generation

Models have random weights in the shapes of `random_models.py`. Rollouts are random tokens of random lengths (`WORKS` in
gpu_arms.py), so that no time goes into sampling. Rows run in worker processes (gpu_arms.py), one for each model and loss, so
that no state of one arm reaches another. This process never uses the GPU.

Each result is written to FILE and printed as soon as it is there, so that a killed check loses nothing; the next check ends
the processes that a killed one left. A row above its time limit is ended with all its child processes, and its stack is
saved. Rows that FILE has run again only if they failed. Stages take turns of some minutes (`TURNS`) until the budget is used
or all rows are done.

Prints a table and exits with 1 if a row failed. `--cpu-smoke` runs a tiny model on the CPU with transformers only, to test
this script.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import random_models  # noqa: E402
from gpu_arms import GPU_LOST, LIMITS, WORKS, Row, configuration  # noqa: E402

from kit.runs.files import write_atomic  # noqa: E402
from kit.runs.lock import gpu_holder  # noqa: E402

TURNS = {1: 300.0, 2: 150.0}
TURN = 120.0
"""Seconds after which a stage gives way to the next one, once its current row is done. `TURNS` has the exceptions."""
MARK = "GRPO_KIT_GPU_CHECK"
"""Environment variable of every process of a check. Its value is the folder of the check."""
LEAST = 20.0
"""Seconds that must be left for a process to start."""
MODELS = ("qwen2.5-1.5b", "llama-3.1-8b", "qwen2.5-3b")
SMALL = "qwen2.5-0.5b"
LOSSES = ("own", "ours")
"""The first one computes the reference gradient of the others."""
COMMANDS = ("doctor", "quickstart", "train", "plan")
"""Kinds of rows that run a command of the kit."""
WORKER = Path(__file__).with_name("gpu_arms.py")
NATS = {"float32": 2e-3, "bfloat16": 0.15, "float16": 0.15}
"""Largest mean difference of scores from plain logits, as in kit/trainer/sanity_checks.py."""
FAST = 250.0
"""Speed in TFLOP/s for which the time limits of the rows are made."""
MEASURED = {"half_tflops": None, "copy_tb_per_second": None, "launch_microseconds": None}
"""Measured properties of a machine, which differ between runs."""
PACKAGES = (
    "torch", "triton", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "unsloth", "unsloth_zoo", "vllm"
)  # fmt: skip
NEEDS_CUDA = (
    "benchmarks/gpu_check.py needs a CUDA GPU, and torch finds none here. Run it on a machine with one, or try the "
    "file itself on the CPU: python benchmarks/gpu_check.py --cpu-smoke"
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "UNSLOTH_DISABLE_STATISTICS": "1", "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
}  # fmt: skip


# --- the rows ---------------------------------------------------------------------------------------------------------


def rows(models: Sequence[str], has: Callable[[str], bool], half: str = "bfloat16", tflops: float = FAST) -> list[Row]:
    """All rows for a machine with a GPU, by stage.

    Args:
        models: names of `random_models.SHAPES`.
        has: whether a package is installed.
        half: the 16-bit dtype in which the GPU computes.
        tflops: measured speed in this dtype, in TFLOP/s. Slower GPUs than `FAST` have more time for the rows of large models.
    """
    slow = max(1.0, FAST / tflops)
    backends = ["transformers", *(["unsloth"] if has("unsloth") else [])]
    bits = [*([4] if has("bitsandbytes") else []), 16]
    first, least = models[0], bits[0]

    def training(bit: int, **options: Any) -> list[Row]:
        settings: dict[str, Any] = {"bits": bit, "options": options, "limit": 400 if options else 300}
        return [Row(1, "train", "ragged", SMALL, backend, **settings) for backend in reversed(backends)]

    runs = training(least)
    for bit in [bit for bit in bits if has("vllm") and (bit == 16 or has("vllm_bnb_plugin"))]:
        runs += training(bit, engine="vllm", eager=True)
        runs += training(bit, engine="vllm", standby=True) if half == "bfloat16" else training(bit, engine="vllm")
    runs += training(16) if least != 16 else []
    doctor, quickstart = Row(1, "doctor"), Row(1, "quickstart", limit=240)

    losses: list[dict[str, Any]] = [{"loss": "own"}, {}, {"options": {"packing": False}}]
    exact = [Row(2, "update", "ragged", SMALL, bits=b, dtype="float32", **loss) for loss in losses for b in bits]
    # The limit includes Unsloth's import from a cold disk and Triton's compilation, in each process with Unsloth.
    rounded = [
        Row(2, "update", "ragged", SMALL, *arm, bit, limit=200)
        for *arm, bit in itertools.product(backends, LOSSES, bits)
    ]

    arms = list(itertools.product(backends, LOSSES))
    short = [
        Row(3, "update", work, model, *arm, least, limit=250 * slow, counts=work == "gsm8k")
        for model, arm, work in itertools.product(models, arms, ("gsm8k", "reasoning"))
    ]
    long = [
        Row(3, "update", "long", model, *arm, least, limit=300 * slow) for model, arm in itertools.product(models, arms)
    ]

    plans = [
        Row(4, "plan", "gsm8k", first, bits=least, options={"gradient_checkpointing": on}, limit=200 * slow)
        for on in (True, False)
    ]

    kernels = [
        Row(5, "attention", work, options={"arm": arm})
        for work in ("gsm8k", "reasoning")
        for arm in ("varlen", "packed", "efficient", "groups")
        if arm != "varlen" or half == "bfloat16"  # FlashAttention needs Ampere
    ] + [Row(5, "head", options={"arm": arm}) for arm in ("TRL", "kit")]
    changes: tuple[dict[str, Any], ...] = (
        {}, {"kernel": "efficient"}, {"kernel": "groups"}, {"token_budget": 0}, {"fused": False}, {"packing": False}
    )  # fmt: skip
    variants = [
        Row(5, "update", work, first, bits=least, options=change, limit=100 * slow)
        for change in changes
        for work in ("gsm8k", "reasoning")
    ]
    samples = [
        Row(6, "generate", "gsm8k", model, backend, bits=least, limit=250 * slow)
        for model in models
        for backend in backends
    ]
    everything = [doctor, *runs, quickstart, *exact, *rounded, *short, *long, *plans, *kernels, *variants, *samples]
    return [dataclasses.replace(row, dtype=half) if row.dtype == "bfloat16" else row for row in everything]


def smoke_rows() -> list[Row]:
    """The rows for a CPU: a run, its plan, and all other rows in one process."""
    settings: dict[str, Any] = {"work": "smoke", "dtype": "float32", "limit": 600}
    changes: tuple[dict[str, Any], ...] = ({}, {"packing": False}, {"token_budget": 40}, {"fused": False})
    return [
        Row(1, "doctor"),
        Row(1, "train", model="tiny", **settings),
        Row(1, "plan", model="tiny", **settings),
        Row(2, "update", model="tiny", loss="own", counts=True, **settings),
        *(Row(2, "update", model="tiny", options=change, **settings) for change in changes),
        Row(2, "update", model="tiny", **settings | {"dtype": "bfloat16"}),
        Row(2, "generate", model="tiny", **settings),
        Row(2, "attention", options={"arm": "packed"}, **settings),
        Row(2, "head", options={"arm": "kit"}, **settings),
    ]


# --- the processes ----------------------------------------------------------------------------------------------------


def check(
    todo: Sequence[Row], file: Path, folder: Path, seconds: float, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Run the rows that `file` lacks, stage by stage in turns, until the time is over. Each result is written to the file."""
    result: dict[str, Any] = {"machine": machine(), "rows": {}}
    if file.is_file():
        previous = json.loads(file.read_text())
        if previous["machine"] | MEASURED != result["machine"] | MEASURED:
            raise SystemExit(
                f"{file} has results of another machine or of other packages. Choose another file with --out."
            )
        result = previous
    end = time.monotonic() + seconds
    left = [row for row in todo if result["rows"].get(row.key, {"failure": "not run"})["failure"]]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(result, indent=1) + "\n")
    while left and end - time.monotonic() > LEAST:
        for stage in sorted({row.stage for row in left}):
            turn = min(end, time.monotonic() + TURNS.get(stage, TURN))
            for row, answer in run_rows([row for row in left if row.stage == stage], folder, turn, end):
                left.remove(row)
                result["rows"][row.key] = answer
                write_atomic(file, json.dumps(result, indent=1) + "\n")
                say(line(row.key, answer))
    if left:
        say(f"no time was left for {len(left)} of {len(todo)} rows: run the same command again to continue with them")
    return result


def run_rows(todo: Sequence[Row], folder: Path, turn: float, end: float) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Yield rows with their results. No row starts after `turn` or continues after `end` (seconds of the monotonic clock)."""
    left = list(todo)
    while left and turn - time.monotonic() > LEAST:
        batch = next(by_process(left))
        try:
            if batch[0].kind in COMMANDS:
                answers: Iterator[dict[str, Any]] = iter([run_command(batch[0], folder, end)])
            else:
                failure = build_in_process(batch[0].model, folder, end)
                failed = iter([failure] * len(batch)) if failure else None
                answers = failed or run_worker(batch, folder, turn, end)
        except TimeoutError:
            return
        done = 0
        for row, answer in zip(batch, answers, strict=False):
            yield row, answer | {"failure": failure_of(row, answer)}
            done += 1
        if not done:  # no time was left for the row
            return
        left = left[done:]


def by_process(todo: Sequence[Row]) -> Iterator[list[Row]]:
    """Split the rows into runs of neighbours that can share a process."""
    for (command, _), group in itertools.groupby(todo, lambda row: (row.kind in COMMANDS, row.process)):
        neighbours = list(group)
        yield from ([[row] for row in neighbours] if command else [neighbours])


def run_worker(batch: Sequence[Row], folder: Path, turn: float, end: float) -> Iterator[dict[str, Any]]:
    """Yield the results of one worker process as they come. It ends with the first row that exceeds its limit or kills it."""
    with tempfile.TemporaryDirectory() as folder_of_process:
        request, answers, log = (Path(folder_of_process) / name for name in ("request.json", "answers", "log"))
        request.write_text(json.dumps({"rows": [dataclasses.asdict(row) for row in batch], "folder": str(folder)}))
        answers.touch()
        command = [sys.executable, str(WORKER), str(request), str(answers)]
        with log.open("w") as output, answers.open() as lines:
            process = subprocess.Popen(command, env=environment(), stdout=output, stderr=subprocess.STDOUT)
            try:
                for number, row in enumerate(batch):
                    if number and time.monotonic() > turn:
                        return
                    limit, text = min(time.monotonic() + row.limit, end), ""
                    while not text.endswith("\n"):
                        ended = process.poll()
                        if piece := lines.readline():  # a long line comes in pieces
                            text += piece
                        elif ended is not None:
                            if not (ended == GPU_LOST and number):
                                yield {"error": f"the process ended with {ended}: {tail(log)}"}
                            return
                        elif time.monotonic() > limit:
                            if limit < end:
                                yield {"error": f"{tail(log)}\nended after {row.limit:g} s"}
                            return
                        else:
                            time.sleep(0.1)
                    yield json.loads(text)
            finally:
                end_all(process, descendants(process))


def environment() -> dict[str, str]:
    """Environment of every process: offline, with the first of the visible GPUs."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": first, "PYTHONPATH": path}


def descendants(process: subprocess.Popen[Any]) -> list[Any]:
    """All processes below a process; an empty list if it has ended."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    return []


def end_all(process: subprocess.Popen[Any], others: Sequence[Any], number: int = signal.SIGKILL) -> None:
    """Send a signal to a process and its `descendants`. The next process needs their memory on the GPU."""
    import psutil

    for each in (process, *others):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(number)
    if number == signal.SIGKILL:
        process.wait()


def end_leftovers(folder: Path) -> int:
    """Kill the processes that a killed check in this folder left, and return their number."""
    import psutil

    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(folder.resolve()):
                process.kill()
                left.append(process)
    psutil.wait_procs(left, timeout=10)
    return len(left)


def build_in_process(name: str, folder: Path, end: float) -> dict[str, Any] | None:
    """Build the model's folder in another process, which frees the GPU's memory when it ends.

    Returns the error, or None. Raises `TimeoutError` at `end` (monotonic seconds).
    """
    if not name:
        return None
    command, limit = [sys.executable, random_models.__file__, name, str(folder)], max(1.0, end - time.monotonic())
    try:
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    return {"error": f"{name} was not built: {done.stderr[-1500:]}"} if done.returncode else None


def run_command(row: Row, folder: Path, end: float) -> dict[str, Any]:
    """Run the kit's command of a row and return its measurements. Raises `TimeoutError` at `end` (monotonic seconds)."""
    run, config = f"{row.kind}-{time.time_ns()}", folder / "run.yaml"
    overrides = ["-o", f"run.id={run}", "-o", f"run.root={folder / 'runs'}"]
    commands = {  # runs have no supervisor, whose process would continue after this one is killed
        "doctor": ["kit.cli", "doctor"],
        "quickstart": ["kit.train", "quickstart", "-o", "optimisation.steps=10", *overrides],
        "train": ["kit.train", str(config), *overrides],
        "plan": ["kit.cli", "plan", str(config), "--probe", "--json"],
    }
    if row.model:
        if failure := build_in_process(row.model, folder, end):
            return failure
        work = WORKS[row.work]
        longest = (work.prompt, work.longest)
        config.write_text(json.dumps(configuration(row, folder / row.model, folder, longest)))
    limit, began = max(1.0, min(row.limit, end - time.monotonic())), time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", *commands[row.kind]],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    others: list[Any] = []
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        if limit < row.limit:
            raise TimeoutError from None
        others = descendants(process)
        end_all(process, others, signal.SIGABRT)  # faulthandler then writes the stacks
        with contextlib.suppress(subprocess.TimeoutExpired):
            output, errors = process.communicate(timeout=10)
            return {"error": f"{(output + errors)[-2000:]}\nended after {limit:.0f} s"}
        return {"error": f"ended after {limit:.0f} s, without output"}
    finally:
        end_all(process, others or descendants(process))
    if process.returncode:
        return {"error": (output + errors)[-4000:]}
    answer: dict[str, Any] = {"process_seconds": time.monotonic() - began}
    try:
        if row.kind == "plan":
            plan = json.loads(output)
            return answer | {"planned_bytes": plan["memory"]["peak_bytes"]} | plan["probe"]
        return answer | (run_result(run, folder / "runs") if row.kind in ("train", "quickstart") else {})
    except Exception as error:  # unexpected output: the next rows still run
        return {"error": f"{output[-1500:]}\n{type(error).__name__}: {error}"}


def run_result(run_id: str, root: Path) -> dict[str, Any]:
    """The state, the losses and the sampler's differences of a run."""
    from kit.api import Run
    from kit.trainer.metric_log import SAMPLER_DIFFERENCE

    run = Run(run_id, root)
    metrics, env = run.metrics(), json.loads((run.path / "env.json").read_text())
    return {
        "state": run.status["state"],
        "steps": run.status["step"],
        "backend": env["backend"]["name"],
        "packing": next((event for event in run.events() if event["kind"] == "packing"), None),
        "changed": env.get("changed_by_backend"),
        "losses": [line["loss"] for line in metrics if "loss" in line],
        "sampler_difference": [line[SAMPLER_DIFFERENCE] for line in metrics if SAMPLER_DIFFERENCE in line],
    }


CAUSE = re.compile(r"error: |[\w.]*(Error|Exception)(:|$)|[\w -]+ fail ")
"""The line of an output that says why a command failed: of an exception, or of a failed check of `doctor`."""


def failure_of(row: Row, answer: dict[str, Any]) -> str | None:
    """Why a row fails, or None if it passes."""
    if answer.get("out_of_memory") and row.loss == "own":
        return None  # the other library does not fit at this size: a result, no failure
    if "error" in answer:
        lines = str(answer["error"]).strip().splitlines() or ["ended without output"]
        causes = [] if lines[-1].startswith("ended after") else [line for line in lines if CAUSE.match(line)]
        return [*lines, *causes][-1]
    if row.kind in ("train", "quickstart"):
        if answer["state"] != "finished":
            return f"the run is {answer['state']}"
        if row.options.get("engine") == "vllm":
            return sampler_failure(answer["sampler_difference"], answer["steps"])
    if answer.get("without_gradient"):
        return f"{answer['without_gradient']} weights got no gradient"
    if not answer.get("gradient_off", 0.0) <= LIMITS[row.dtype]:
        return f"the gradient is off by {answer['gradient_off']:.2g} of its norm, at most {LIMITS[row.dtype]:g} is rounding"
    if not answer.get("nats_off_plain_logits", 0.0) <= NATS[row.dtype]:
        return f"scores are {answer['nats_off_plain_logits']:.2g} nats off plain logits, at most {NATS[row.dtype]:g} is rounding"
    return None


def sampler_failure(differences: Sequence[float], steps: int, rounding: float = 0.1) -> str | None:
    """Why the engine did not sample with the trainer's weights, or None if it did. Differences are nats a token, one a step.

    In the first step the adapter is 0, so that its difference is rounding alone. Later differences may be twice as large.
    """
    if (
        len(differences) == steps
        and differences[0] <= rounding
        and all(value <= 0.01 + 2 * differences[0] for value in differences)
    ):
        return None
    values = ", ".join(f"{value:.2g}" for value in differences) or "unknown values"
    return f"vLLM's log-probabilities are off by {values} nats a token; expected: rounding at the first step, later no more"


# --- the report -------------------------------------------------------------------------------------------------------


@functools.cache
def machine() -> dict[str, Any]:
    """The GPU with its measured speed, and the installed packages."""
    import torch

    versions = {name: version(name) for name in PACKAGES if find_spec(name) is not None}
    description: dict[str, Any] = {"gpu": None, "python": platform.python_version(), "packages": versions}
    if not torch.cuda.is_available():
        return description
    command = [sys.executable, __file__, "--describe"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"The GPU does not work here: {done.stderr[-2000:]}")
    return description | json.loads(done.stdout.splitlines()[-1])


def version(name: str) -> str:
    """Version of an installed package. Some builds have none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def describe() -> dict[str, Any]:
    """Measure the speed of the GPU on large operands. Needs 4 GiB, so that it runs in a process of its own."""
    import torch

    card = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split() if which("nvidia-smi") else []
    description = {"gpu": card.name, "gib": round(card.total_memory / 2**30), "capability": [card.major, card.minor]}
    description |= {"driver": driver[0] if driver else None, "cuda": torch.version.cuda}

    def seconds(call: Callable[[], Any], times: int) -> float:
        call()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / times

    half = torch.bfloat16 if card.major >= 8 else torch.float16
    a = torch.randn(8192, 8192, device="cuda", dtype=half)
    b, scalar = torch.empty(2**30, device="cuda"), torch.ones(1, device="cuda")
    description["half_tflops"] = 2 * 8192**3 / seconds(lambda: a @ a, 10) / 1e12
    description["copy_tb_per_second"] = b.nbytes / seconds(lambda: b[: 2**29].copy_(b[2**29 :]), 10) / 1e12
    description["launch_microseconds"] = 1e6 * seconds(lambda: scalar.add_(1.0), 10000)
    return description


def tail(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-2000:]


def cells(key: str, answer: dict[str, Any]) -> list[str]:
    """The cells of a row: name, seconds, tokens a second, peak GiB, distance of the gradient, verdict."""

    def number(name: str, form: str, factor: float = 1.0) -> str:
        return format(answer[name] * factor, form) if isinstance(answer.get(name), (int, float)) else "-"

    numbers = [number("seconds", ".4g"), number("tokens_per_second", ".0f"), number("peak_bytes", ".2f", 2**-30)]
    verdict = answer["failure"] or ("out of memory" if answer.get("out_of_memory") else "passed")
    is_reference = "arm=varlen" in key or "arm=TRL" in key
    is_reference |= "TRL's own" in key and (not key.startswith("2") or "float32" in key)
    if "gradient_norm" in answer and "gradient_off" not in answer and not is_reference:
        verdict += ", gradient not compared"
    if answer.get("planned_bytes") and answer.get("peak_bytes"):
        verdict += f", planned {answer['planned_bytes'] / answer['peak_bytes'] - 1:+.0%}"
    return [key, *numbers, number("gradient_off", ".1e"), verdict]


def line(key: str, answer: dict[str, Any]) -> str:
    return " | ".join(cells(key, answer))


def table(result: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    lines = ["| row | s | tokens/s | peak GiB | gradient off | verdict |", "|---|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {line(key, answer)} |" for key, answer in sorted(result["rows"].items()))])


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--budget", type=float, default=30.0, metavar="MINUTES", help="stop after this time, also within a stage"
    )
    parser.add_argument("--stages", nargs="+", type=int, choices=range(1, 7), default=range(1, 7))
    parser.add_argument("--models", nargs="+", choices=[*random_models.SHAPES], default=MODELS)
    parser.add_argument("--only", default="", help="run only rows whose name contains this text")
    parser.add_argument("--cpu-smoke", action="store_true", help="a tiny model on the CPU, transformers only")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "grpo-kit-gpu-check"))
    parser.add_argument("--describe", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch

    if options.cpu_smoke:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        print(NEEDS_CUDA, file=sys.stderr)
        return 2
    elif not options.describe:
        os.environ.pop(MARK, None)
        if count := end_leftovers(options.folder):
            print(f"killed {count} processes of an earlier check", flush=True)
        if (holder := gpu_holder()) is not None:
            print(f"The GPU is in use, so that no figure would be valid: {holder}. Wait, or stop it.", file=sys.stderr)
            return 2
        os.environ[MARK] = str(options.folder.resolve())
    if options.describe:
        print(json.dumps(describe()))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal: run the same command again to continue"))
    print(json.dumps(machine()), flush=True)
    half = "bfloat16" if machine().get("capability", [8, 0]) >= [8, 0] else "float16"
    if options.cpu_smoke:
        todo = smoke_rows()
    else:
        tflops = machine().get("half_tflops", FAST)
        todo = rows(options.models, lambda name: find_spec(name) is not None, half, tflops)
    todo = [row for row in todo if row.stage in options.stages and options.only in row.key]
    left = 60 * options.budget - (time.monotonic() - began)
    result = check(todo, options.out, options.folder, left, lambda text: print(text, flush=True))
    print(table(result))
    failed = [key for key, answer in result["rows"].items() if answer["failure"]]
    print(f"{len(failed)} of {len(result['rows'])} rows failed; {options.out}")
    return int(bool(failed) or not result["rows"])


if __name__ == "__main__":
    sys.exit(main())
