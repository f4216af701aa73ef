"""GGUF: choice of tools, errors if they are missing, and a file read back."""

from __future__ import annotations

import json
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit.errors import EnvironmentUnsupported, ModelError, RunError
from kit.export import gguf
from kit.export.gguf import CONVERTER, QUANTIZER, Tools, convert, find_tools
from kit.export.source import save_tokenizer
from kit.runner.trained import open_source
from kit.runs.store import RunDir


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide llama.cpp, except where a test puts one."""
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for name in gguf.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def put(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_what_is_missing_is_named_with_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnsupported, match=r"convert_hf_to_gguf\.py.*git clone.*GRPO_KIT_LLAMA_CPP"):
        find_tools("q8_0")
    put(tmp_path / "llama.cpp" / CONVERTER)
    with pytest.raises(EnvironmentUnsupported, match=r"llama-quantize.*--quantization q8_0"):
        find_tools("q4_k_m")
    with pytest.raises(EnvironmentUnsupported, match="there is no such folder"):
        find_tools("q8_0", str(tmp_path / "none"))
    assert find_tools("q8_0").quantizer is None


def test_an_option_goes_before_the_environment_and_that_before_the_usual_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, named, option = (tmp_path / name for name in ("llama.cpp", "named", "given"))
    for folder in (usual, named, option):
        put(folder / CONVERTER)
        put(folder / "build" / "bin" / QUANTIZER)
    assert find_tools("q4_k_m").converter == usual / CONVERTER
    monkeypatch.setenv("GRPO_KIT_LLAMA_CPP", str(named))
    assert find_tools("q4_k_m").quantizer == named / "build" / "bin" / QUANTIZER
    assert find_tools("q4_k_m", str(option)).converter == option / CONVERTER


FAKE = """
import sys
sys.stderr.write({prints!r})
if {writes}:
    open(sys.argv[sys.argv.index("--outfile") + 1], "w").write(" ".join(sys.argv[1:]))
sys.exit({code})
"""


def test_the_file_is_converted_to_16_bits_and_then_quantised(tmp_path: Path) -> None:
    converter = put(tmp_path / CONVERTER, FAKE.format(prints="", writes=True, code=0))
    quantizer = put(tmp_path / QUANTIZER, '#!/bin/sh\necho "$3" > "$2"\n/bin/cat "$1" >> "$2"\n')
    convert(Tools(converter, quantizer), tmp_path / "model", tmp_path / "it.gguf", "q4_k_m", "bfloat16", "it")
    assert "Q4_K_M" in (tmp_path / "it.gguf").read_text()
    assert "--outtype bf16" in (tmp_path / "it.gguf").read_text()
    assert not (tmp_path / "unquantised.gguf").exists()
    convert(Tools(converter, None), tmp_path / "model", tmp_path / "it.gguf", "q8_0", "bfloat16", "it")
    assert "--outtype q8_0" in (tmp_path / "it.gguf").read_text()


def test_layers_for_multi_token_prediction_that_transformers_drops_are_not_declared(tmp_path: Path) -> None:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    assert "^mtp.*" in (Qwen3_5ForConditionalGeneration._keys_to_ignore_on_load_unexpected or ())
    for name, flag in (("new", '# parser.add_argument("--no-nextn", "--no-mtp")\n'), ("old", "")):
        tools = Tools(put(tmp_path / name / CONVERTER, flag + FAKE.format(prints="", writes=True, code=0)), None)
        for model_type in (Qwen3_5Config.model_type, "qwen3"):
            convert(tools, tmp_path / "model", tmp_path / "it.gguf", "q8_0", "bfloat16", "it", model_type)
            declared = "--no-mtp" not in (tmp_path / "it.gguf").read_text()
            assert declared == (name == "old" or model_type == "qwen3")


def test_granites_layers_have_the_names_of_its_files_on_the_hub(tmp_path: Path) -> None:
    from transformers import GraniteMoeHybridConfig

    GraniteMoeHybridConfig(num_hidden_layers=2, layer_types=["mamba", "attention"]).save_pretrained(tmp_path / "model")
    tools = Tools(put(tmp_path / CONVERTER, FAKE.format(prints="", writes=True, code=0)), None)
    convert(tools, tmp_path / "model", tmp_path / "it.gguf", "q8_0", "bfloat16", "it", "granitemoehybrid")
    saved = json.loads((tmp_path / "model" / "config.json").read_text())
    assert saved["layer_types"] == ["mamba", "attention"]  # llama.cpp's converter reads these only


def test_the_converter_finds_the_files_of_a_sentencepiece_tokenizer(tmp_path: Path, run: RunDir) -> None:
    source = open_source(run, None)[0]
    shutil.copytree(source.files.source, tmp_path / "base")
    source.run_name = str(tmp_path / "base")
    source.tokenizer.save_pretrained(tmp_path / "merged")
    gguf.add_sentencepiece(source, tmp_path / "merged")  # it has none
    for name in ("removed", "removed.gguf"):  # trained elsewhere
        gguf.add_sentencepiece(replace(source, run_name=str(tmp_path / name)), tmp_path / "merged")
    assert not (tmp_path / "merged" / "tokenizer.model").exists()
    (tmp_path / "base" / "tokenizer.model").write_bytes(b"pieces")
    gguf.add_sentencepiece(source, tmp_path / "merged")
    assert (tmp_path / "merged" / "tokenizer.model").read_bytes() == b"pieces"
    added = json.loads((tmp_path / "merged" / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert added[str(source.tokenizer.eos_token_id)] == {"content": source.tokenizer.eos_token, "special": True}


@pytest.mark.parametrize(
    ("switch", "head"),
    [
        ("{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}", "{%- set enable_thinking = false -%}"),
        ("{%- if enable_thinking is not defined %}{%- set enable_thinking = false %}{%- endif -%}"
         "{% if enable_thinking %}<think>{% endif %}", "{%- set enable_thinking = false -%}"),
        ("{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}", ""),
    ],
    ids=["off by default", "off in the run", "on"],
)  # fmt: skip
def test_thinking_in_llama_cpp_is_as_in_training(run: RunDir, tmp_path: Path, switch: str, head: str) -> None:
    """llama.cpp sets `enable_thinking` to true (common/chat.cpp of b11434)."""
    source = open_source(run, None)[0]
    tokenizer = source.tokenizer
    tokenizer.chat_template += switch
    tokenizer.chat_template, trained = gguf.file_template(tokenizer), tokenizer.chat_template
    assert tokenizer.chat_template == head + trained
    question = [{"role": "user", "content": "2 + 3?"}]
    prompts = [tokenizer.apply_chat_template(question, tokenize=False, chat_template=template, **variables)
             for template, variables in ((trained, {}), (tokenizer.chat_template, {"enable_thinking": True}))]  # fmt: skip
    assert prompts[0] == prompts[1]
    # A processor writes its chat template into the same file.
    processor = SimpleNamespace(save_pretrained=lambda folder: (folder / "chat_template.jinja").write_text(trained))
    save_tokenizer(replace(source, files=replace(source.files, processor=processor)), tokenizer, tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == tokenizer.chat_template


@pytest.mark.parametrize(
    ("prints", "writes", "code", "kind", "words"),
    [
        ("NotImplementedError: BPE pre-tokenizer was not recognized", False, 1, ModelError, "does not know how"),
        ("KeyError: no such tensor", False, 1, RunError, "exit code 1.*\n.*no such tensor"),
        ("all well", False, 0, RunError, "failed with exit code 0"),
    ],
)
def test_a_converter_that_fails_is_quoted(
    tmp_path: Path, prints: str, writes: bool, code: int, kind: type[Exception], words: str
) -> None:
    converter = put(tmp_path / CONVERTER, FAKE.format(prints=prints, writes=writes, code=code))
    with pytest.raises(kind, match=words):
        convert(Tools(converter, None), tmp_path / "model", tmp_path / "it.gguf", "q8_0", "float16", "it")
