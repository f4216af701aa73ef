"""GRPO with pictures end to end: data, training, evaluation, checkpoints, resuming."""

from __future__ import annotations

import functools
import inspect
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tiny_processors
import torch
from exporting_runs import make_run
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.models.gemma3 import modeling_gemma3, processing_gemma3

import kit.train
from kit.config import load_config
from kit.errors import EngineError
from kit.model_check.check import grpo_step
from kit.runner.trained import open_source
from kit.scoring.scorer import Scorer
from kit.trainer.trainer import HookedGRPOTrainer

REWARD = """
def length(prompts, completions, completion_ids, answer=None, **columns):
    assert "images" not in columns
    assert all(isinstance(message["content"], str) for prompt in prompts for message in prompt)
    return [float(sum(ids) % 5) for ids in completion_ids]
"""

pytestmark = pytest.mark.families


@pytest.fixture
def pictured(tree: dict[str, Any], multimodal: Any, tmp_path: Path) -> Any:
    """Return a function that changes `tree` to a run on pictures with the named model."""

    def make(name: str) -> dict[str, Any]:
        (tmp_path / "rewards_here.py").write_text(REWARD)
        tree["model"] |= {"name": str(multimodal(name))}
        tree["data"] = {"source": str(tiny_processors.rows(tmp_path / "data")), "heldout": 4}
        tree["reward"] = {"preset": None, "functions": [{"path": f"{tmp_path}/rewards_here.py:length"}]}
        tree["evaluation"] |= {"before": True, "batch_size": 8}
        return tree

    return make


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_a_run_on_pictures_trains_and_saves_no_pixels(name, pictured, attempt):
    pictured(name)
    done = attempt()
    assert done.code == 0, done.message
    lines = [json.loads(line) for line in (done.folder.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["grad_norm"] > 0 for line in lines)
    table = pq.read_table(done.folder.completions / "step-00001.parquet")
    assert not {column for column in table.column_names if "image" in column or "pixel" in column}
    assert table["prompt"].to_pylist() == ["Dark or light?"] * 8
    score = json.loads((done.folder.eval / "before.json").read_text())
    assert score["problems"] == 4
    assert len(set(score["per_problem"]["id"])) == 4  # equal questions about different pictures


def adapters(run: Any) -> dict[str, Any]:
    return load_file(run.path / "checkpoint-2" / "adapter_model.safetensors")


def test_a_broken_run_goes_on_and_smaller_parts_make_the_same_step(pictured, attempt, monkeypatch):
    """Compare with an undisturbed run: a resumed run, and a run that divides its micro-batches because memory runs out."""
    tree = pictured("qwen2_5_vl")
    tree["evaluation"]["before"] = False
    expected = adapters(attempt("run.id=whole").folder)
    generate, score, calls = HookedGRPOTrainer._generate_single_turn, Scorer.score, [0]

    def failing(self: Any, *args: Any, **keywords: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise EngineError("planted")
        return generate(self, *args, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(HookedGRPOTrainer, "_generate_single_turn", failing)
        assert attempt("run.id=broken").code == 2
    again = adapters(kit.train.run(load_config(tree, ["run.id=broken"]), quiet=True, resume=True))
    assert all(torch.equal(expected[name], again[name]) for name in expected)

    def short(self: Any, model: Any, rows: Any, *args: Any, **keywords: Any) -> Any:
        if torch.is_grad_enabled() and len(rows.ids) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return score(self, model, rows, *args, **keywords)

    monkeypatch.setattr(Scorer, "score", short)
    done = attempt("run.id=short")
    assert done.code == 0, done.message
    assert "Out of memory in training" in done.shown + done.message
    halved = adapters(done.folder)
    assert all(torch.allclose(expected[name], halved[name], atol=1e-5) for name in expected)


def test_an_input_that_trl_has_no_place_for_stays_with_its_picture(multimodal, monkeypatch):
    """Plant a processor that returns the mean of each picture as another input, and a model that compares it with the pixels."""
    call, top = processing_gemma3.Gemma3Processor.__call__, modeling_gemma3.Gemma3ForConditionalGeneration.forward
    inner, marks = modeling_gemma3.Gemma3Model.forward, []

    def marked(self: Any, *args: Any, **keywords: Any) -> Any:
        made = call(self, *args, **keywords)
        if "pixel_values" in made:
            pixels = torch.stack([torch.as_tensor(picture) for picture in made["pixel_values"]])
            made["picture_marks"] = pixels.mean(dim=(1, 2, 3))[:, None]
        return made

    @functools.wraps(top)
    def outer(self: Any, *args: Any, picture_marks: Any = None, **keywords: Any) -> Any:
        return top(self, *args, picture_marks=picture_marks, **keywords)

    @functools.wraps(inner)
    def looked_at(self: Any, *args: Any, picture_marks: Any = None, **keywords: Any) -> Any:
        if keywords.get("pixel_values") is not None and torch.is_grad_enabled():
            assert picture_marks is not None
            assert torch.allclose(keywords["pixel_values"].mean(dim=(1, 2, 3)), picture_marks[:, 0], atol=1e-5)
            marks.append(len(picture_marks))
        return inner(self, *args, **keywords)

    extra = inspect.Parameter("picture_marks", inspect.Parameter.KEYWORD_ONLY, default=None)
    for function, of in ((outer, top), (looked_at, inner)):
        named = inspect.signature(of).parameters.values()
        fixed = [param for param in named if param.kind is not inspect.Parameter.VAR_KEYWORD]
        rest = [param for param in named if param.kind is inspect.Parameter.VAR_KEYWORD]
        function.__signature__ = inspect.Signature([*fixed, extra, *rest])
    monkeypatch.setattr(processing_gemma3.Gemma3Processor, "__call__", marked)
    monkeypatch.setattr(modeling_gemma3.Gemma3ForConditionalGeneration, "forward", outer)
    monkeypatch.setattr(modeling_gemma3.Gemma3Model, "forward", looked_at)
    processor = AutoProcessor.from_pretrained(multimodal("gemma3"), padding_side="left")
    model = AutoModelForImageTextToText.from_pretrained(multimodal("gemma3"))
    rows = [
        {"prompt": [{"role": "user", "content": "Which?"}], "images": [tiny_processors.picture(60 * number)]}
        for number in range(4)
    ]
    step = grpo_step(model, processor, None, rows)
    assert step.moved > 0
    assert len(marks) == 1
    assert 4 <= marks[0] <= 8  # a completion without an advantage is not scored


def test_pictures_for_a_model_of_text_are_refused(pictured, attempt, model_folder):
    tree = pictured("qwen2_5_vl")
    tree["model"]["name"] = str(model_folder)
    done = attempt()
    assert done.code == 2
    assert "reads text only" in done.message
    assert "data.image_column: none" in done.message


def test_text_alone_trains_a_multimodal_model(tree, attempt, multimodal):
    tree["model"]["name"] = str(multimodal("gemma3"))
    tree["reward"] = {"preset": "reasoning-gym"}
    assert attempt("optimisation.steps=1").code == 0


def test_weights_of_a_run_on_texts_are_exported_with_the_processor_of_the_model(tmp_path: Path) -> None:
    """vLLM does not load the export without it."""
    tiny_processors.gemma3(tmp_path / "model")
    run = make_run(tmp_path / "runs", "full", tmp_path / "model", lora=False)
    assert open_source(run, None)[0].files.processor.image_processor.size.height == 64
