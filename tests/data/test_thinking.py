"""Arguments of the chat template (thinking on or off) for the run and per row, in training, rewards and doctor."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kit.config import load_config
from kit.errors import ConfigError, ModelError
from kit.runner.prepare import prepare, validate

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}{% endif %}"
)


@pytest.fixture
def switched(tree: Any, tmp_path: Path) -> Any:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    tree["model"]["chat_template"] = str(tmp_path / "template.jinja")
    return tree


def test_a_run_switches_thinking_and_everything_follows(switched: Any, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1 + 1"}]
    for on in (True, False):
        switched["data"]["chat_template_kwargs"] = {"enable_thinking": on}
        parts = prepare(load_config(switched))
        tokenizer = parts.files.tokenizer

        says = partial(tokenizer.apply_chat_template, messages, tokenize=False, add_generation_prompt=True)
        ends = [says().endswith("<think>"), says(enable_thinking=not on).endswith("<think>")]
        assert ends == [on, not on]
        assert parts.preset.thinking_opened is on
        notes = [note for note in validate(load_config(switched)) if note.startswith("thinking: ")]
        assert ["opens <think>" in note for note in notes] == [on]
        tokenizer.save_pretrained(tmp_path / "saved")
        assert "enable_thinking = " + str(on).lower() in (tmp_path / "saved/chat_template.jinja").read_text()


def test_what_would_change_nothing_is_refused(switched: Any, tmp_path: Path) -> None:
    switched["data"]["chat_template_kwargs"] = {"enable_thinkin": False}
    with pytest.raises(ModelError, match="does not read it"):
        prepare(load_config(switched))
    switched["data"]["chat_template_kwargs"] = {"messages": "x"}
    with pytest.raises(ConfigError, match="can be set for a chat template"):
        load_config(switched)
    switched["data"] |= {"chat_template_kwargs": {"enable_thinking": True}, "chat": False}
    with pytest.raises(ConfigError, match="chat is false"):
        load_config(switched)
