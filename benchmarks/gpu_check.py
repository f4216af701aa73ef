"""What no CI machine can execute, in stages, on a machine with CUDA; nothing is downloaded.

`python benchmarks/gpu_check.py --budget MINUTES [--stages 1 2] [--models ...] [--out FILE]`, most telling stage first:

    1  doctor, and runs with every check of the first steps on: by Unsloth and by transformers, with 4-bit weights first, where
       vLLM is installed with its engine awake and in standby; quickstart
    2  gradients: packed, padded, and the trainer's own loss, held against TRL's in float32 on the same weights
    3  seconds, tokens a second and peak memory of an update: ours, TRL's own and Unsloth's own, on the same rollouts
    4  the plan held against measured memory (`grpo-kit plan --probe`)
    5  variants of ours, and attention and head by themselves
    6  generation

Models have random weights in the shapes of `random_models.py`, rollouts random tokens of drawn lengths (`WORKS` in
gpu_arms.py), so that no time goes into sampling them. Rows are done in processes of their own (gpu_arms.py), one for each
model and loss, so that nothing of one arm is left in another; this process never touches the GPU. Each row is filed in FILE
and told in one line as soon as it is done, so that a check that is killed has told what it knows; what it leaves running is
ended by the next one. A row that takes longer than its limit is ended with all that it has started, and the stack that it
stood on is kept. Rows that FILE has are not done again, unless they failed. Stages take turns of some minutes (`TURNS`) until
the budget is gone or all is done.
Prints a table; exits with 1 if a row failed. `--cpu-smoke` does the same with a tiny model on the CPU, transformers
only: it shows that this file works, no more.
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
"""Seconds of a stage, after which the next one has its turn; the row in progress is finished. `TURNS`: of other stages."""
MARK = "GRPO_KIT_GPU_CHECK"
"""An environment variable of every process that is started here: the folder of the check."""
LEAST = 20.0
"""Seconds without which no process is begun."""
MODELS = ("qwen2.5-1.5b", "llama-3.1-8b", "qwen2.5-3b")
SMALL = "qwen2.5-0.5b"
LOSSES = ("own", "ours")
"""The first to compute a gradient is the one that the others are held against."""
COMMANDS = ("doctor", "quickstart", "train", "plan")
"""Kinds of rows that commands of the kit do."""
WORKER = Path(__file__).with_name("gpu_arms.py")
NATS = {"float32": 2e-3, "bfloat16": 0.15, "float16": 0.15}
"""Of scores off plain logits: those of kit/trainer/sanity_checks.py."""
MEASURED = {"half_tflops": None, "copy_tb_per_second": None, "launch_microseconds": None}
"""Of a machine; differs from time to time."""
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "bitsandbytes",
    "unsloth",
    "unsloth_zoo",
    "vllm",
)
NEEDS_CUDA = (
    "benchmarks/gpu_check.py needs a CUDA GPU, and torch finds none here. Run it on a machine with one, or try the "
    "file itself on the CPU: python benchmarks/gpu_check.py --cpu-smoke"
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "UNSLOTH_DISABLE_STATISTICS": "1", "PYTHONUNBUFFERED": "1"
}  # fmt: skip


# --- what is done -----------------------------------------------------------------------------------------------------


def rows(models: Sequence[str], has: Callable[[str], bool], half: str = "bfloat16") -> list[Row]:
    """Everything that a machine with a GPU can do, by stage, most telling first.

    has: whether a package is installed. half: the 16-bit precision that the GPU computes in.
    """
    backends = ["transformers", *(["unsloth"] if has("unsloth") else [])]
    bits = [*([4] if has("bitsandbytes") else []), 16]
    first, least = models[0], bits[0]

    def trains(bit: int, **more: Any) -> list[Row]:
        limit = 400 if more else 300
        return [Row(1, "train", "ragged", SMALL, one, bits=bit, more=more, limit=limit) for one in reversed(backends)]

    runs = trains(least)
    for bit in [bit for bit in bits if has("vllm") and (bit == 16 or has("vllm_bnb_plugin"))]:
        runs += trains(bit, engine="vllm", eager=True)
        runs += trains(bit, engine="vllm", standby=True) if half == "bfloat16" else trains(bit, engine="vllm")
    runs += trains(16) if least != 16 else []
    doctor, quickstart = Row(1, "doctor"), Row(1, "quickstart", limit=240)

    ways: list[dict[str, Any]] = [{"loss": "own"}, {}, {"more": {"packing": False}}]
    exact = [Row(2, "update", "ragged", SMALL, bits=b, dtype="float32", **way) for way in ways for b in bits]
    # Of a cold disk come Unsloth's import and Triton's compilation: each process of Unsloth's begins with both.
    rounded = [
        Row(2, "update", "ragged", SMALL, one, loss, b, limit=200) for one in backends for loss in LOSSES for b in bits
    ]

    arms = list(itertools.product(backends, LOSSES))
    short = [
        Row(3, "update", work, model, *arm, least, limit=250, counts=work == "gsm8k")
        for model, arm, work in itertools.product(models, arms, ("gsm8k", "reasoning"))
    ]
    long = [Row(3, "update", "long", model, *arm, least, limit=300) for model, arm in itertools.product(models, arms)]

    plans = [
        Row(4, "plan", "gsm8k", first, bits=least, more={"gradient_checkpointing": on}, limit=200)
        for on in (True, False)
    ]

    kernels = [
        Row(5, "attention", work, more=more)
        for work in ("gsm8k", "reasoning")
        for more in ({"way": "varlen"}, {"way": "packed"}, {"way": "efficient"}, {"way": "groups"})
    ] + [Row(5, "head", more={"way": way}) for way in ("TRL", "kit")]
    differ: tuple[dict[str, Any], ...] = (
        {}, {"kernel": "efficient"}, {"kernel": "groups"}, {"token_budget": 8192}, {"fused": False}, {"packing": False}
    )  # fmt: skip
    variants = [
        Row(5, "update", work, first, bits=least, more=more) for more in differ for work in ("gsm8k", "reasoning")
    ]
    samples = [
        Row(6, "generate", "gsm8k", one, backend, bits=least, limit=250) for one in models for backend in backends
    ]
    everything = [doctor, *runs, quickstart, *exact, *rounded, *short, *long, *plans, *kernels, *variants, *samples]
    return [dataclasses.replace(row, dtype=half) if row.dtype == "bfloat16" else row for row in everything]


def smoke_rows() -> list[Row]:
    """What a CPU can do: a run, and everything else in one process."""
    like: dict[str, Any] = {"work": "smoke", "dtype": "float32", "limit": 600}
    ours: tuple[dict[str, Any], ...] = ({}, {"packing": False}, {"token_budget": 40}, {"fused": False})
    return [
        Row(1, "doctor"),
        Row(1, "train", model="tiny", **like),
        Row(1, "plan", model="tiny", **like),
        Row(2, "update", model="tiny", loss="own", counts=True, **like),
        *(Row(2, "update", model="tiny", more=more, **like) for more in ours),
        Row(2, "update", model="tiny", **like | {"dtype": "bfloat16"}),
        Row(2, "generate", model="tiny", **like),
        Row(2, "attention", more={"way": "packed"}, **like),
        Row(2, "head", more={"way": "kit"}, **like),
    ]


# --- how it is done ---------------------------------------------------------------------------------------------------


def check(
    todo: Sequence[Row], file: Path, folder: Path, seconds: float, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Does the rows that `file` lacks, stage by stage in turns, for as long as there is time; files each."""
    result: dict[str, Any] = {"machine": machine(), "rows": {}}
    if file.is_file():
        before = json.loads(file.read_text())
        if before["machine"] | MEASURED != result["machine"] | MEASURED:
            raise SystemExit(f"{file} is of another machine, or of other packages: give --out another file.")
        result = before
    end = time.monotonic() + seconds
    left = [row for row in todo if result["rows"].get(row.key, {"wrong": "not done"})["wrong"]]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(result, indent=1) + "\n")
    while left and end - time.monotonic() > LEAST:
        for stage in sorted({row.stage for row in left}):
            turn = min(end, time.monotonic() + TURNS.get(stage, TURN))
            for row, answer in worked([row for row in left if row.stage == stage], folder, turn, end):
                left.remove(row)
                result["rows"][row.key] = answer
                write_atomic(file, json.dumps(result, indent=1) + "\n")
                say(line(row.key, answer))
    if left:
        say(f"no time was left for {len(left)} of {len(todo)} rows: the same command goes on with them")
    return result


def worked(todo: Sequence[Row], folder: Path, turn: float, end: float) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Rows with their answers: none is begun when the turn is over, none goes on beyond the end. Clock: monotonic."""
    left = list(todo)
    while left and turn - time.monotonic() > LEAST:
        some = next(alike(left))
        try:
            if some[0].kind in COMMANDS:
                answers: Iterator[dict[str, Any]] = iter([by_command(some[0], folder, end)])
            else:
                failure = build_apart(some[0].model, folder, end)
                failed = iter([failure] * len(some)) if failure else None
                answers = failed or in_a_process(some, folder, turn, end)
        except TimeoutError:
            return
        done = 0
        for row, answer in zip(some, answers, strict=False):
            yield row, answer | {"wrong": wrong(row, answer)}
            done += 1
        if not done:  # no time was left for it
            return
        left = left[done:]


def alike(todo: Sequence[Row]) -> Iterator[list[Row]]:
    """Neighbours that one process can do."""
    for (command, _), some in itertools.groupby(todo, lambda row: (row.kind in COMMANDS, row.process)):
        neighbours = list(some)
        yield from ([[row] for row in neighbours] if command else [neighbours])


def in_a_process(some: Sequence[Row], folder: Path, turn: float, end: float) -> Iterator[dict[str, Any]]:
    """Answers of one process for these rows, as they come. It ends with the first row that takes too long, or kills it."""
    with tempfile.TemporaryDirectory() as place:
        request, answers, log = (Path(place) / name for name in ("request.json", "answers", "log"))
        request.write_text(json.dumps({"rows": [dataclasses.asdict(row) for row in some], "folder": str(folder)}))
        answers.touch()
        command = [sys.executable, str(WORKER), str(request), str(answers)]
        with log.open("w") as output, answers.open() as lines:
            process = subprocess.Popen(command, env=environment(), stdout=output, stderr=subprocess.STDOUT)
            try:
                for number, row in enumerate(some):
                    if number and time.monotonic() > turn:
                        return
                    limit, text = min(time.monotonic() + row.limit, end), ""
                    while not text.endswith("\n"):
                        ended = process.poll()
                        if more := lines.readline():  # a long line comes in pieces
                            text += more
                        elif ended is not None:
                            if not (ended == GPU_LOST and number):
                                yield {"error": f"the process ended with {ended}: {tail(log)}"}
                            return
                        elif time.monotonic() > limit:
                            if limit < end:
                                yield {"error": f"ended after {row.limit:g} s: {tail(log)}"}
                            return
                        else:
                            time.sleep(0.1)
                    yield json.loads(text)
            finally:
                end_all(process)


def environment() -> dict[str, str]:
    """Of every process: offline, and on one GPU, the first of those that may be used."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": first, "PYTHONPATH": path}


def end_all(process: subprocess.Popen[Any]) -> None:
    """Ends a process and all that it has started, whose memory on the GPU the next one needs."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        for one in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    process.kill()
    process.wait()


def end_leftovers(folder: Path) -> int:
    """Ends what a check in this folder that was killed has left on the GPU; returns how many processes."""
    import psutil

    left = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if one.environ().get(MARK) == str(folder.resolve()):
                one.kill()
                left.append(one)
    psutil.wait_procs(left, timeout=10)
    return len(left)


def build_apart(name: str, folder: Path, end: float) -> dict[str, Any] | None:
    """The model's folder, built in a process of its own: the memory of the GPU is another's afterwards. None, or why not.

    Raises `TimeoutError` at the end.
    """
    if not name:
        return None
    command, limit = [sys.executable, random_models.__file__, name, str(folder)], max(1.0, end - time.monotonic())
    try:
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    return {"error": f"{name} was not built: {done.stderr[-1500:]}"} if done.returncode else None


def by_command(row: Row, folder: Path, end: float) -> dict[str, Any]:
    """Runs the kit's command of a row and returns what it measured. Raises `TimeoutError` at `end` (monotonic seconds)."""
    run, place = f"{row.kind}-{time.time_ns()}", folder / "run.yaml"
    own = ["-o", f"run.id={run}", "-o", f"run.root={folder / 'runs'}"]
    commands = {  # runs without a supervisor, whose process would go on when this one is killed
        "doctor": ["kit.cli", "doctor"],
        "quickstart": ["kit.train", "quickstart", "-o", "optimisation.steps=10", *own],
        "train": ["kit.train", str(place), *own],
        "plan": ["kit.cli", "plan", str(place), "--probe", "--json"],
    }
    if row.model:
        if failure := build_apart(row.model, folder, end):
            return failure
        work = WORKS[row.work]
        longest = (work.prompt, work.longest)
        place.write_text(json.dumps(configuration(row, folder / row.model, folder, longest)))
    limit, began = max(1.0, min(row.limit, end - time.monotonic())), time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-m", *commands[row.kind]],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        if limit < row.limit:
            raise TimeoutError from None
        process.send_signal(signal.SIGABRT)  # of which it writes the stack that it stands on
        with contextlib.suppress(subprocess.TimeoutExpired):
            output, errors = process.communicate(timeout=10)
            return {"error": f"{(output + errors)[-2000:]}\nended after {limit:.0f} s"}
        return {"error": f"ended after {limit:.0f} s, without a word"}
    finally:
        end_all(process)
    if process.returncode:
        return {"error": (output + errors)[-2000:]}
    answer: dict[str, Any] = {"process_seconds": time.monotonic() - began}
    try:
        if row.kind == "plan":
            plan = json.loads(output)
            return answer | {"planned_bytes": plan["memory"]["peak_bytes"]} | plan["probe"]
        return answer | (trained(run, folder / "runs") if row.kind in ("train", "quickstart") else {})
    except Exception as error:  # what a command has left is not as expected: the next rows are done all the same
        return {"error": f"{output[-1500:]}\n{type(error).__name__}: {error}"}


def trained(run: str, root: Path) -> dict[str, Any]:
    """What a run has left that says how it went."""
    from kit.api import Run
    from kit.trainer.metric_log import SAMPLER_DIFFERENCE

    made = Run(run, root)
    metrics, env = made.metrics(), json.loads((made.path / "env.json").read_text())
    return {
        "state": made.status["state"],
        "steps": made.status["step"],
        "backend": env["backend"]["name"],
        "packing": next((one for one in made.events() if one["kind"] == "packing"), None),
        "changed": env.get("changed_by_backend"),
        "losses": [one["loss"] for one in metrics if "loss" in one],
        "sampler_difference": [one[SAMPLER_DIFFERENCE] for one in metrics if SAMPLER_DIFFERENCE in one],
    }


def wrong(row: Row, answer: dict[str, Any]) -> str | None:
    """Why a row fails; None where it does not."""
    if answer.get("out_of_memory") and row.loss == "own":
        return None  # another's loss at a size that it does not fit: a finding
    if "error" in answer:
        return str(answer["error"]).strip().splitlines()[-1]
    if row.kind in ("train", "quickstart"):
        if answer["state"] != "finished":
            return f"the run is {answer['state']}"
        if row.more.get("engine") == "vllm":
            return handed_over(answer["sampler_difference"], answer["steps"])
    if answer.get("without_gradient"):
        return f"{answer['without_gradient']} weights got no gradient"
    if not answer.get("gradient_off", 0.0) <= LIMITS[row.dtype]:
        return f"the gradient is off by {answer['gradient_off']:.2g} of its norm, at most {LIMITS[row.dtype]:g} is rounding"
    if not answer.get("nats_off_plain_logits", 0.0) <= NATS[row.dtype]:
        return f"scores are {answer['nats_off_plain_logits']:.2g} nats off plain logits, at most {NATS[row.dtype]:g} is rounding"
    return None


def handed_over(seen: Sequence[float], steps: int, rounding: float = 0.1) -> str | None:
    """Whether every step's completions came with the log-probabilities (nats a token) of the weights that trained.

    The adapter of the first step changes nothing: that difference is of rounding alone, and what later ones are held against.
    """
    if len(seen) == steps and seen[0] <= rounding and all(one <= 0.01 + 2 * seen[0] for one in seen):
        return None
    told = ", ".join(f"{one:.2g}" for one in seen) or "of nothing"
    return f"vLLM's log-probabilities are off by {told} nats a token: the first of rounding, the others of no more expected"


# --- what is told -----------------------------------------------------------------------------------------------------


@functools.cache
def machine() -> dict[str, Any]:
    """The GPU, what it reaches, and the packages."""
    import torch

    versions = {name: version(name) for name in PACKAGES if find_spec(name) is not None}
    found: dict[str, Any] = {"gpu": None, "python": platform.python_version(), "packages": versions}
    if not torch.cuda.is_available():
        return found
    asked = [sys.executable, __file__, "--describe"]
    done = subprocess.run(asked, env=environment(), capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"The GPU does not work here: {done.stderr[-2000:]}")
    found |= json.loads(done.stdout.splitlines()[-1])
    return found


def version(name: str) -> str:
    """Of an installed package; some builds come without any."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def describe() -> dict[str, Any]:
    """The GPU, and what it reaches on large operands. In a process of its own, which takes 4 GiB of it."""
    import torch

    card = torch.cuda.get_device_properties(0)
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(asked, capture_output=True, text=True).stdout.split() if which("nvidia-smi") else []
    found: dict[str, Any] = {"gpu": card.name, "gib": round(card.total_memory / 2**30)}
    found |= {
        "capability": [card.major, card.minor],
        "driver": driver[0] if driver else None,
        "cuda": torch.version.cuda,
    }

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
    b, one = torch.empty(2**30, device="cuda"), torch.ones(1, device="cuda")
    found["half_tflops"] = 2 * 8192**3 / seconds(lambda: a @ a, 10) / 1e12
    found["copy_tb_per_second"] = b.nbytes / seconds(lambda: b[: 2**29].copy_(b[2**29 :]), 10) / 1e12
    found["launch_microseconds"] = 1e6 * seconds(lambda: one.add_(1.0), 10000)
    return found


def tail(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-2000:]


def cells(key: str, answer: dict[str, Any]) -> list[str]:
    """A line of the table: what, seconds, tokens a second, peak GiB, gradient, verdict."""

    def shown(name: str, form: str, factor: float = 1.0) -> str:
        return format(answer[name] * factor, form) if isinstance(answer.get(name), (int, float)) else "-"

    numbers = [shown("seconds", ".4g"), shown("tokens_per_second", ".0f"), shown("peak_bytes", ".2f", 2**-30)]
    verdict = answer["wrong"] or ("out of memory" if answer.get("out_of_memory") else "passed")
    if answer.get("planned_bytes") and answer.get("peak_bytes"):
        verdict += f", planned {answer['planned_bytes'] / answer['peak_bytes'] - 1:+.0%}"
    return [key, *numbers, shown("gradient_off", ".1e"), verdict]


def line(key: str, answer: dict[str, Any]) -> str:
    return " | ".join(cells(key, answer))


def table(result: dict[str, Any]) -> str:
    """Markdown, a line a row."""
    lines = ["| row | s | tokens/s | peak GiB | gradient off | verdict |", "|---|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {line(key, answer)} |" for key, answer in sorted(result["rows"].items()))])


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", type=float, default=30.0, metavar="MINUTES", help="ends in time, also amid a stage")
    parser.add_argument("--stages", nargs="+", type=int, choices=range(1, 7), default=range(1, 7))
    parser.add_argument("--models", nargs="+", choices=[*random_models.SHAPES], default=MODELS)
    parser.add_argument("--only", default="", help="rows with this in their name")
    parser.add_argument("--cpu-smoke", action="store_true", help="a tiny model on the CPU, transformers only")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "grpo-kit-gpu-check"))
    parser.add_argument("--describe", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    import torch

    if given.cpu_smoke:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        print(NEEDS_CUDA, file=sys.stderr)
        return 2
    elif not given.describe:
        os.environ.pop(MARK, None)
        if count := end_leftovers(given.folder):
            print(f"ended {count} processes of a check that was killed", flush=True)
        if (holder := gpu_holder()) is not None:
            print(f"The figures would be of a shared GPU, of which {holder}. Wait, or stop it.", file=sys.stderr)
            return 2
        os.environ[MARK] = str(given.folder.resolve())
    if given.describe:
        print(json.dumps(describe()))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal: the same command goes on"))
    print(json.dumps(machine()), flush=True)
    half = "bfloat16" if machine().get("capability", [8, 0]) >= [8, 0] else "float16"
    wanted = smoke_rows() if given.cpu_smoke else rows(given.models, lambda name: find_spec(name) is not None, half)
    wanted = [row for row in wanted if row.stage in given.stages and given.only in row.key]
    left = 60 * given.budget - (time.monotonic() - began)
    result = check(wanted, given.out, given.folder, left, lambda text: print(text, flush=True))
    print(table(result))
    failed = [key for key, answer in result["rows"].items() if answer["wrong"]]
    print(f"{len(failed)} of {len(result['rows'])} rows failed; {given.out}")
    return int(bool(failed) or not result["rows"])


if __name__ == "__main__":
    sys.exit(main())
