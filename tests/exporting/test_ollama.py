"""Chat templates translated for Ollama render as the original, or the difference is reported."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.config import load_config
from kit.export.gguf import differences, go_template, modelfile, split_template

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}</s>{% else %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
)
DATED = "{{ messages | length }}" + CHATML
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}" + CHATML
)


@pytest.fixture
def tokenizer(model_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)


def with_template(tokenizer: Any, template: str) -> Any:
    tokenizer.chat_template = template
    tokenizer.bos_token = "<|endoftext|>"
    return tokenizer


@pytest.mark.parametrize(
    ("template", "wrong"),
    [
        (CHATML, []),
        (LLAMA3, []),
        (GEMMA, ["a system message, which the template does not support"]),
        (MISTRAL, ["a system message, which the template does not support"]),
        (DATED, ["several turns"]),
        (DEFAULT_SYSTEM, []),
    ],
    ids=["chatml", "llama3", "gemma", "mistral", "counting", "default system"],
)
def test_what_can_be_expressed_is_exact_and_the_rest_is_named(tokenizer: Any, template: str, wrong: list[str]) -> None:
    pieces = split_template(with_template(tokenizer, template))
    assert pieces is not None
    assert differences(tokenizer, pieces) == wrong


def test_the_template_in_ollamas_language(tokenizer: Any) -> None:
    pieces = split_template(with_template(tokenizer, CHATML))
    assert pieces is not None
    assert go_template(pieces) == (
        "{{ range .Messages }}"
        '{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n{{ end }}'
        '{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n{{ end }}'
        '{{ if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n{{ end }}'
        "{{ end }}<|im_start|>assistant\n"
    )


def test_the_modelfile_samples_as_the_run_does(tokenizer: Any) -> None:
    config = load_config("quickstart", ["generation.temperature=0.7", "data.system_prompt=Think."])
    source = SimpleNamespace(config=config, tokenizer=tokenizer, run=SimpleNamespace(id="it"), step=3)
    text, notes = modelfile(source, [tokenizer.eos_token_id], "it-Q8_0.gguf")
    assert notes == []
    lines = text.splitlines()
    assert "FROM ./it-Q8_0.gguf" in lines
    assert text.count("TEMPLATE") == 1
    assert 'SYSTEM """Think."""' in lines
    assert 'PARAMETER stop "<|im_end|>"' in lines
    assert {"PARAMETER temperature 0.7", "PARAMETER top_p 1", "PARAMETER top_k 0", "PARAMETER min_p 0",
            "PARAMETER repeat_penalty 1"} <= set(lines)  # fmt: skip
    config.generation.tools = ["tools.py:add"]
    assert "has no tools" in modelfile(source, [tokenizer.eos_token_id], "it-Q8_0.gguf")[1][0]


def test_the_beginning_of_text_token_that_ollama_adds_is_not_written(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    source = SimpleNamespace(
        config=load_config("quickstart"), tokenizer=tokenizer, run=SimpleNamespace(id="it"), step=3
    )
    for template in (LLAMA3, "{{ bos_token }}" + DEFAULT_SYSTEM):
        bos = with_template(tokenizer, template).bos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
        text, notes = modelfile(source, [tokenizer.eos_token_id], "it-Q8_0.gguf")
        assert "<|endoftext|>" not in text.partition("PARAMETER")[0]
        assert notes == ["Ollama adds the beginning-of-text token"]


def test_plain_text_has_the_system_prompt_in_front_as_in_training(tokenizer: Any) -> None:
    from kit.data.rows import dress

    config = load_config("quickstart", ["data.chat=false", "data.system_prompt=Think."])
    source = SimpleNamespace(config=config, tokenizer=tokenizer, run=SimpleNamespace(id="it"), step=3)
    text, notes = modelfile(source, [tokenizer.eos_token_id], "it-Q8_0.gguf")
    template = text.partition('TEMPLATE """')[2].partition('"""')[0]
    assert template == "{{ if .System }}{{ .System }}\n\n{{ end }}{{ .Prompt }}"
    rendered = template.replace("{{ if .System }}", "").replace("{{ end }}", "").replace("{{ .System }}", "Think.")
    assert rendered.replace("{{ .Prompt }}", "2 + 3?") == dress("2 + 3?", chat=False, system_prompt="Think.")
    assert notes == []
