"""An Ollama Modelfile from a run: Jinja cannot be run there, so the chat template is taken apart and put together again.

Rendered with placeholders, a template shows what it writes before and after each role's text. What is made of those pieces
is held against the true template on whole conversations, and the Modelfile says where the two differ.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

MARKS = {"system": "\u2402SYSTEM\u2402", "user": "\u2402USER\u2402", "assistant": "\u2402ASSISTANT\u2402"}
Message = dict[str, str]


@dataclass(frozen=True)
class Pieces:
    """What a chat template writes around the text of each role: `start` before all, `opening` to let the model speak.

    `default`: a system message stands in place of `start`, as where a template has one of its own.
    """

    start: str
    around: dict[str, tuple[str, str]]
    opening: str
    default: bool = False

    def render(self, messages: Sequence[Message]) -> str:
        """What Ollama will make of a conversation."""
        body = "".join(
            self.around[each["role"]][0] + each["content"] + self.around[each["role"]][1] for each in messages
        )
        own = self.default and messages[0]["role"] == "system"
        return ("" if own else self.start) + body + self.opening


def take_apart(tokenizer: Any) -> Pieces | None:
    """The pieces of the tokenizer's chat template; None where it has none, or cannot be taken apart."""
    if not tokenizer.chat_template:
        return None
    try:
        first = _render(tokenizer, ["user"], False)
        spoken = _render(tokenizer, ["user"], True)
        talk = _render(tokenizer, ["user", "assistant", "user"], False)
        answered = _render(tokenizer, ["user", "assistant"], False)
        told = _system(tokenizer)
    except Exception:  # a template raises what it likes for what it does not take
        return None
    user, answer = MARKS["user"], MARKS["assistant"]
    if not spoken.startswith(first) or first.count(user) != 1 or talk.count(user) != 2 or talk.count(answer) != 1:
        return None
    after_user, after_answer = talk.rpartition(user)[2], answered.rpartition(answer)[2]
    between, _, later = talk.partition(user)[2].partition(answer)
    # A later user message has before it what ends the answer, and then what begins a user's; the first one has what
    # begins the conversation in place of the former.
    before_user = later.partition(user)[0].removeprefix(after_answer)
    start = first.partition(user)[0].removesuffix(before_user)
    around = {"user": (before_user, after_user), "assistant": (between.removeprefix(after_user), after_answer)}
    if told is not None:
        around["system"] = (told[0].removeprefix(start), told[1].removesuffix(before_user))
    default = bool(start) and told is not None and not told[0].startswith(start)
    return Pieces(start, around, spoken[len(first) :], default)


def _system(tokenizer: Any) -> tuple[str, str] | None:
    """What stands before a system message, and between it and the user's; None where the template takes none."""
    try:
        text = _render(tokenizer, ["system", "user"], False)
    except Exception:  # Gemma's, for one, raises
        return None
    before, found, rest = text.partition(MARKS["system"])
    between, user, _ = rest.partition(MARKS["user"])
    return (before, between) if found and user else None


def _render(tokenizer: Any, roles: Sequence[str], opening: bool) -> str:
    messages = [{"role": role, "content": MARKS[role]} for role in roles]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opening))


def differences(tokenizer: Any, pieces: Pieces) -> list[str]:
    """Kinds of conversations that come out otherwise than in training."""

    def said(role: str, text: str) -> Message:
        return {"role": role, "content": text}

    user, more = said("user", "What is 2 + 3?"), said("user", "And 4 more?")
    tried = {"one question": [user], "several turns": [user, said("assistant", "5"), more]}
    if "system" in pieces.around:
        tried["a system message"] = [said("system", "Be brief."), user]
    wrong = []
    for name, messages in tried.items():
        truth = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        if truth != pieces.render(messages):
            wrong.append(name)
    return wrong + ([] if "system" in pieces.around else ["a system message, which the template does not take"])


def go_template(pieces: Pieces) -> str:
    """The pieces in Ollama's template language."""

    def piece(role: str) -> str:
        before, after = (_quoted(part) for part in pieces.around[role])
        return f"{before}{{{{ .Content }}}}{after}"

    system = f'{{{{ if eq .Role "system" }}}}{piece("system")}{{{{ end }}}}' if "system" in pieces.around else ""
    start = _quoted(pieces.start)
    return (
        f"{f'{{{{ if not .System }}}}{start}{{{{ end }}}}' if pieces.default else start}{{{{ range .Messages }}}}{system}"
        f'{{{{ if eq .Role "user" }}}}{piece("user")}{{{{ end }}}}'
        f'{{{{ if eq .Role "assistant" }}}}{piece("assistant")}{{{{ end }}}}'
        f"{{{{ end }}}}{_quoted(pieces.opening)}"
    )


def _quoted(text: str) -> str:
    """Text as it is, where the template language or the file's quotes would read it otherwise as a Go string."""
    unclear = "{{" in text or "}}" in text or '"""' in text or text.endswith('"')
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if unclear else text


def modelfile(source: Any, ends: Sequence[int], file: str) -> tuple[str, list[str]]:
    """The Modelfile of a run's GGUF file, and what it cannot express."""
    config, tokenizer = source.config, source.tokenizer
    settings, notes = config.generation, []
    pieces = take_apart(tokenizer) if config.data.chat else None
    lines = [f"# Run {source.run.id}, step {source.step}.", f"FROM ./{file}"]
    if not config.data.chat:
        lines.append('TEMPLATE """{{ if .System }}{{ .System }}\n\n{{ end }}{{ .Prompt }}"""')
    elif pieces is None:
        notes.append("the chat template cannot be expressed; Ollama uses the one that it guesses from the file")
    else:
        wrong, begin = differences(tokenizer, pieces), tokenizer.bos_token
        if begin and pieces.start.startswith(begin) and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
            notes.append("the beginning-of-text token is left to Ollama, which adds it")
            pieces = replace(pieces, start=pieces.start.removeprefix(begin))
        notes += [f"the template differs from training for: {each}" for each in wrong]
        lines.append(f'TEMPLATE """{go_template(pieces)}"""')
    prompt = config.data.system_prompt
    if prompt and ('"""' in prompt or prompt.endswith('"')):
        notes.append(
            "the system prompt of training is left out, as a Modelfile cannot hold one with three quotes in a row or with one at "
            "its end: give it with every request"
        )
    elif prompt:
        lines.append(f'SYSTEM """{prompt}"""')
    lines += [f"PARAMETER stop {json.dumps(tokenizer.decode([end]), ensure_ascii=False)}" for end in ends]
    # Ollama's own defaults cut the distribution and punish repetition; these are the run's.
    lines += [
        f"PARAMETER temperature {settings.temperature:g}",
        f"PARAMETER top_p {settings.top_p:g}",
        f"PARAMETER top_k {settings.top_k}",
        f"PARAMETER min_p {settings.min_p or 0:g}",
        f"PARAMETER repeat_penalty {settings.repetition_penalty:g}",
    ]
    lines += [f"# Note: {note}." for note in notes]
    return "\n".join(lines) + "\n", notes
