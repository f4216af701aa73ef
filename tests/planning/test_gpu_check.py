"""benchmarks/gpu_check.py: what it does, in which order, and what it fails on, as far as that shows without a GPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_check

    return gpu_check


def everything(gpu_check: Any, *without: str) -> list[Any]:
    return gpu_check.rows(gpu_check.MODELS, lambda name: name not in without)


# --- what is done -----------------------------------------------------------------------------------------------------


def test_every_row_is_a_run_that_the_kit_accepts_and_has_a_name_of_its_own(gpu_check: Any, tmp_path: Path) -> None:
    from kit.config import load_config

    rows = everything(gpu_check)
    assert len({row.key for row in rows}) == len(rows)
    assert {row.stage for row in rows} == {1, 2, 3, 4, 5, 6}
    for row in rows:  # also those without a model: their process asks for a backend
        work = gpu_check.WORKS[row.work]
        config = load_config(gpu_check.configuration(row, tmp_path, tmp_path, (work.prompt, work.longest)))
        assert (config.model.load_in_4bit, config.model.backend) == (row.bits == 4, row.backend)
        assert config.optimisation.batch_size == work.prompts * work.group


def test_the_first_gradient_of_a_precision_is_trls_own_in_float32(gpu_check: Any) -> None:
    """The others are held against it."""
    for bits in (16, 4):
        first = next(row for row in everything(gpu_check) if row.stage == 2 and row.bits == bits)
        assert (first.loss, first.dtype, first.backend) == ("own", "float32", "transformers")


def test_no_loss_shares_a_process_with_another_nor_a_model_with_another(gpu_check: Any) -> None:
    """Ours puts its head and its attention under TRL for the rest of a process; a model's memory stays in it."""
    apart = [row for row in everything(gpu_check) if row.kind not in gpu_check.COMMANDS]
    groups = list(gpu_check.alike(apart))
    assert [row for some in groups for row in some] == apart
    assert all(len({(row.loss, row.model, row.backend, row.dtype) for row in some}) == 1 for some in groups)
    trls = next(row for row in apart if row.stage == 3)
    assert (trls.loss, trls.backend) == ("own", "transformers")  # what the others are held against


def test_one_varlen_call_is_the_attention_of_a_pack(gpu_check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's call needs CUDA: a plain one with its signature (of 2.13, and of 2.11 without `enable_gqa`) stands for it."""
    import torch
    import torch.nn.attention.varlen as module
    from gpu_kernels import drawn, varlen
    from torch.nn.functional import scaled_dot_product_attention

    from kit.scoring.packed_attention import Layout, packed_attention
    from kit.scoring.packing import Group

    def grouped(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *, window_size: Any, enable_gqa: bool
    ) -> Any:
        assert window_size == (-1, 0)
        assert max_q == int(cu_q.diff().max()), max_k == int(cu_k.diff().max())
        done = []
        for number in range(len(cu_q) - 1):
            one, keys = slice(cu_q[number], cu_q[number + 1]), slice(cu_k[number], cu_k[number + 1])
            a, b, c = (whole[part].transpose(0, 1)[None] for whole, part in ((q, one), (k, keys), (v, keys)))
            behind = torch.ones(a.shape[2], b.shape[2], dtype=torch.bool).tril(b.shape[2] - a.shape[2])
            found = scaled_dot_product_attention(a, b, c, attn_mask=behind, enable_gqa=enable_gqa)
            done.append(found[0].transpose(0, 1))
        return torch.cat(done)

    def plain(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *, window_size: Any = (-1, -1)
    ) -> Any:
        assert q.shape[1] == k.shape[1] == v.shape[1]
        return grouped(q, k, v, cu_q, cu_k, max_q, max_k, window_size=window_size, enable_gqa=False)

    groups = [Group(0, 3, (4, 2, 2)), Group(11, 2, (3,))]
    q, k, v = drawn(0, 1, 4, 16, 8), drawn(1, 1, 2, 16, 8), drawn(2, 1, 2, 16, 8)
    wanted = packed_attention(q, k, v, Layout(groups))
    for call in (grouped, plain):
        monkeypatch.setattr(module, "varlen_attn", call)
        torch.testing.assert_close(varlen(q, k, v, groups), wanted)


def test_arms_compute_trls_gradient_and_what_a_row_asks_for_reaches_the_trainer(gpu_check: Any, tmp_path: Path) -> None:
    """Rows of other processes on a GPU: here TRL's own loss, then ours within a budget that parts its micro-batches."""
    import random_models
    from gpu_arms import Desk

    random_models.build_model("tiny", tmp_path)
    like: dict[str, Any] = {"work": "smoke", "dtype": "float32", "model": "tiny"}
    own = gpu_check.Row(2, "update", loss="own", **like)
    ours = gpu_check.Row(2, "update", more={"token_budget": 40}, **like)
    desk = Desk([own, ours], tmp_path)
    answers = {row.loss: desk.answer(row) for row in (own, ours)}
    assert [gpu_check.wrong(row, answers[row.loss]) for row in (own, ours)] == [None, None]
    assert 0 < answers["ours"]["gradient_off"] < 1e-5
    assert answers["ours"]["savings"]["token_budget"] == "on"


# --- how it is done ---------------------------------------------------------------------------------------------------


def test_what_is_wrong_fails(gpu_check: Any) -> None:
    row = gpu_check.Row(2, "update", dtype="float32")
    good = {"gradient_off": 1e-6, "without_gradient": 0, "nats_off_plain_logits": 1e-6}
    assert gpu_check.wrong(row, good) is None
    for planted in ({"gradient_off": 0.01}, {"gradient_off": float("nan")}, {"without_gradient": 1}):
        assert gpu_check.wrong(row, good | planted)
    assert gpu_check.wrong(row, good | {"nats_off_plain_logits": 0.01})
    assert gpu_check.wrong(row, {"error": "several\nlines: planted"}) == "lines: planted"
    run = gpu_check.Row(1, "train", more={"engine": "vllm"})
    ended = {"state": "finished", "steps": 3, "sampler_difference": [0.001, 0.002, 0.001]}
    assert gpu_check.wrong(run, ended) is None
    assert gpu_check.wrong(run, ended | {"state": "failed"})
    # Planted: weights that were not handed over, and an engine that was never compared.
    for seen in ([0.001, 0.002, 0.2], [0.001, 0.002, float("nan")], [0.001, 0.002], []):
        assert "log-probabilities" in gpu_check.wrong(run, ended | {"sampler_difference": seen})


def test_a_gradient_is_held_against_the_first_one(gpu_check: Any, tmp_path: Path) -> None:
    import torch
    from gpu_kernels import compared

    one = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    assert compared(one, tmp_path / "it") == {"gradient_norm": 5.0}
    assert compared(one, tmp_path / "it")["gradient_off"] == 0
    assert compared({"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([4.0])}, tmp_path / "it")["gradient_off"] == 0.2
    assert compared({"a": one["a"]}, tmp_path / "it")["gradient_off"] == 0.8  # one that is not there


@pytest.mark.survival
def test_everything_but_the_gpu_works(gpu_check: Any, tmp_path: Path) -> None:
    """The smoke rows: a run, its plan, packed, padded, TRL's own loss, variants, generation, kernels; all of one gradient."""
    from gpu_arms import answers
    from random_models import build_model

    rows = gpu_check.smoke_rows()
    by_command = [row for row in rows if row.kind in gpu_check.COMMANDS]
    apart = rows[len(by_command) :]
    later = time.monotonic() + 1e6
    found = [next(gpu_check.worked([row], tmp_path, later, later))[1] for row in by_command]
    build_model("tiny", tmp_path)
    found += answers(apart, tmp_path)
    assert [gpu_check.wrong(row, answer) for row, answer in zip(rows, found, strict=True)] == [None] * len(rows)
    doctor, trained, planned, own, ours, padded, parts, uncast, half, generated, *_ = found
    assert doctor["process_seconds"] > 0
    assert (trained["state"], trained["packing"]["packing"]) == ("finished", "packed")
    assert planned["planned_bytes"] > 0 < planned["peak_bytes"]
    assert own["tflop"] > 0
    assert max(one["gradient_off"] for one in (ours, padded, parts, uncast)) < 1e-5
    assert {one["held_against"] for one in (own, ours, half)} == {apart[0].key}
    assert ours["forwarded_tokens"] < padded["forwarded_tokens"] == own["forwarded_tokens"]
    assert (own["autocast"], ours["autocast"], half["autocast"]) == (["none"], ["none"], ["torch.bfloat16"])
    assert generated["completion_tokens"] == 8 * 16  # random weights end nothing
    names = {row.key: answer | {"wrong": None} for row, answer in zip(rows, found, strict=True)}
    assert all(name in gpu_check.table({"rows": names}) for name in names)


def test_a_gpu_that_a_run_holds_is_not_checked(
    gpu_check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of the check would wait until the limit of their row, and every figure would be of what the run leaves."""
    import torch

    from kit.runs import lock

    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path))
    monkeypatch.setattr(lock, "gpus", lambda: ["0"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "machine", lambda: pytest.fail("the GPU was used"))
    monkeypatch.setattr("sys.argv", ["gpu_check.py"])
    held = lock.GpuLock(["0"])
    assert held.take({"run": "mine", "pid": 1}) is None
    try:
        assert gpu_check.main() == 2
    finally:
        held.release()
    assert "run 'mine'" in capsys.readouterr().err
