"""Common mistakes: one message with the remedy, exit code 2, and no run that looks finished."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.runs.store import RunDir, RunStore


def is_one_message(text: str, *words: str) -> None:
    assert text.startswith("error: ")
    assert "Traceback" not in text
    assert text.count("error: ") == 1 or text.count("\nerror: ") == 0
    for word in words:
        assert word in text, text


def write_reward(body: str, name: str = "reward.py") -> str:
    """Write a file with the function `score(prompts, completions, **columns)`; return the override that selects it."""
    Path(name).write_text(
        f"import math, os, signal, pathlib\ncalls = []\n\ndef score(prompts, completions, **columns):{body}\n"
    )
    return f'reward.functions=[{{"path": "{name}:score"}}]'


# --- before anything is written ---------------------------------------------------------------------------------------

REFUSED = {
    "no dataset file": ("data.source=rows.jsonl", "DataError", ["rows.jsonl", "no file"]),
    "unknown task": ("data.source=reasoning-gym:chain_sm", "DataError", ["chain_sum"]),
    "no held-out rows to evaluate on": (["data.heldout=0", "evaluation.after=true"], "ConfigError", ["data.heldout"]),
    "no step": ("optimisation.batch_size=4096", "ConfigError", ["would have no step", "training rows"]),
    "prompts all too long": ("data.max_prompt_tokens=3", "DataError", ["data.max_prompt_tokens", "median"]),
    "longer than the context": ("generation.max_completion_tokens=4000", "ConfigError", ["context of 1024", "Lower"]),
    "kl without a reference": (
        ["objective.regularizers=[{name: kl, coef: 0.1}]", "model.reference=none"],
        "ObjectiveError",
        ["ref_logps", "Set model.reference: base"],
    ),
    "unknown recipe": ("objective.recipe=dapoo", "ConfigError", ["dapo"]),
    "unknown hook": ("objective.clip=ppo_clop", "ConfigError", ["ppo_clip"]),
    "unknown reward preset": ("reward.preset=reasoning-gim", "", ["reasoning-gym"]),
    "no reward file": ('reward.functions=[{"path": "mine.py:score"}]', "", ["mine.py"]),
    "vllm": ("generation.engine=vllm", "EnvironmentUnsupported", ["generation.engine: hf"]),
    "unsloth": ("model.backend=unsloth", "EnvironmentUnsupported", ["model.backend: transformers"]),
    "no model folder": ("model.name=./models/none", "ModelError", ["there is no folder ./models/none"]),
    "4-bit without adapters": (["model.load_in_4bit=true", "model.lora=null"], "ModelError", ["Set model.lora"]),
    "a root below a file": ("run.root=request.json/runs", "RunError", ["a file stands where a folder is needed"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_refused_before_anything_is_written(case: str, attempt: Any, tmp_path: Path) -> None:
    overrides, kind, words = REFUSED[case]
    result = attempt(*([overrides] if isinstance(overrides, str) else overrides))
    assert result.code == 2
    is_one_message(result.message, *words)
    assert result.error["kind"] == kind or not kind
    assert result.folder is None
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def broken_model(tree: Any, model_folder: Path, tmp_path: Path) -> Path:
    """A copy of the model folder, for a test to damage; `tree` trains this copy."""
    folder = tmp_path / "broken"
    folder.mkdir()
    for path in model_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tree["model"]["name"] = str(folder)
    return folder


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"], ["has no tokenizer", "tokenizer.json"]),
        (["tokenizer.json"], ["has no tokenizer", "tokenizer.json"]),
        (["chat_template.jinja"], ["has no chat template", "model.chat_template", "data.chat: false"]),
        (["config.json"], ["has no configuration", "config.json"]),
        (["model.safetensors"], ["has no weights", "*.safetensors"]),
    ],
    ids=["tokenizer", "tokenizer.json", "chat template", "configuration", "weights"],
)
def test_a_model_folder_that_lacks_a_part_is_refused(
    missing: list[str], words: list[str], broken_model: Path, attempt: Any
) -> None:
    for name in missing:
        (broken_model / name).unlink()
    result = attempt()
    assert result.code == 2
    assert result.error["kind"] == "ModelError"
    is_one_message(result.message, str(broken_model), *words)
    assert result.folder is None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", lambda data: b"{"),
        ("config.json", lambda data: data.replace(b'"qwen3"', b'"nonesuch"')),
        ("tokenizer.json", lambda data: data[:100]),
    ],
    ids=["not JSON", "unknown architecture", "cut tokenizer"],
)
def test_a_broken_file_of_the_model_is_named(
    name: str, change: Callable[[bytes], bytes], broken_model: Path, attempt: Any
) -> None:
    path = broken_model / name
    path.write_bytes(change(path.read_bytes()))
    result = attempt()
    assert (result.code, result.error["kind"], result.folder) == (2, "ModelError", None)
    is_one_message(result.message, str(broken_model), "could not be loaded")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: cut(folder / "model.safetensors"), "its weights could not be loaded"),
        (lambda folder: edit(folder, vocab_size=600), "its weights could not be loaded"),
        (
            lambda folder: edit(folder, num_hidden_layers=2, layer_types=["full_attention"] * 2),
            "lack 11 of the weights",
        ),
    ],
    ids=["cut", "of another shape", "of another model"],
)
def test_weights_that_do_not_fit_fail_the_run(
    change: Callable[[Path], None], words: str, broken_model: Path, attempt: Any
) -> None:
    change(broken_model)
    result = attempt()
    assert result.code == 2
    is_one_message(result.message, str(broken_model), words)
    assert result.folder.status()["state"] == "failed"
    assert not result.folder.adapter.exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_model_that_does_not_fit_into_memory_is_refused(attempt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.models.memory.free_memory", lambda device: 20_000.0)
    result = attempt()
    assert (result.code, result.error["kind"], result.folder) == (2, "ModelError", None)
    is_one_message(result.message, "GiB are free", "set model.load_in_4bit: true", "use a model of at most 0.0 billion")


# --- the run directory ------------------------------------------------------------------------------------------------


def test_a_disk_that_is_nearly_full_at_the_start_leaves_no_directory(
    attempt: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kit.runs.store.free_bytes", lambda path: 1_000_000)
    result = attempt()
    assert (result.code, result.error["kind"], result.folder) == (2, "RunError", None)
    is_one_message(result.message, "1.0 MB free", "run.root")
    assert not list(tmp_path.glob("runs/*"))


FULL = Path("/dev/full")  # writes fail as on a full disk


@pytest.mark.parametrize("name", ["metrics.jsonl", "completions/step-00002.partial"])
def test_a_disk_that_fills_up_ends_the_run_as_failed(name: str, attempt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    create = RunStore.create

    def planted(store: RunStore, run_id: str, **known: Any) -> RunDir:
        folder = create(store, run_id, **known)
        target = folder.path / name
        target.parent.mkdir(exist_ok=True)
        target.symlink_to(FULL)
        return folder

    monkeypatch.setattr(RunStore, "create", planted)
    result = attempt()
    assert (result.code, result.error["kind"]) == (2, "RunError")
    is_one_message(result.message, "No space left", name.rpartition("/")[2].partition(".")[0])
    status = result.folder.status()
    assert status["state"] == "failed"
    assert status["exit"] == 2
    assert "No space left" in status["reason"]
    assert not result.folder.adapter.exists()
    assert not list(result.folder.path.rglob("*.partial"))
    assert not (result.folder.path / ".reserve").exists()


@pytest.mark.parametrize(
    "failure",
    [
        RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
    ids=["torch.save", "write"],
)
def test_a_checkpoint_that_does_not_fit_is_removed_and_the_earlier_one_kept(
    failure: Exception, attempt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    save = torch.save

    def full(content: Any, path: Any, *rest: Any, **keywords: Any) -> None:
        if "checkpoint-2" in str(path):
            raise failure
        save(content, path, *rest, **keywords)

    monkeypatch.setattr(torch, "save", full)
    result = attempt("run.save_every=1")
    assert (result.code, result.error["kind"]) == (2, "RunError")
    is_one_message(result.message, "The disk is full", "run.keep_checkpoints")
    assert result.folder.status()["state"] == "failed"
    assert [path.name for path in result.folder.checkpoints] == ["checkpoint-1"]


# --- rewards ----------------------------------------------------------------------------------------------------------

BAD_REWARDS = {
    "wrong length": (" return [1.0]", "returned 1 rewards for 8 completions"),
    "NaN": (" return [math.nan] * len(prompts)", "nan"),
    "raises": ("\n    raise KeyError('answer')", "KeyError"),
}


LATER = "\n    calls.append(1)\n    if len(calls) == 1: return [0.0] * len(prompts)  # the trial\n   "


@pytest.mark.parametrize("case", BAD_REWARDS)
def test_a_reward_that_fails_on_its_trial_is_refused_before_anything_is_written(case: str, attempt: Any) -> None:
    body, words = BAD_REWARDS[case]
    result = attempt(write_reward(body))
    assert (result.code, result.error["kind"], result.folder) == (2, "RewardError", None)
    is_one_message(result.message, "The reward function 'score' failed on trial completions", words.replace("8", "16"))


@pytest.mark.parametrize("case", BAD_REWARDS)
def test_a_reward_that_always_fails_later_ends_the_run(case: str, attempt: Any) -> None:
    body, words = BAD_REWARDS[case]
    result = attempt(write_reward(LATER + " " + body.strip()))
    assert (result.code, result.error["kind"]) == (2, "RewardError")
    is_one_message(result.message, "In each of the last", words, "reward.max_failure_share")
    assert "Warning: 100% of the rewards of step 1 failed" in result.shown
    assert words in result.shown
    assert result.folder.status()["state"] == "failed"
    assert not result.folder.adapter.exists()


def test_a_reward_that_fails_on_five_steps_in_a_row_ends_a_long_run(attempt: Any) -> None:
    result = attempt(write_reward(LATER + " return [math.nan] * len(prompts)"), "optimisation.steps=20")
    assert result.code == 2
    assert len(list(result.folder.completions.glob("*.parquet"))) == 5
    assert len(result.folder.metrics()) == 4


def test_a_reward_that_fails_now_and_then_is_told_once_and_the_run_goes_on(attempt: Any) -> None:
    body = " return [math.nan] + [0.5] * (len(prompts) - 1)"
    result = attempt(write_reward(body), "optimisation.steps=6")
    assert result.code == 0
    assert result.shown.count("Warning: 12% of the rewards of step 1 failed") == 1
    assert result.shown.count("Warning") == 1
    lines = result.folder.metrics()
    assert [line["rewards/score/status_error"] for line in lines] == [0.125] * 6


# --- bad rows ---------------------------------------------------------------------------------------------------------


def write_rows(*bad: str) -> None:
    rows = [json.dumps({"question": f"{i} + 1 =", "answer": str(i + 1)}) for i in range(20)]
    Path("rows.jsonl").write_text("\n".join([*rows, *bad]) + "\n")


def test_bad_rows_keep_a_run_from_starting_and_skipping_says_how_many(attempt: Any, tree: Any) -> None:
    tree["data"] = {"source": "rows.jsonl", "heldout": 4}
    tree["reward"] = {"preset": "gsm8k-reasoning"}
    write_rows("not json", '{"question": "", "answer": "2"}')
    refused = attempt()
    assert (refused.code, refused.error["kind"], refused.folder) == (2, "DataError", None)
    is_one_message(refused.message, "row 21", "row 22", "data.skip_bad_rows")
    result = attempt("data.skip_bad_rows=true", "optimisation.steps=1")
    assert result.code == 0
    assert "2 bad rows left out (row 21" in result.shown
    assert "16 training and 4 held-out problems from rows.jsonl" in result.shown
    assert json.loads(result.folder.data.read_text())["rows"]["skipped"] == 2
