"""What the chat template is told besides the messages: for the run, by row, and what rewards and doctor make of it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kit.config import load_config
from kit.errors import ConfigError, ModelError
from kit.runner.prepare import prepare, validate
from rewards import build_samples

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
    asked = [{"role": "user", "content": "1 + 1"}]
    for on in (True, False):
        switched["data"]["chat_template_kwargs"] = {"enable_thinking": on}
        parts = prepare(load_config(switched))
        tokenizer = parts.files.tokenizer

        says = partial(tokenizer.apply_chat_template, asked, tokenize=False, add_generation_prompt=True)
        ends = [says().endswith("<think>"), says(enable_thinking=not on).endswith("<think>")]
        assert ends == [on, not on]
        assert parts.preset.thinking_opened is on
        notes = [note for note in validate(load_config(switched)) if note.startswith("thinking: ")]
        assert ["opens <think>" in note for note in notes] == [on]
        tokenizer.save_pretrained(tmp_path / "saved")
        assert "enable_thinking = " + str(on).lower() in (tmp_path / "saved/chat_template.jinja").read_text()


def test_a_row_switches_thinking_for_itself(switched: Any, tmp_path: Path, attempt: Any) -> None:
    rows = [{"prompt": f"{n} + 1", "answer": str(n + 1), "chat_template_kwargs": {"enable_thinking": n % 2 == 0}}
            for n in range(8)]  # fmt: skip
    rows.append({"prompt": "9 + 1", "answer": "10", "chat_template_kwargs": None})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "seen.py").write_text(
        "import json\n"
        "def seen(prompts, prompt_ids, thinking_opened=(), **_):\n"
        f"    with open({str(tmp_path / 'seen.jsonl')!r}, 'a') as file:\n"
        "        for one in zip(prompts, prompt_ids, thinking_opened):\n"
        "            file.write(json.dumps(one) + '\\n')\n"
        "    return [float(index) for index, _ in enumerate(prompts)]\n"
    )
    switched["data"] = {"source": str(tmp_path / "rows.jsonl"), "heldout": 0}
    switched["reward"] = {"functions": [{"path": f"{tmp_path}/seen.py:seen"}]}
    done = attempt()
    assert done.code == 0, done.message
    tokenizer = prepare(load_config(switched), fresh=False).files.tokenizer
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    trained = [one for one in seen if len(one[1]) > 1]  # not the trial before training, whose ids are made up
    assert {opened for _, _, opened in trained} == {True, False}
    for prompt, ids, opened in trained:
        number = int(prompt[0]["content"].split()[0])
        assert tokenizer.decode(ids).endswith("<think>") == opened == (number % 2 == 0 and number < 8)


def test_rewards_are_told_by_row(switched: Any) -> None:
    import rewards

    samples = build_samples(["q"] * 2, ["7 is it</think>7"] * 2, thinking_opened=[True, False], answer=["7", "7"])
    preset = rewards.load("gsm8k-reasoning")
    preset.thinking_opened = True
    assert [sample.whole.startswith("<think>") for sample in preset._told(samples)] == [True, False]


def test_what_would_change_nothing_is_refused(switched: Any, tmp_path: Path) -> None:
    switched["data"]["chat_template_kwargs"] = {"enable_thinkin": False}
    with pytest.raises(ModelError, match="never reads it"):
        prepare(load_config(switched))
    switched["data"]["chat_template_kwargs"] = {"messages": "x"}
    with pytest.raises(ConfigError, match="leaves free"):
        load_config(switched)
    switched["data"] |= {"chat_template_kwargs": {"enable_thinking": True}, "chat": False}
    with pytest.raises(ConfigError, match="chat: false"):
        load_config(switched)
