"""Exports a run's weights: `python -m kit.export.job REQUEST`, a process of its own. `export` reads from top to bottom.

The request: run_dir, format, checkpoint (best, last, a step, or null), out, force, dtype, quantization, prompts, seed,
verify, base, llama_cpp, repo, private, push (what a hub repository holds).
"""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import ConfigError, RunError
from kit.export import target as places
from kit.export.request import NOT_VERIFIED, bytes_needed, check_place, check_push
from kit.runs.lock import held_gpu

if TYPE_CHECKING:
    from kit.export.verify import Measured, Verdict
    from kit.runner.console import Reporter
    from kit.runner.trained import Source
    from kit.runs.store import RunDir

LONGEST = 512
"""Tokens of a greedy completion in the verification, at most."""
HALVES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
"""GGUF types and the precision to merge in, so that weights are rounded once."""


def export_run(request: dict[str, Any], quiet: bool) -> None:
    """Exports as requested. What came of it is filed as export/FORMAT.json in the run."""
    from kit.runner.console import LogCapture, Reporter
    from kit.runs.store import RunDir

    run, logs = RunDir(Path(request["run_dir"])), LogCapture()
    # An adapter is copied from file to file; everything else loads the model.
    what = request["push"] if request["format"] == "hub" else request["format"]
    needs_model = request["verify"] or what != "adapter"
    with held_gpu("an export") if needs_model else nullcontext(), logs.collecting(), logs.written_to(run.log):
        export(run, request, Reporter(quiet))


def export(run: RunDir, request: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Writes the export beside its place, holds it against the source, and puts it there if it is what was trained."""
    from kit.export.source import keep_weights
    from kit.runner.trained import open_source

    started, name = time.time(), request["format"]
    what = request["push"] if name == "hub" else name
    target = Path(request["out"]) if request["out"] else run.path / "export" / name
    check_place(target, run, force=request["force"])
    source, note = open_source(run, request["checkpoint"], request["base"], quantized=what == "merged-4bit")
    notes = source.notes
    notes += [note] if note else []
    _check(source, what, request)
    adapter = sum(path.stat().st_size for path in source.weights.glob("*.safetensors"))
    dtype = request["dtype"] if source.lora or request["dtype"] != "auto" else "float32"
    needed = bytes_needed(what, source.files.parameters, adapter, request["quantization"], dtype)
    places.check_space(target, needed)
    reporter.say(f"Exporting {run.id}, weights of step {source.step}, as {name} to {target}")
    for each in notes:
        reporter.say(f"note: {each}")

    with places.staged(target) as place:
        keep_weights(source, place / ".weights")
        measured = _measure(source, request, reporter) if request["verify"] else None
        written = write(source, what, place, request, notes, reporter)
        verdict = _verify(source, measured, place, what, written, reporter) if measured else None
        shutil.rmtree(place / ".weights")
        good = verdict is None or verdict.verified
        pushed = _push(source, place, request, reporter) if name == "hub" and good else None
        final = target if good else target.with_name(target.name + NOT_VERIFIED)
        files = places.listing(place)
        places.publish(place, final)
    result = {
        "format": name, "holds": what, "run": run.id, "step": source.step, "path": str(final), "files": files,
        "bytes": sum(each["bytes"] for each in files), "stored": written["kind"],
        "verification": verdict.as_dict() if verdict else None, "notes": notes, "hub": pushed,
        "time": started, "seconds": time.time() - started,
    }  # fmt: skip
    run.write_json(f"export/{name}.json", result)
    outcome = {
        "format": name,
        "step": source.step,
        "path": str(final),
        "verified": verdict.verified if verdict else None,
    }
    run.append_event("export", **outcome)
    for each in notes[1 if note else 0 :]:
        reporter.say(f"note: {each}")
    _conclude(result, verdict, reporter)
    return result


def _check(source: Source, what: str, request: dict[str, Any]) -> None:
    """Refuses what could not be finished, before any work. Raises `KitError`."""
    if what == "adapter" and not source.lora:
        raise ConfigError(
            f"Run '{source.run.id}' has trained every weight, so there is no adapter. Take --to merged-16bit."
        )
    if what == "merged-4bit":
        import torch

        from kit.models.backend import quantization_config

        quantization_config(torch.float32, source.files.backend.device)
    if what in ("gguf", "ollama"):
        from kit.export.gguf import check_reader, find_tools

        find_tools(request["quantization"], request["llama_cpp"])
        if request["verify"]:
            check_reader()
    if request["format"] == "hub":
        check_push(request["repo"])


def _measure(source: Source, request: dict[str, Any], reporter: Reporter) -> Measured:
    from kit.export.source import choose_rows
    from kit.export.verify import measure

    rows = choose_rows(_rows(source), request["prompts"], request["seed"])
    reporter.say(f"The model as it was trained answers {len(rows)} held-out prompts")
    return measure(source, rows, min(LONGEST, source.config.generation.max_completion_tokens))


def _rows(source: Source) -> list[dict[str, Any]]:
    """The run's held-out rows, from its own copy where it has one, or training rows where none were held out.

    Raises `KitError`.
    """
    from kit.data import load_data
    from kit.generation.tools import load_tools
    from kit.runner.evaluate import heldout_rows
    from kit.runner.prepare import fit_prompts

    config, interaction = source.config, load_tools(source.config.generation)
    rows = heldout_rows(source.run, config, source.files, interaction)
    if not rows:
        rows = fit_prompts(config, load_data(config.data), source.tokenizer, interaction).train.to_list()
    if not rows:
        raise RunError("None of the run's prompts can be used for the verification. Leave it out with --no-verify.")
    return rows


def write(
    source: Source, what: str, place: Path, request: dict[str, Any], notes: list[str], reporter: Reporter
) -> dict[str, Any]:
    """Writes the files of one format and the model card; returns the precision of the numbers and the GGUF file's path."""
    from kit.export.gguf import ends_left_out
    from kit.export.hub import model_card

    gguf, quantization, limits = None, None, []
    if what == "adapter":
        kind = _write_adapter(source, place, public=request["format"] == "hub")
    elif what in ("gguf", "ollama"):
        quantization, kind = request["quantization"], request["quantization"]
        gguf = _write_gguf(source, place, request, reporter)
        if left := ends_left_out(gguf, source.tokenizer, _ends(source)):
            source.note(left)
            limits.append(f"{left[0].upper()}{left[1:]}.")
        limits.append(
            f"Rounded to {quantization}, and checked by reading the file back with transformers, not with llama.cpp."
        )
        if what == "ollama":
            from kit.export.gguf import modelfile

            text, more = modelfile(source, _ends(source), gguf.name)
            (place / "Modelfile").write_text(text, encoding="utf-8")
            notes += more
    else:
        kind = _write_merged(source, place, what, request["dtype"], reporter)
    if what == "merged-4bit":
        notes.append(
            "NF4 keeps 4 bits a weight: expect answers to differ from the trained model's now and then; its figures say how often"
        )
        limits.append("Quantised to NF4 after merging, which loses precision that training had.")
    if source.config.model.load_in_4bit:
        if what != "adapter":
            notes.append(
                "trained on 4-bit weights, merged into the 16-bit ones that they were made of: the rounding of the base is gone"
            )
        limits.append(
            "Trained on a 4-bit base, of which the scores above are; the base in full precision answers a little otherwise."
        )
    base = source.base if request["base"] else source.run_name
    text = model_card(source, what, base, gguf.name if gguf else None, quantization, limits)
    (place / "README.md").write_text(text, encoding="utf-8")
    return {"kind": kind, "gguf": gguf}


def _ends(source: Source) -> list[int]:
    """Every end token, as the loaded source has them; kept from the measurement where there was one."""
    from kit.export.source import declared_ends

    if source.ends is None:
        source.ends = declared_ends(source)
    return source.ends


def _write_adapter(source: Source, place: Path, *, public: bool) -> str:
    import json

    from safetensors import safe_open

    from kit.export.hub import pinned, public_name
    from kit.export.source import save_tokenizer

    shutil.copyfile(source.weights / "adapter_model.safetensors", place / "adapter_model.safetensors")
    config = json.loads((source.weights / "adapter_config.json").read_text(encoding="utf-8"))
    if public and public_name(str(config["base_model_name_or_path"])) is None:  # a path of this machine
        config["base_model_name_or_path"] = public_name(source.base) or source.run_name.rsplit("/", 1)[-1]
    elif source.base != source.files.source:
        config["base_model_name_or_path"] = source.base
    config["revision"] = pinned(source)
    (place / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(source, source.tokenizer, place)
    with safe_open(place / "adapter_model.safetensors", framework="pt") as tensors:
        first = tensors.get_tensor(next(iter(tensors.keys())))
    return str(first.dtype).removeprefix("torch.")


def _write_merged(source: Source, place: Path, what: str, dtype: str, reporter: Reporter) -> str:
    from kit.export.source import merged, write_merged

    ends = _ends(source)
    reporter.say("Merging in float32" if source.lora else "Casting the trained weights")
    model, name = merged(source, dtype)
    reporter.say(f"Writing {name}")
    if what == "merged-16bit":
        write_merged(source, model, source.tokenizer, ends, place)
        return name
    from kit.export.source import quantize

    middle = place / ".merged"
    write_merged(source, model, source.tokenizer, ends, middle)
    del model
    quantize(source, middle, place, name)
    shutil.rmtree(middle)
    return "nf4"


def _write_gguf(source: Source, place: Path, request: dict[str, Any], reporter: Reporter) -> Path:
    from kit.export.gguf import convert, find_tools
    from kit.export.source import merged, write_merged

    middle, quantization = place / ".merged", request["quantization"]
    dtype = request["dtype"] if request["dtype"] != "auto" else HALVES.get(quantization, "auto")
    model, name = merged(source, dtype)
    write_merged(source, model, source.tokenizer, _ends(source), middle)
    del model
    reporter.say(f"Converting to GGUF, {quantization}")
    file = place / f"{source.run.id}-{quantization.upper()}.gguf"
    convert(find_tools(quantization, request["llama_cpp"]), middle, file, quantization, name, source.run.id)
    shutil.rmtree(middle)
    return file


def _verify(
    source: Source, measured: Measured, place: Path, what: str, written: dict[str, Any], reporter: Reporter
) -> Verdict:
    from kit.export.verify import verify

    reporter.say("Reading the written files back, and asking the same")
    format_ = "gguf" if what == "ollama" else what
    return verify(source, measured, place, format_, written["kind"], written["gguf"])


def _push(source: Source, place: Path, request: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    from kit.export.hub import push

    reporter.say(f"Pushing to {request['repo']}")
    message = f"{request['push']} of run {source.run.id}, step {source.step}"
    return {"repo": request["repo"], **push(place, request["repo"], check_push(request["repo"]), private=request["private"],
                                            message=message, say=reporter.say)}  # fmt: skip


def _conclude(result: dict[str, Any], verdict: Verdict | None, reporter: Reporter) -> None:
    from kit.runs.files import human_size

    if verdict is not None and verdict.comparison:
        for line in summary(result):
            reporter.say(line)
    for fault in verdict.faults if verdict else ():
        reporter.say(f"  fault: {fault}")
    word = "not verified (left out)" if verdict is None else "verified" if verdict.verified else "not verified"
    reporter.say(f"{word}: {result['path']} ({human_size(result['bytes'])})")
    if result["hub"]:
        reporter.say(f"{result['hub']['url']}")


def summary(result: dict[str, Any]) -> list[str]:
    """The verification's figures, for people."""
    comparison, limits = result["verification"]["comparison"], result["verification"]["limits"]
    lines = [
        f"  greedy agreement   {comparison['token_agreement']:.2%} of {comparison['tokens']} tokens "
        f"(at least {limits['agreement']:.1%}), "
        f"{comparison['prompt_agreement']:.0%} of {comparison['prompts']} answers word by word",
        f"  logp difference    mean {comparison['logp_difference_mean']:.2g}, max {comparison['logp_difference_max']:.2g} nats "
        f"(at most {limits['mean']:g}, {limits['largest']:g})",
    ]
    if comparison["effect_kept"] is not None:
        lines.append(
            f"  effect of training {comparison['training_effect']:.2g} nats (rms), of which the export shows "
            f"{comparison['effect_kept']:.0%}"
        )
    weights = result["verification"]["weights"]
    if weights and weights["update_kept"] is not None:
        lines.append(
            f"  weights            {weights['tensors']} tensors, {weights['updated']} updated, "
            f"{weights['update_kept']:.1%} of the update in them"
        )
    return lines


if __name__ == "__main__":
    from kit.runs.worker import serve

    sys.exit(serve(export_run))
