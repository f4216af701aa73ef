"""benchmarks/gpu_check.py without a GPU: its rows, their order, and their failures."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_check

    return gpu_check


def everything(gpu_check: Any, *without: str) -> list[Any]:
    return gpu_check.rows(gpu_check.MODELS, lambda name: name not in without)


# --- the rows ---------------------------------------------------------------------------------------------------------


def test_every_row_is_a_run_that_the_kit_accepts_and_has_a_name_of_its_own(gpu_check: Any, tmp_path: Path) -> None:
    from kit.config import load_config

    rows = everything(gpu_check)
    assert len({row.key for row in rows}) == len(rows)
    assert {row.stage for row in rows} == {1, 2, 3, 4, 5, 6}
    on_a_t4 = gpu_check.rows(gpu_check.MODELS, lambda _: True, "float16")
    arms = [{row.options.get("arm") for row in some if row.kind == "attention"} for some in (rows, on_a_t4)]
    assert arms[0] - arms[1] == {"varlen"}, "FlashAttention needs Ampere"
    for row in rows:  # rows without a model need a backend, too
        work = gpu_check.WORKS[row.work]
        config = load_config(gpu_check.configuration(row, tmp_path, tmp_path, (work.prompt, work.longest)))
        assert (config.model.load_in_4bit, config.model.backend) == (row.bits == 4, row.backend)
        assert config.optimisation.batch_size == work.prompts * work.group


def test_arms_compute_trls_gradient_and_what_a_row_asks_for_reaches_the_trainer(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of GPU processes: TRL's own loss, and the kit's with the token budget of a run, with another one, and without."""
    import random_models
    from gpu_arms import Worker

    random_models.build_model("tiny", tmp_path)
    like: dict[str, Any] = {"work": "smoke", "dtype": "float32", "model": "tiny"}
    own = gpu_check.Row(2, "update", loss="own", **like)
    kit = [gpu_check.Row(2, "update", options=each, **like) for each in ({}, {"token_budget": 40}, {"token_budget": 0})]
    monkeypatch.setattr("kit.runner.build.budget_of", lambda *_: 72)
    worker = Worker([own, *kit], tmp_path)
    answers = [worker.answer(row) for row in (own, *kit)]
    assert [gpu_check.failure_of(row, answer) for row, answer in zip((own, *kit), answers, strict=True)] == [None] * 4
    assert all(0 < answer["gradient_off"] < 1e-5 for answer in answers[1:])
    assert [answer["savings"]["token_budget"] for answer in answers[1:]] == ["on", "on", "no budget is set"]


# --- failures and processes -------------------------------------------------------------------------------------------


def test_a_row_that_fails_or_hangs_is_told_and_the_next_is_done(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plants a run whose directory lacks a file, and a command that does not end, with a child process."""
    monkeypatch.chdir(tmp_path)  # `-m` searches the working directory first
    (tmp_path / "kit").mkdir()
    hang, own = "import time; time.sleep(60)", "start_new_session=True"
    child = f"import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', '{hang}'], {own}).pid)\n"
    for name, text in {"__init__": "", "train": "print('done')", "cli": child + hang}.items():
        (tmp_path / "kit" / f"{name}.py").write_text(text)
    file, lines = tmp_path / "out.json", list[str]()
    rows = [gpu_check.Row(1, "quickstart"), gpu_check.Row(1, "doctor", limit=1.0)]
    done = gpu_check.check(rows, file, tmp_path / "folder", 60.0, lines.append)["rows"]
    assert [line.partition(" | ")[0] for line in lines] == ["1 quickstart", "1 doctor"]
    assert done["1 quickstart"]["failure"].startswith(("FileNotFoundError", "RunError"))
    assert done["1 doctor"]["failure"] == "ended after 1 s"
    assert "cli.py" in done["1 doctor"]["error"], "the failure has no stack"
    assert '"<string>", line 1' in done["1 doctor"]["error"], "the failure has no stack of the child process"
    child_pid = int(done["1 doctor"]["error"].split()[0])
    assert not psutil.pid_exists(child_pid) or psutil.Process(child_pid).status() == "zombie", "the child runs on"
    assert json.loads(file.read_text())["rows"].keys() == done.keys()
    for output in (
        " accelerate  fail  1.2.0 \n hub cache  ok  53 GiB",
        "torch.AcceleratorError: 1.2.0\nCompile with x",
    ):
        assert "1.2.0" in gpu_check.failure_of(rows[0], {"error": output})


@pytest.mark.parametrize(
    ("gaps", "right"),
    [
        ([0.016, 0.03, 0.02], True),  # bfloat16 on both sides
        ([0.001, 0.002, 0.2], False),  # planted: weights that were not handed over
        ([0.3, 0.3, 0.3], False),  # different from the start
        ([0.001, float("nan"), 0.001], False),
        ([0.001, 0.002], False),  # never compared
    ],
)
def test_an_engine_without_the_trainers_weights_is_seen(gpu_check: Any, gaps: list[float], right: bool) -> None:
    assert (gpu_check.sampler_failure(gaps, 3) is None) is right


@pytest.mark.survival
def test_everything_but_the_gpu_works(gpu_check: Any, tmp_path: Path) -> None:
    """The smoke rows: a run, its plan, packed, padded, TRL's own loss, variants, generation and kernels, with equal gradients."""
    from gpu_arms import answers
    from random_models import build_model

    rows = gpu_check.smoke_rows()
    by_command = [row for row in rows if row.kind in gpu_check.COMMANDS]
    apart = rows[len(by_command) :]
    later = time.monotonic() + 1e6
    results = [next(gpu_check.run_rows([row], tmp_path, later, later))[1] for row in by_command]
    build_model("tiny", tmp_path)
    results += answers(apart, tmp_path)
    assert [gpu_check.failure_of(row, answer) for row, answer in zip(rows, results, strict=True)] == [None] * len(rows)
    doctor, trained, planned, own, kit, padded, parts, uncast, half, generated, *_ = results
    assert doctor["process_seconds"] > 0
    assert (trained["state"], trained["packing"]["packing"]) == ("finished", "packed")
    assert planned["planned_bytes"] > 0 < planned["peak_bytes"]
    assert own["tflop"] > 0
    assert max(row["gradient_off"] for row in (kit, padded, parts, uncast)) < 1e-5
    assert {row["reference"] for row in (own, kit, half)} == {apart[0].key}
    assert kit["forwarded_tokens"] < padded["forwarded_tokens"] == own["forwarded_tokens"]
    assert (own["autocast"], kit["autocast"], half["autocast"]) == (["none"], ["none"], ["torch.bfloat16"])
    assert generated["completion_tokens"] == 8 * 16  # random weights do not end completions
    names = {row.key: answer | {"failure": None} for row, answer in zip(rows, results, strict=True)}
    table = gpu_check.table({"rows": names})
    assert all(name in table for name in names)
    assert [line.split()[2] for line in table.splitlines() if "not compared" in line] == ["attention", "head"]
    rounded = "2 update tiny, 16-bit, transformers, TRL's own, rounded"  # not the reference, which is in float32
    assert gpu_check.cells(rounded, {"failure": None, "gradient_norm": 1.0})[-1] == "passed, gradient not compared"
