"""The real trainer on simulated GPUs: no operation mixes devices, and the host waits for the device a bounded number of times.

The runs are in separate processes (rehearse.py); the tests read their results.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import warm_processes

pytestmark = [pytest.mark.rehearsal, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
KINDS = {
    "transformers": ["9.0", "8.9+4bit", "7.5", "9.0+wait"],
    "unsloth": ["9.0", "8.9+4bit", "7.5", "9.0+wait+host", "bfloat16", "float16"],
    "gpu_check": ["9.0", "7.5+4bit"],
}
"""By process: runs of a backend, Unsloth's kernels in a precision, or the rows of benchmarks/gpu_check.py."""
WAITS = 4
"""Times that the host may wait for the device in a micro-batch, whatever its size."""
FIRST = 3
"""Micro-batches whose values are asked for, to see that nothing wraps the loss."""
RUNS = [(name, kind) for name in ("transformers", "unsloth") for kind in ("9.0", "8.9+4bit", "7.5")]
Seen = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="session")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Return a function that rehearses a backend on a kind of GPU: results by completions per micro-batch."""
    folder = tmp_path_factory.mktemp("rehearsal")
    root, tests = HERE.parents[1], HERE.parent
    path = os.pathsep.join(map(str, (root, root / "benchmarks", tests, HERE, tests / "unsloth_backend")))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    script = [sys.executable, str(HERE / "rehearse.py"), str(folder)]
    subprocess.run([*script, "model"], env=environment, check=True, capture_output=True)
    done: set[str] = set()

    def seen(backend: str, kind: str) -> dict[str, Any]:
        if backend not in done:
            # Warm processes have imported TRL, but Unsloth must be imported first; and the kit's head, which replaces TRL's.
            with nullcontext() if backend == "transformers" else warm_processes.cold():
                run = subprocess.run(
                    [*script, backend, *KINDS[backend]],
                    env=environment,
                    cwd=folder,
                    capture_output=True,
                    text=True,
                    timeout=580,
                )
            assert run.returncode == 0, run.stderr[-4000:]
            done.add(backend)
        report: dict[str, Any] = json.loads((folder / f"{backend}-{kind}.json").read_text())
        return report

    return seen


def micro_batches(run: dict[str, Any]) -> list[int]:
    """The waits of micro-batches after the first ones, which log values."""
    return run["waits"][FIRST:]


@pytest.mark.parametrize(("backend", "kind"), RUNS)
def test_it_trains(rehearsed: Any, backend: str, kind: str) -> None:
    for run in rehearsed(backend, kind).values():
        assert run["steps"] == 3
        assert all(math.isfinite(loss) for loss in run["losses"])
        assert all(norm > 0 for norm in run["gradients"])
        assert run["half"] == ("fp16" if kind.startswith("7.5") else "bf16")
        assert run["kernels"]["train"] > 1000
        assert run["mixed"] == [], "operands on two devices"


@pytest.mark.parametrize(("backend", "kind"), RUNS)
def test_the_host_waits_a_bounded_number_of_times(rehearsed: Any, backend: str, kind: str) -> None:
    for completions, run in rehearsed(backend, kind).items():
        waits = micro_batches(run)
        assert len(waits) >= 2
        assert max(waits) <= WAITS, (completions, waits, [at for at in run["where"] if at[0] == "train"])


@pytest.mark.parametrize(("backend", "kind"), RUNS)
def test_waits_do_not_grow_with_the_micro_batch(rehearsed: Any, backend: str, kind: str) -> None:
    small, large = (max(micro_batches(run)) for run in rehearsed(backend, kind).values())
    assert large <= small


@pytest.mark.parametrize(("backend", "kind"), RUNS)
def test_no_copy_of_a_micro_batch_holds_the_host_up(rehearsed: Any, backend: str, kind: str) -> None:
    for run in rehearsed(backend, kind).values():
        assert run["copies"][1:] == [0] * (len(run["copies"]) - 1), run["copied"]


@pytest.mark.parametrize(("backend", "kind"), [("transformers", "9.0+wait"), ("unsloth", "9.0+wait+host")])
def test_a_planted_wait_is_seen(rehearsed: Any, backend: str, kind: str) -> None:
    plain, planted = rehearsed(backend, "9.0"), rehearsed(backend, kind)
    for size, run in planted.items():
        assert run["waits"] == [wait + 1 for wait in plain[size]["waits"]]
        assert run["losses"] == plain[size]["losses"]


def test_a_planted_operand_of_the_host_is_seen(rehearsed: Any) -> None:
    for run in rehearsed("unsloth", "9.0+wait+host").values():
        assert [(phase, name, count) for phase, name, _, count in run["mixed"]] == [("train", "aten::mul", 6)]


@pytest.mark.parametrize(("kind", "kernel"), [("9.0", "flash"), ("8.9+4bit", "flash"), ("7.5", "efficient")])
def test_unsloths_class_trains_in_packs(rehearsed: Any, kind: str, kernel: str) -> None:
    """Packs have shared prompts and one call of attention per layer."""
    for run in rehearsed("unsloth", kind).values():
        assert run["packing"] == {"packing": "packed", "share_prompts": True, "reason": ""}
        assert f"{kernel} by lengths" in {name for phase, name, *_ in run["attention"] if phase == "train"}


@pytest.mark.parametrize(("precision", "rounding"), [("bfloat16", 0.01), ("float16", 0.002)])
def test_what_plays_unsloths_kernels_gives_what_they_give(rehearsed: Any, precision: str, rounding: float) -> None:
    """Unsloth's own kernels neither wait nor mix devices, except for the planted weight on the host."""
    report = rehearsed("unsloth", precision)
    assert len(report["off"]) == 10
    assert max(report["off"]) < rounding
    assert (report["waits"], report["mixed"]) == (0, [])
    assert [name for _, name, *_ in report["planted"]] == ["triton _rms_layernorm_forward"]


@pytest.mark.parametrize("kind", KINDS["gpu_check"])
def test_every_process_of_gpu_check_works_on_a_gpu(rehearsed: Any, kind: str) -> None:
    """Runs stages 2, 3, 5 and 6 with a tiny model; stages 1 and 4 are `grpo-kit` itself."""
    report = rehearsed("gpu_check", kind)
    assert {key: answer["failure"] for key, answer in report["rows"].items()} == dict.fromkeys(report["rows"])
    assert report["mixed"] == []
    updates = {key: answer for key, answer in report["rows"].items() if "update" in key}
    assert {dtype for answer in updates.values() for dtype in answer["autocast"]} == {
        "torch.float16" if kind.startswith("7.5") else "torch.bfloat16"
    }
    first, *others = updates.values()
    assert first["trainer"] == "GRPOTrainer"
    assert all(update["gradient_off"] < 0.02 for update in others)
    if kind == "9.0":  # the first in its process
        assert first["head"].startswith("trl."), "the reference must not use the kit's head"
        counted = next(answer for key, answer in updates.items() if key.startswith("3"))
        assert counted["tflop"] > 0, counted.get("not_counted")
        assert {name for _, name, _, _ in report["attention"]} >= {"flash by lengths", "efficient by lengths"}
        made = next(answer for key, answer in report["rows"].items() if "generate" in key)
        assert made["completion_tokens"] == 8 * 16


def test_completions_are_drawn_from_float32_logits_of_a_16_bit_head() -> None:
    """Afterwards the head is unchanged."""
    import torch
    from pretended_gpu import PretendedGPU, pretended
    from tiny_qwen import tiny_qwen, tiny_tokenizer

    from kit.generation.decoding import as_in_training

    model = tiny_qwen(tiny_tokenizer()).to(torch.bfloat16)
    with pretended(PretendedGPU()), torch.no_grad():
        model.to("cuda")
        ids = torch.ones(1, 4, dtype=torch.long, device="cuda")
        rounded = model(ids).logits
        with as_in_training(model, None):
            exact = model(ids).logits
        assert (rounded.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(model(ids).logits, rounded)
        torch.testing.assert_close(exact, rounded.float(), rtol=2**-8, atol=0)
        assert not torch.equal(exact, rounded.float())
