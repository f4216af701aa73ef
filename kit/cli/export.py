"""The verbs `export` and `chat`: take what was learned elsewhere, and talk to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

RunArgument = Annotated[str, typer.Argument(metavar="RUN_ID", help="A run; `grpo-kit ps` lists them.")]
Root = Annotated[Path, typer.Option(help="Folder that holds the runs.")]
Checkpoint = Annotated[
    str | None, typer.Option(metavar="best|last|STEP", help="Weights to take; else the run's result.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]


def export(
    run_id: RunArgument,
    to: Annotated[str, typer.Option(metavar="FORMAT", help="adapter, merged-16bit, merged-4bit, gguf, ollama or hub.")],
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where to; else export/FORMAT in the run.")] = None,
    checkpoint: Checkpoint = None,
    quantization: Annotated[str, typer.Option(metavar="TYPE", help="Of GGUF: f16, q8_0, q4_k_m, ...")] = "q4_k_m",
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Of merged weights: auto, float16 or bfloat16.")] = "auto",
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="16-bit base to merge into; else the run's.")
    ] = None,
    llama_cpp: Annotated[str | None, typer.Option(metavar="FOLDER", help="llama.cpp, for GGUF.")] = None,
    repo: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Hub repository; the token is in HF_TOKEN.")
    ] = None,
    push: Annotated[
        str, typer.Option(metavar="FORMAT", help="What the hub gets: adapter, merged-16bit, ...")
    ] = "adapter",
    private: Annotated[bool, typer.Option("--private", help="Make the hub repository a private one.")] = False,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts of the verification.")] = 16,
    seed: Annotated[int, typer.Option(help="Which prompts those are.")] = 0,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not hold the export against the source.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an export that is there; no other folder.")] = False,
    as_json: AsJson = False,
    root: Root = Path("runs"),
) -> None:
    """Write RUN_ID's weights in another form, verified. It must answer as the trained model does."""
    from kit.api.run import Run
    from kit.export.face import NotVerified

    try:
        result = Run(run_id, root).export(
            to, out=out, checkpoint=checkpoint, quantization=quantization, dtype=dtype, base=base, llama_cpp=llama_cpp,
            repo=repo, push=push, private=private, prompts=prompts, seed=seed, verify=not no_verify, force=force,
            progress=not as_json,
        )  # fmt: skip
    except NotVerified as failure:
        if as_json:
            typer.echo(json.dumps(failure.result))
        else:
            typer.echo(f"error: {failure}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(result))


def chat(
    run_id: RunArgument,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Ask this, print the answers, and end.")] = None,
    heldout: Annotated[int | None, typer.Option(min=1, metavar="N", help="Ask the N-th held-out prompt.")] = None,
    reference: Annotated[str | None, typer.Option(metavar="TEXT", help="The right answer, for the reward.")] = None,
    checkpoint: Checkpoint = None,
    seed: Annotated[int, typer.Option(help="Seed of both answers.")] = 0,
    temperature: Annotated[float | None, typer.Option(min=0, help="Of sampling; 0 is greedy; else the run's.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Else the run's.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Else the run's; 0 is no limit.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer; else the run's.")] = None,
    only: Annotated[str | None, typer.Option(metavar="base|tuned", help="Ask one of the two.")] = None,
    as_json: AsJson = False,
    root: Root = Path("runs"),
) -> None:
    """Ask the base model and the tuned one, side by side. Both answer with the same seed."""
    from kit.api.run import Run
    from kit.cli.chat import ask_once, converse

    run = Run(run_id, root)
    sampling = {"seed": seed, "temperature": temperature, "top_p": top_p, "top_k": top_k, "max_tokens": max_tokens}
    given = {key: value for key, value in sampling.items() if value is not None}
    sides = [only] if only else ["base", "tuned"]
    if prompt is None and heldout is None and not as_json:
        converse(run, checkpoint, given, sides)
    else:
        ask_once(run, checkpoint, prompt, heldout, reference, given, sides, as_json=as_json)
