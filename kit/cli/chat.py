"""The verbs `export` and `chat`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kit.cli.options import AsJson, Checkpoint, Root, RunId, print_json
from kit.errors import KitError, RunError

if TYPE_CHECKING:
    from kit.chat.client import ChatSession


def export(
    run_id: RunId,
    to: Annotated[str, typer.Option(metavar="FORMAT", help="adapter, merged-16bit, gguf or ollama.")],
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder. Default: RUN/export/FORMAT.")] = None,
    checkpoint: Checkpoint = None,
    quantization: Annotated[str, typer.Option(metavar="TYPE", help="Type of GGUF: f16, q8_0, q4_k_m, ...")] = "q4_k_m",
    dtype: Annotated[
        str, typer.Option(metavar="NAME", help="dtype of merged weights: auto, float16, bfloat16 or float32.")
    ] = "auto",
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="16-bit base to merge into. Default: that of the run.")
    ] = None,
    llama_cpp: Annotated[str | None, typer.Option(metavar="FOLDER", help="Folder of llama.cpp, for GGUF.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts for the verification.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed for the choice of these prompts.")] = 0,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Skip the verification.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing export.")] = False,
    as_json: AsJson = False,
    root: Root = Path("runs"),
) -> None:
    """Export RUN_ID's weights and verify that they answer like the trained model."""
    from kit.api import Run
    from kit.export.request import NotVerified

    try:
        result = Run(run_id, root).export(
            to, out=out, checkpoint=checkpoint, quantization=quantization, dtype=dtype, base=base, llama_cpp=llama_cpp,
            prompts=prompts, seed=seed, verify=not no_verify, force=force,
            progress=not as_json,
        )  # fmt: skip
    except NotVerified as failure:
        if as_json:
            print_json(failure.result)
        else:
            typer.echo(f"error: {failure}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        print_json(result)


def chat(
    run_id: RunId,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Ask this, print the answers and exit.")] = None,
    heldout: Annotated[int | None, typer.Option(min=1, metavar="N", help="Ask the N-th held-out prompt.")] = None,
    reference: Annotated[str | None, typer.Option(metavar="TEXT", help="Correct answer, for the reward.")] = None,
    checkpoint: Checkpoint = None,
    seed: Annotated[int, typer.Option(help="Seed of both answers.")] = 0,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy. Default: the run's.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Default: the run's.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="0 is no limit. Default: the run's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer. Default: the run's.")] = None,
    only: Annotated[str | None, typer.Option(metavar="base|tuned", help="Ask only one of the two.")] = None,
    as_json: AsJson = False,
    root: Root = Path("runs"),
) -> None:
    """Compare answers of the base model and the tuned one, with the same seed."""
    from kit.chat.client import open_chat
    from kit.runs.store import RunStore

    sampling = {"seed": seed, "temperature": temperature, "top_p": top_p, "top_k": top_k, "max_tokens": max_tokens}
    settings: dict[str, Any] = {key: value for key, value in sampling.items() if value is not None}
    settings |= {"sides": [only] if only else ["base", "tuned"], "reference": reference}
    with open_chat(RunStore(root).open(run_id), checkpoint) as session:
        if as_json:
            print_json(session.answer(prompt, heldout=heldout, **settings))
            return
        if note := session.ready.get("note"):
            print(f"note: {note}")
        if prompt is not None or heldout is not None:
            show(session, prompt, heldout, settings)
            return
        print(f"{session.ready['model']} and run {run_id}, step {session.ready['step']}. {HELP}")
        while True:
            try:
                line = input("\n> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            word, _, rest = line.partition(" ")
            try:
                if word == "/quit":
                    return
                if word == "/heldout":
                    show(session, None, int(rest) if rest.strip().isdigit() else 0, settings | {"reference": None})
                elif word.startswith("/"):
                    print(f"There is no command '{word}'. {HELP}")
                elif line:
                    show(session, line, None, settings)
            except KitError as error:
                print(f"error: {error}")
                if isinstance(error, RunError) and not session.alive:
                    raise
            except KeyboardInterrupt:
                session.cancel()
                print("  (cancelled)")


HELP = "Type a question, or /heldout N for the N-th held-out prompt. Ctrl-C ends an answer, Ctrl-D or /quit the chat."
ENDED = {"length": "cut at max_tokens", "tool_calls": "the last tool call has no result", "cancelled": "cancelled"}


def show(session: ChatSession, prompt: str | None, heldout: int | None, settings: Mapping[str, Any]) -> None:
    """Stream both answers to the terminal, each with its length, how it ended, and its reward with all components."""
    for message in session.ask(prompt, heldout=heldout, **settings):
        if message["event"] == "began":
            print(f"[{message['side']}] ", end="", flush=True)
        elif message["event"] == "token":
            print(message["text"], end="", flush=True)
        elif message["event"] == "answer":
            parts = [f"{message['tokens']} tokens"]
            parts += [ENDED[message["finish"]]] if message["finish"] != "stop" else []
            if (reward := message["reward"]) is not None:
                parts.append("reward not scored" if reward["total"] is None else f"reward {reward['total']:.2f}")
                for name, part in reward["components"].items():
                    value = "-" if part["value"] is None else f"{part['value']:.2f}"
                    parts.append(f"{name} {value}" + ("" if part["status"] == "ok" else f" ({part['status']})"))
            print(f"\n    {' | '.join(parts)}")
        elif message["event"] == "done" and message["reference"] is not None:
            print(f"    reference {message['reference']}" + (f"   to: {message['prompt']}" if heldout else ""))
