"""`grpo-kit chat`: one question, or a conversation in which each line is a question of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kit.chat.client import ChatSession, open_chat
from kit.errors import ConfigError, KitError, RunError
from kit.runs.store import RunStore

if TYPE_CHECKING:
    from kit.api.run import Run

HELP = """A line is a question. Commands:
  /heldout N          ask the N-th held-out prompt, its reward is shown
  /list [TEXT]        held-out prompts, those with TEXT in them
  /reference TEXT     the right answer to the questions that follow; alone: none
  /set NAME VALUE     seed, temperature (0: greedy), top_p, top_k, min_p, max_tokens
  /again              the last question once more, with the next seed
  /help   /quit       Ctrl-C ends an answer, Ctrl-D the chat"""

ENDED = {"length": "cut at max_tokens", "tool_calls": "its last call was not answered", "cancelled": "cancelled"}
SETTINGS = ("seed", "temperature", "top_p", "top_k", "min_p", "max_tokens")


def ask_once(
    run: Run, checkpoint: str | None, prompt: str | None, heldout: int | None, reference: str | None,
    sampling: Mapping[str, Any], sides: Sequence[str], *, as_json: bool,
) -> None:  # fmt: skip
    """Asks one question and prints both answers. Raises `KitError`."""
    if (prompt is None) == (heldout is None):
        raise ConfigError("Give either --prompt TEXT or --heldout N.")
    with _session(run, checkpoint) as session:
        if as_json:
            print(json.dumps(session.answer(prompt, heldout=heldout, reference=reference, sides=sides, **sampling)))
            return
        _note(session)
        show(session, prompt, heldout, reference, sampling, sides)


def converse(run: Run, checkpoint: str | None, sampling: Mapping[str, Any], sides: Sequence[str]) -> None:
    """Reads questions until the input ends."""
    settings, reference = dict(sampling), None
    last: tuple[str | None, int | None] | None = None
    with _session(run, checkpoint) as session:
        _note(session)
        print(f"{session.ready['model']} and run {run.id}, step {session.ready['step']}. /help says what there is.")
        while True:
            try:
                line = input("\n> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            word, _, rest = line.partition(" ")
            rest = rest.strip()
            try:
                if not line:
                    continue
                if word == "/quit":
                    return
                if word == "/help":
                    print(HELP)
                elif word == "/list":
                    _list(session, rest or None)
                elif word == "/reference":
                    reference = rest or None
                elif word == "/set":
                    name, _, value = rest.partition(" ")
                    settings[name] = _number(name, value)
                elif word == "/heldout":
                    last = (None, int(rest) if rest.isdigit() else 0)
                    show(session, *last, None, settings, sides)
                elif word == "/again" and last is not None:
                    settings["seed"] = settings.get("seed", 0) + 1
                    show(session, *last, None if last[1] else reference, settings, sides)
                elif word.startswith("/"):
                    print(f"There is no command '{word}'.\n{HELP}")
                else:
                    last = (line, None)
                    show(session, line, None, reference, settings, sides)
            except KitError as error:
                print(f"error: {error}")
                if isinstance(error, RunError) and not session.alive:
                    raise
            except KeyboardInterrupt:
                session.cancel()
                print("  (cancelled)")


def show(
    session: ChatSession, prompt: str | None, heldout: int | None, reference: str | None, sampling: Mapping[str, Any],
    sides: Sequence[str],
) -> None:  # fmt: skip
    """Streams both answers to the terminal, each with its reward."""
    for message in session.ask(prompt, heldout=heldout, reference=reference, sides=sides, **sampling):
        if message["event"] == "began":
            print(f"[{message['side']}] ", end="", flush=True)
        elif message["event"] == "token":
            print(message["text"], end="", flush=True)
        elif message["event"] == "answer":
            print(f"\n    {chips(message)}")
        elif message["event"] == "done" and message["reference"] is not None:
            print(f"    reference {message['reference']}" + (f"   to: {message['prompt']}" if heldout else ""))


def chips(answer: Mapping[str, Any]) -> str:
    """Length, how it ended, and the reward with its components, in one line."""
    parts = [f"{answer['tokens']} tokens"]
    if answer["finish"] != "stop":
        parts.append(ENDED[answer["finish"]])
    reward = answer["reward"]
    if reward is not None:
        total = "not scored" if reward["total"] is None else f"{reward['total']:.2f}"
        parts.append(f"reward {total}")
        parts += [_chip(name, part) for name, part in reward["components"].items()]
    return " | ".join(parts)


def _chip(name: str, part: Mapping[str, Any]) -> str:
    value = "-" if part["value"] is None else f"{part['value']:.2f}"
    status = "" if part["status"] == "ok" else f" ({part['status']})"
    return f"{name} {value}{status}"


def _session(run: Run, checkpoint: str | None) -> ChatSession:
    return open_chat(RunStore(run.path.parent).open(run.id), checkpoint)


def _note(session: ChatSession) -> None:
    if note := session.ready.get("note"):
        print(f"note: {note}")


def _list(session: ChatSession, search: str | None) -> None:
    found = session.heldout(search=search)
    for row in found["rows"]:
        print(f"  {row['number']:>4}  {' '.join(str(row['prompt']).split())[:90]}   ({row['reference']})")
    print(f"  {found['total']} in all")


def _number(name: str, value: str) -> int | float:
    if name not in SETTINGS:
        raise ConfigError(f"/set {name or 'NAME'}: there is no such setting. Known: {', '.join(SETTINGS)}.")
    try:
        return int(value) if name in ("seed", "top_k", "max_tokens") else float(value)
    except ValueError:
        raise ConfigError(f"/set {name} {value or 'VALUE'}: expected a number.") from None
