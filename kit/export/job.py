"""Exports a run's weights: `python -m kit.export.job REQUEST`, a process of its own. `export` reads from top to bottom.

The request: run_dir, format, checkpoint (best, last, a step, or null), out, force, dtype, quantization, prompts, seed,
verify, base, llama_cpp.
"""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import ConfigError, ModelError, RunError
from kit.export import target as places
from kit.export.request import NOT_VERIFIED, check_place
from kit.runs.lock import held_gpu

if TYPE_CHECKING:
    from kit.export.verify import Measured, Written
    from kit.runner.console import Reporter
    from kit.runner.trained import Source
    from kit.runs.store import RunDir

LONGEST = 512
"""Tokens of a greedy completion in the verification, at most."""
HALVES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
"""GGUF types and the precision to merge in, so that weights are rounded once."""


def export_run(request: dict[str, Any], quiet: bool) -> dict[str, Any]:
    """Exports as requested. What came of it is filed as export/FORMAT.json in the run, too."""
    from kit.runner.console import LogCapture, Reporter
    from kit.runs.store import RunDir

    run, logs = RunDir(Path(request["run_dir"])), LogCapture()
    # An adapter is copied from file to file; everything else loads the model.
    needs_model = request["verify"] or request["format"] != "adapter"
    with held_gpu("an export") if needs_model else nullcontext(), logs.collecting(), logs.written_to(run.log):
        return export(run, request, Reporter(quiet))


def export(run: RunDir, request: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Writes the export beside its place, holds it against the source, and puts it there if it is what was trained."""
    from kit.export.source import keep_weights
    from kit.export.verify import verify
    from kit.runner.trained import open_source
    from kit.runs.files import human_size

    started, what = time.time(), request["format"]
    target = Path(request["out"]) if request["out"] else run.path / "export" / what
    check_place(target, run, force=request["force"])
    source, note = open_source(run, request["checkpoint"], request["base"])
    if note:
        source.note(note)
    _check(source, what, request)
    reporter.say(f"Exporting {run.id}, weights of step {source.step}, as {what} to {target}")
    with places.staged(target) as place:
        keep_weights(source, place / ".weights")
        measured = _measure(source, request, reporter) if request["verify"] else None
        written = write(source, what, place, request, reporter)
        verdict = None
        if measured is not None:
            reporter.say("Reading the written files back, and asking the same")
            verdict = verify(source, measured, place, what, written)
        shutil.rmtree(place / ".weights")
        good = verdict is None or verdict.verified
        final = target if good else target.with_name(target.name + NOT_VERIFIED)
        files = places.listing(place)
        places.publish(place, final)
    result = {
        "format": what, "run": run.id, "step": source.step, "path": str(final), "files": files,
        "bytes": sum(each["bytes"] for each in files), "stored": written.kind,
        "verification": verdict.as_dict() if verdict else None, "notes": source.notes,
        "time": started, "seconds": time.time() - started,
    }  # fmt: skip
    run.write_json(f"export/{what}.json", result)
    outcome = {"format": what, "step": source.step, "path": str(final), "verified": good if verdict else None}
    run.append_event("export", **outcome)
    lines = [f"note: {each}" for each in source.notes]
    if verdict is not None:
        lines += [*summary(result["verification"]), *(f"  fault: {fault}" for fault in verdict.faults)]
    word = "not verified (left out)" if verdict is None else "verified" if good else "not verified"
    lines.append(f"{word}: {final} ({human_size(result['bytes'])})")
    for line in lines:
        reporter.say(line)
    return result


def _check(source: Source, what: str, request: dict[str, Any]) -> None:
    """Refuses what could not be finished, before any work. Raises `KitError`."""
    if what == "adapter" and not source.lora:
        raise ConfigError(
            f"Run '{source.run.id}' has trained every weight, so there is no adapter. Take --to merged-16bit."
        )
    quantised = getattr(source.files.config, "quantization_config", None) is not None
    if quantised and what != "adapter" and source.lora and request["base"] is None:
        raise ModelError(
            f"{source.run_name} holds quantised weights, and merging into those would round the update away. Name the 16-bit "
            "model that they were made of: --base ID_OR_FOLDER."
        )
    if what in ("gguf", "ollama"):
        from kit.export.gguf import check_reader, find_tools

        find_tools(request["quantization"], request["llama_cpp"])
        if request["verify"]:
            check_reader()


def _measure(source: Source, request: dict[str, Any], reporter: Reporter) -> Measured:
    """The trained model's answers to held-out prompts, or to training prompts where none were held out.

    Raises `KitError`.
    """
    from kit.data import load_data
    from kit.export.source import choose_rows
    from kit.export.verify import measure
    from kit.runner.prepare import fit_prompts

    config = source.config
    rows = source.heldout_rows()
    if not rows:
        rows = fit_prompts(config, load_data(config.data), source.tokenizer, source.interaction).train.to_list()
    if not rows:
        raise RunError("None of the run's prompts can be used for the verification. Leave it out with --no-verify.")
    rows = choose_rows(rows, request["prompts"], request["seed"])
    reporter.say(f"The model as it was trained answers {len(rows)} held-out prompts")
    return measure(source, rows, min(LONGEST, config.generation.max_completion_tokens))


def write(source: Source, what: str, place: Path, request: dict[str, Any], reporter: Reporter) -> Written:
    """Writes the files of one format and the model card."""
    from kit.export.card import model_card
    from kit.export.gguf import ends_left_out, modelfile

    quantization, limits = None, []
    adapter = what == "adapter"
    written = _write_adapter(source, place) if adapter else _write_merged(source, place, what, request, reporter)
    if written.gguf is not None:
        quantization = written.kind
        if left := ends_left_out(written.gguf, source.tokenizer, _ends(source)):
            source.note(left)
            limits.append(f"{left[0].upper()}{left[1:]}.")
        limits.append(
            f"Rounded to {quantization}, and checked by reading the file back with transformers, not with llama.cpp."
        )
    if what == "ollama" and written.gguf is not None:
        text, notes = modelfile(source, _ends(source), written.gguf.name)
        (place / "Modelfile").write_text(text, encoding="utf-8")
        source.notes += notes
    if source.config.model.load_in_4bit:
        if what != "adapter":
            source.note(
                "trained on 4-bit weights, merged into the 16-bit ones that they were made of: the rounding of the base is gone"
            )
        limits.append(
            "Trained on a 4-bit base, of which the scores above are; the base in full precision answers a little otherwise."
        )
    base = source.base if request["base"] else source.run_name
    text = model_card(source, what, base, written.gguf.name if written.gguf else None, quantization, limits)
    (place / "README.md").write_text(text, encoding="utf-8")
    return written


def _ends(source: Source) -> list[int]:
    """Every end token, as the loaded source has them; kept from the measurement where there was one."""
    from kit.export.source import declared_ends

    if source.ends is None:
        source.ends = declared_ends(source)
    return source.ends


def _write_adapter(source: Source, place: Path) -> Written:
    import json

    from safetensors import safe_open

    from kit.export.card import pinned
    from kit.export.source import save_tokenizer
    from kit.export.verify import Written

    shutil.copyfile(source.weights / "adapter_model.safetensors", place / "adapter_model.safetensors")
    config = json.loads((source.weights / "adapter_config.json").read_text(encoding="utf-8"))
    if source.base != source.files.source:
        config["base_model_name_or_path"] = source.base
    config["revision"] = pinned(source)
    (place / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(source, source.tokenizer, place)
    with safe_open(place / "adapter_model.safetensors", framework="pt") as tensors:
        first = tensors.get_tensor(next(iter(tensors.keys())))
    return Written(str(first.dtype).removeprefix("torch."))


def _write_merged(source: Source, place: Path, what: str, request: dict[str, Any], reporter: Reporter) -> Written:
    """Writes the merged model: as it is, or converted to a GGUF file."""
    from kit.export.gguf import convert, find_tools
    from kit.export.source import merged, write_merged
    from kit.export.verify import Written

    ends, dtype, quantization = _ends(source), request["dtype"], request["quantization"]
    if what in ("gguf", "ollama") and dtype == "auto":
        dtype = HALVES.get(quantization, "auto")
    reporter.say("Merging in float32" if source.lora else "Casting the trained weights")
    model, dtype, kept = merged(source, dtype)
    reporter.say(f"Writing {dtype}")
    middle = place if what == "merged-16bit" else place / ".merged"
    write_merged(source, model, source.tokenizer, ends, middle)
    del model
    if what == "merged-16bit":
        return Written(dtype, kept=kept)
    reporter.say(f"Converting to GGUF, {quantization}")
    file = place / f"{source.run.id}-{quantization.upper()}.gguf"
    convert(find_tools(quantization, request["llama_cpp"]), middle, file, quantization, dtype, source.run.id)
    shutil.rmtree(middle)
    return Written(quantization, file, kept)


def summary(verification: dict[str, Any]) -> list[str]:
    """The verification's figures, for people; nothing where the export could not be run."""
    comparison, limits = verification["comparison"], verification["limits"]
    if not comparison:
        return []
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
    return lines


if __name__ == "__main__":
    from kit.runs.worker import serve

    sys.exit(serve(export_run))
