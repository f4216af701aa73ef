"""A GGUF file read back and compared with its source. The tests write it as llama.cpp's converter does for Qwen3."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_gguf import add_sizes, finish

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
    config, tokenizer = model.config.get_text_config(), source.tokenizer
    words = [word for word, _ in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])]
    header = {
        "rope": config.rope_parameters["rope_theta"], "template": tokenizer.chat_template, "end": tokenizer.eos_token_id,
        "tokenizer": "gpt2",
        "words": words + [f"[PAD{place}]" for place in range(len(words), config.vocab_size)],
    }  # fmt: skip
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    tensors = {
        names.get_name(name.replace(".language_model", ""), try_suffixes=(".weight",)): value.numpy()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight" and not re.search("vision|projector", name)
    }
    spoil(header, tensors)
    writer = gguf.GGUFWriter(path, "qwen3")
    config.rope_parameters["rope_theta"] = header["rope"]
    add_sizes(writer, config)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model(header["tokenizer"])
    writer.add_token_list(header["words"])
    writer.add_eos_token_id(header["end"])
    writer.add_chat_template(header["template"])
    for name, value in tensors.items():
        writer.add_tensor(name, value.astype("float32") if value.ndim == 1 else value)
    finish(writer)


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
    write(source, tmp_path / "it.gguf", spoil)
    problems = faults(source, measured, tmp_path / "it.gguf")
    assert any(re.search(words, fault) for fault in problems), problems


def test_a_model_with_two_ends_is_verified_and_the_one_that_the_file_lacks_is_told(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import json

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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_file_is_loaded_in_the_16_bits_of_its_source(
    dtype: str, source: Source, measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 4B model in float32 has more bytes than Colab has main memory."""
    import torch
    from transformers import modeling_gguf_pytorch_utils as reader

    read: list[Any] = []
    load = reader.load_gguf_checkpoint

    def loading(*arguments: Any, **keywords: Any) -> Any:
        loaded = load(*arguments, **keywords)
        read.extend(tensor.dtype for tensor in loaded["tensors"].values())
        return loaded

    monkeypatch.setattr(reader, "load_gguf_checkpoint", loading)
    write(source, tmp_path / "it.gguf")
    assert faults(source, replace(measured, computed=dtype), tmp_path / "it.gguf") == []
    assert set(read) == {getattr(torch, dtype)}


def test_the_file_of_a_model_with_a_vision_tower_is_verified(model_folder: Path, tmp_path: Path) -> None:
    from exporting_runs import make_run
    from transformers import AutoModelForCausalLM, CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    text = AutoModelForCausalLM.from_pretrained(model_folder)
    tower = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = LlavaConfig(text_config=text.config, vision_config=tower, tie_word_embeddings=True, image_token_id=5)
    model = LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.generation_config = text.generation_config
    shutil.copytree(model_folder, tmp_path / "base")
    model.save_pretrained(tmp_path / "base")
    source = open_source(make_run(tmp_path / "runs", "seeing", tmp_path / "base"), None)[0]
    write(source, tmp_path / "it.gguf")
    assert faults(source, measured_by(source), tmp_path / "it.gguf") == []


def test_the_file_of_a_run_on_weights_published_in_4_bits_is_verified(
    source: Source, measured: Measured, tmp_path: Path
) -> None:
    write(source, tmp_path / "it.gguf")
    config = type(source.files.config)(**source.files.config.to_dict())
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    published = replace(source, files=replace(source.files, config=config))
    assert faults(published, measured, tmp_path / "it.gguf") == []


def test_a_file_is_read_without_kernels_of_the_hub(
    source: Source, measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the package `kernels`, transformers keeps the weights of some architectures packed."""
    from transformers.quantizers import quantizer_gguf

    monkeypatch.setattr(quantizer_gguf, "get_gguf_kernel", object)
    created: list[Any] = []
    prepare = quantizer_gguf.GgufHfQuantizer.read_header

    def preparing(quantizer: Any, file: str) -> None:
        prepare(quantizer, file)
        created.append(quantizer)

    monkeypatch.setattr(quantizer_gguf.GgufHfQuantizer, "read_header", preparing)
    write(source, tmp_path / "it.gguf")
    assert faults(source, measured, tmp_path / "it.gguf") == []
    (quantizer,) = created
    quantizer.supported, quantizer.header = True, SimpleNamespace(has_quantized_weights=True)
    quantizer.validate_environment()
    assert quantizer.kernel is None


def test_a_file_that_transformers_cannot_read_is_refused_before_the_export() -> None:
    from transformers import Gemma4Config, GptOssConfig, GraniteConfig, MistralConfig, Qwen3_5Config

    from kit.errors import EnvironmentUnsupported
    from kit.export.gguf import check_reader

    check_reader(Qwen3_5Config(), "q4_k_m")
    check_reader(MistralConfig(), "q2_k")
    unread = ((GraniteConfig(), "q8_0"), (Gemma4Config(), "f32"), (GptOssConfig(), "f32"), (Qwen3_5Config(), "q3_k_m"))
    for config, quantization in unread:
        with pytest.raises(EnvironmentUnsupported, match="--no-verify"):
            check_reader(config, quantization)


def test_the_width_that_lfm2_computes_itself_is_not_compared() -> None:
    from transformers import Lfm2Config

    from kit.export.gguf import check_shapes

    header = {"general.architecture": "lfm2", "lfm2.feed_forward_length": 128}
    for adjusts in (True, False):
        assert (
            bool(check_shapes(header, Lfm2Config(intermediate_size=192, block_auto_adjust_ff_dim=adjusts))) != adjusts
        )


def test_a_mistral_file_is_read(tmp_path: Path, model_folder: Path) -> None:
    """Its architecture in the file is `llama`, for which transformers reorders queries and keys."""
    import torch
    from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

    from kit.export.gguf import open_gguf

    config = MistralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    writer = gguf.GGUFWriter(tmp_path / "it.gguf", "llama")
    add_sizes(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, value in model.state_dict().items():
        if re.search("[qk]_proj", name):  # llama.cpp's order of the rotated dimensions
            value = value.view(-1, 2, 8, 32).transpose(1, 2).reshape(value.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), value.numpy())
    finish(writer)
    files = SimpleNamespace(config=config, source="")
    settings = SimpleNamespace(model=SimpleNamespace(trust_remote_code=False))
    source: Any = SimpleNamespace(files=files, config=settings, tokenizer=AutoTokenizer.from_pretrained(model_folder))
    read = open_gguf(source, tmp_path / "it.gguf", "cpu", [0], torch.float32)[0]
    ids = torch.arange(8)[None]
    assert torch.allclose(read(ids).logits, model(ids).logits, atol=1e-5)


def test_a_file_cut_short_is_found(source: Source, measured: Measured, tmp_path: Path) -> None:
    write(source, tmp_path / "it.gguf")
    data = (tmp_path / "it.gguf").read_bytes()
    (tmp_path / "it.gguf").write_bytes(data[: len(data) // 2])
    assert any("cannot be loaded" in fault for fault in faults(source, measured, tmp_path / "it.gguf"))
