"""A GGUF file read back and compared with its source. The tests write it as llama.cpp's converter does for Qwen3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.export.verify import Measured, Written, verify
from kit.runner.trained import Source, open_source
from kit.runs.store import RunDir

gguf = pytest.importorskip("gguf")


def write(
    source: Source, path: Path, spoil: Callable[[dict[str, Any], dict[str, Any]], None] = lambda *_: None
) -> None:
    """Write the merged model of `source` in float16. `spoil` may change header and tensors first."""
    from kit.export.source import merge

    model, _, _ = merge(source, "float16")
    config, tokenizer = model.config, source.tokenizer
    words = [word for word, _ in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])]
    header = {
        "rope": config.rope_parameters["rope_theta"], "template": tokenizer.chat_template, "end": tokenizer.eos_token_id,
        "tokenizer": "gpt2",
        "words": words + [f"[PAD{place}]" for place in range(len(words), config.vocab_size)],
    }  # fmt: skip
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    tensors = {
        names.get_name(name, try_suffixes=(".weight",)): value.numpy()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    spoil(header, tensors)
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(header["rope"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model(header["tokenizer"])
    writer.add_token_list(header["words"])
    writer.add_eos_token_id(header["end"])
    writer.add_chat_template(header["template"])
    for name, value in tensors.items():
        writer.add_tensor(name, value.astype("float32") if value.ndim == 1 else value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def source(made: RunDir) -> Source:
    return open_source(made, None)[0]


@pytest.fixture(scope="module")
def measured(source: Source) -> Measured:
    return measured_by(source)


def measured_by(source: Source) -> Measured:
    from kit.export import job
    from kit.export.request import ExportRequest
    from kit.runner.console import Reporter

    return job._measure(source, ExportRequest("adapter", prompts=4).for_run(source.run), Reporter(quiet=True))


def faults(source: Source, measured: Measured, path: Path) -> list[str]:
    return verify(source, measured, path.parent, "gguf", Written("f16", path)).faults


def test_a_faithful_file_is_verified(source: Source, measured: Measured, tmp_path: Path) -> None:
    write(source, tmp_path / "it.gguf")
    assert faults(source, measured, tmp_path / "it.gguf") == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda header, tensors: header.update(end=0), "end token is 0"),
        (lambda header, tensors: header.update(template="{{ messages }}"), "the chat template in the file"),
        (lambda header, tensors: header.update(tokenizer="llama"), "tokenizer is SentencePiece's"),
        (lambda header, tensors: header.update(rope=5e5), "rope.freq_base is 500000"),
        (lambda header, tensors: header["words"].reverse(), "tokens differ from training"),
        (
            lambda header, tensors: tensors.update({"blk.0.ffn_up.weight": tensors["blk.0.ffn_up.weight"] * 0}),
            "log-probabilities differ",
        ),
        (
            lambda header, tensors: tensors.__delitem__("blk.0.ffn_up.weight"),
            "cannot be loaded|log-probabilities differ",
        ),
    ],
)
def test_a_planted_defect_is_found(
    spoil: Callable[[dict[str, Any], dict[str, Any]], None],
    words: str,
    source: Source,
    measured: Measured,
    tmp_path: Path,
) -> None:
    import re

    write(source, tmp_path / "it.gguf", spoil)
    problems = faults(source, measured, tmp_path / "it.gguf")
    assert any(re.search(words, fault) for fault in problems), problems


def test_a_model_with_two_ends_is_verified_and_the_one_that_the_file_lacks_is_told(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import json
    import shutil

    from exporting_runs import make_run

    from kit.export import job
    from kit.export.gguf import missing_ends
    from kit.export.request import ExportRequest
    from kit.runner.console import Reporter

    base = tmp_path / "base"
    shutil.copytree(model_folder, base)
    settings = json.loads((base / "generation_config.json").read_text())
    run = make_run(tmp_path / "runs", "two", base)
    source = open_source(run, None)[0]
    own = source.tokenizer.eos_token_id
    other = source.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert own != other
    (base / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [own, other]}))
    measured = measured_by(source)
    assert measured.ends == sorted({own, other})
    path = tmp_path / "file" / "it.gguf"
    path.parent.mkdir()
    write(source, path)
    assert faults(source, measured, path) == []
    assert "also end at <|endoftext|>" in (missing_ends(path, source.tokenizer, measured.ends) or "")
    assert missing_ends(path, source.tokenizer, [own]) is None
    # The whole export, with this file's writer in the place of llama.cpp's.
    monkeypatch.setattr("kit.export.gguf.convert", lambda tools, model, target, *rest: write(source, target))
    monkeypatch.setattr("kit.export.gguf.find_tools", lambda *_: None)
    request = ExportRequest("ollama", quantization="f16", prompts=2)
    result = job.export(run, request.for_run(run), Reporter(quiet=True))
    assert result["verification"]["faults"] == []
    assert any("also end at <|endoftext|>" in note for note in result["notes"])
    assert "also end at <|endoftext|>" in (Path(result["path"]) / "README.md").read_text()
    assert 'PARAMETER stop "<|endoftext|>"' in (Path(result["path"]) / "Modelfile").read_text()
    write(source, path, lambda header, tensors: header.update(end=other))
    assert faults(source, measured, path) == []
    write(source, path, lambda header, tensors: header.update(end=source.tokenizer.convert_tokens_to_ids(">")))
    assert any("the file's end token is" in fault for fault in faults(source, measured, path))


def test_a_file_cut_short_is_found(source: Source, measured: Measured, tmp_path: Path) -> None:
    write(source, tmp_path / "it.gguf")
    data = (tmp_path / "it.gguf").read_bytes()
    (tmp_path / "it.gguf").write_bytes(data[: len(data) // 2])
    assert any("cannot be loaded" in fault for fault in faults(source, measured, tmp_path / "it.gguf"))
