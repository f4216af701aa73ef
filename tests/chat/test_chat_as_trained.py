"""Chat prompts equal training prompts: tools are declared and answered, pictures are sent, token ids are unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting_runs import make_run
from tiny_qwen import tiny_qwen, tiny_tokenizer

from kit.chat.answering import ChatModels
from kit.errors import ConfigError
from kit.runs.store import RunDir

SCORER = """
import json, pathlib

def told(prompts, completions, completion_ids, prompt_ids=None, finish_reason=None, **columns):
    seen = {"prompts": prompts, "completions": completions, "prompt_ids": prompt_ids, "finish_reason": finish_reason,
            "names": sorted(columns)}
    pathlib.Path(__file__).with_name("seen.json").write_text(json.dumps(seen, default=str))
    return [float(len(ids)) for ids in completion_ids]
"""
QUESTION = "Solve the following multiplication: 12 * 7."
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "12 * 7"}}</tool_call><|im_end|>'
SAMPLING = {"seed": 1, "temperature": 1.0, "max_tokens": 160}


@pytest.fixture(scope="module")
def tool_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools") / "model"
    tokenizer = tiny_tokenizer("embedded-tools")
    tiny_qwen(tokenizer, context=512).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def new_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunDir]:
    """Return `new_run(model folder, rows, section=...)`: a run with two training rows, whose reward reports its inputs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scorer.py").write_text(SCORER)

    def make(folder: Path, rows: list[dict[str, Any]], **more: Any) -> RunDir:
        source = tmp_path / "rows.jsonl"
        source.write_text("\n".join(json.dumps(row) for row in rows))
        data = {"source": str(source), "heldout": len(rows) - 2} | more.pop("data", {})
        reward = {"preset": None, "functions": [{"path": f"{tmp_path}/scorer.py:told"}]}
        return make_run(tmp_path / "runs", "it", folder, more={"data": data, "reward": reward, **more})

    return make


def seen(tmp_path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((tmp_path / "seen.json").read_text())
    return record


def ask(models: ChatModels, side: str = "tuned", **message: Any) -> tuple[dict[str, Any], str]:
    pieces: list[str] = []
    question = models.question({"sampling": SAMPLING, **message})
    return models.answer(question, side, pieces.append, lambda: False), "".join(pieces)


def follow(models: ChatModels, monkeypatch: pytest.MonkeyPatch, *turns: str) -> list[str]:
    """Replace the model's answers by these turns; return the list of texts that it receives."""
    tokenizer, prompts, left = models.source.tokenizer, list[str](), list(turns)

    def generate(input_ids: torch.Tensor, streamer: Any, **_: Any) -> torch.Tensor:
        prompts.append(tokenizer.decode(input_ids[0]))
        streamer.put(input_ids)
        ids = tokenizer(left.pop(0), add_special_tokens=False)["input_ids"]
        for token in ids:
            streamer.put(torch.tensor([token]))
        streamer.end()
        return torch.cat([input_ids, torch.tensor([ids])], dim=1)

    monkeypatch.setattr(models.tuned, "generate", generate)
    return prompts


@pytest.mark.parametrize("key", ["environment", "tools"])
def test_tools_are_described_called_and_answered(
    key: str, tool_folder: Path, new_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tools.py").write_text(
        'def calculate(expression: str) -> str:\n    """\n    Calculates.\n\n    Args:\n        expression: What.\n    """\n'
        "    return str(eval(expression))\n"
    )
    path = "kit.environments.calculator:Calculator" if key == "environment" else [f"{tmp_path}/tools.py:calculate"]
    rows = [{"prompt": QUESTION.replace("12", str(12 + number)), "answer": "84"} for number in range(6)]
    models = ChatModels(new_run(tool_folder, rows, generation={"max_completion_tokens": 160, key: path}), None)
    prompts = follow(models, monkeypatch, CALL, "<answer>84</answer><|im_end|>")
    answer, text = ask(models, heldout=1)
    assert "calculate(expression)" in prompts[0]
    assert "84" in prompts[1].rpartition("</tool_call>")[2]  # the tool's answer
    assert answer["text"] == text
    assert [part in text for part in ('"12 * 7"', "84", "<answer>84</answer>")] == [True] * 3
    assert answer["finish"] == "stop"
    (messages,) = seen(tmp_path)["completions"]
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant"]
    own = [
        models.source.tokenizer(turn, add_special_tokens=False)["input_ids"]
        for turn in (CALL, "<answer>84</answer><|im_end|>")
    ]
    assert answer["tokens"] == sum(map(len, own))
    assert answer["reward"]["total"] > answer["tokens"]  # all ids of the conversation are scored


def test_a_cut_or_unanswered_call_is_told(tool_folder: Path, new_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"{number}?", "answer": "1"} for number in range(6)]
    how = {"environment": "kit.environments.calculator:Calculator", "max_tool_calling_iterations": 1}
    models = ChatModels(new_run(tool_folder, rows, generation={"max_completion_tokens": 160, **how}), None)
    follow(models, monkeypatch, CALL, CALL)
    answer, _ = ask(models, heldout=2)
    assert answer["finish"] == "tool_calls"


def test_environments_that_rows_name_are_not_guessed(tool_folder: Path, new_run: Any) -> None:
    rows = [{"prompt": f"{number}?", "answer": "1", "environment": "one"} for number in range(6)]
    how = {"environment": {"one": "kit.environments.calculator:Calculator"}, "max_completion_tokens": 4}
    models = ChatModels(new_run(tool_folder, rows, generation=how), None)
    with pytest.raises(ConfigError, match=r"names no environment, which this run needs \(one\)"):
        ask(models, prompt="else?")
    assert ask(models, heldout=1, sampling={"max_tokens": 4})[0]["tokens"] > 0


def test_rows_come_from_the_runs_own_copy_and_never_from_other_data(
    model_folder: Path, new_run: Any, tmp_path: Path
) -> None:
    run = new_run(model_folder, [{"prompt": f"{number}?", "answer": "1"} for number in range(6)])
    (tmp_path / "rows.jsonl").unlink()
    assert ChatModels(run, None).rows
    run.heldout.unlink()
    without = ChatModels(run, None)
    assert (without.rows, "has no heldout.parquet" in without.note) == ([], True)
    assert ask(without, prompt="2 + 2 =", sampling={"max_tokens": 2})  # the prompt needs no data


def test_pictures_are_shown_to_the_model(new_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "families"))
    import tiny_processors

    tiny_processors.qwen2_5_vl(tmp_path / "model")
    source = str(tiny_processors.rows(tmp_path / "data", 8))
    models = ChatModels(new_run(tmp_path / "model", [], data={"source": source, "heldout": 4}), None)
    calls: list[Any] = []
    generate = models.tuned.generate

    def watched(**inputs: Any) -> Any:
        calls.append(inputs)
        return generate(**inputs)

    monkeypatch.setattr(models.tuned, "generate", watched)
    answer, text = ask(models, heldout=1, sampling={"max_tokens": 4})
    assert calls[0]["pixel_values"].numel() > 0
    assert answer["text"] == text
    assert answer["reward"]["total"] == answer["tokens"]
    assert "images" not in seen(tmp_path)["names"]
    ask(models, prompt="Dark or light?", reference="dark", sampling={"max_tokens": 4})
    assert "pixel_values" not in calls[1]  # the prompt names no picture
