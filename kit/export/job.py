"""Export a run's weights in a child process: `python -m kit.export.job REQUEST`. Read `export` first.

The request has the keys run_dir, format, checkpoint (best, last, a step, or null), out, force, dtype, quantization, prompts,
seed, verify, base and llama_cpp.
"""

from __future__ import annotations

import copy
import shutil
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import ConfigError, ModelError, RunError
from kit.export.request import NOT_VERIFIED, check_place
from kit.export.target import listing, publish, staged
from kit.runs.lock import held_gpu

if TYPE_CHECKING:
    from kit.export.verify import Measured, Written
    from kit.runner.console import Reporter
    from kit.runner.trained import Source
    from kit.runs.store import RunDir

LONGEST = 512
"""Most tokens of a greedy completion in the verification."""
HALVES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
"""The dtype in which to merge for each GGUF type, so that weights are rounded once."""


def export_run(request: dict[str, Any], quiet: bool) -> dict[str, Any]:
    """Export as requested. The result is also written to export/FORMAT.json in the run."""
    from kit.runner.console import LogCapture, Reporter
    from kit.runs.store import RunDir

    run, logs = RunDir(Path(request["run_dir"])), LogCapture()
    # An adapter is copied as a file; all other exports load the model.
    needs_model = request["verify"] or request["format"] != "adapter"
    with held_gpu("an export") if needs_model else nullcontext(), logs.collecting(), logs.written_to(run.log):
        return export(run, request, Reporter(quiet))


def export(run: RunDir, request: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Write the export next to its target, verify it against the source, and move it to the target if it passes."""
    from kit.export.source import link_weights
    from kit.export.verify import verify
    from kit.runner.trained import open_source
    from kit.runs.files import human_size

    started, export_format = time.time(), request["format"]
    target = Path(request["out"]) if request["out"] else run.path / "export" / export_format
    check_place(target, run, force=request["force"])
    source, note = open_source(run, request["checkpoint"], request["base"])
    if note:
        source.note(note)
    _check(source, export_format, request)
    reporter.say(f"Exporting {run.id}, weights of step {source.step}, as {export_format} to {target}")
    with staged(target) as folder:
        link_weights(source, folder / ".weights")
        measured = _measure(source, request, reporter) if request["verify"] else None
        written = write(source, export_format, folder, request, reporter)
        verdict = None
        if measured is not None:
            reporter.say("Reading the written files back and asking the same prompts")
            verdict = verify(source, measured, folder, export_format, written)
        shutil.rmtree(folder / ".weights")
        good = verdict is None or verdict.verified
        final = target if good else target.with_name(target.name + NOT_VERIFIED)
        files = listing(folder)
        publish(folder, final)
    result = {
        "format": export_format, "run": run.id, "step": source.step, "path": str(final), "files": files,
        "bytes": sum(file["bytes"] for file in files), "stored": written.kind,
        "verification": verdict.as_dict() if verdict else None, "notes": source.notes,
        "time": started, "seconds": time.time() - started,
    }  # fmt: skip
    run.write_json(f"export/{export_format}.json", result)
    outcome = {"format": export_format, "step": source.step, "path": str(final), "verified": good if verdict else None}
    run.append_event("export", **outcome)
    lines = [f"note: {note}" for note in source.notes]
    if verdict is not None:
        lines += [*summary(result["verification"]), *(f"  fault: {fault}" for fault in verdict.faults)]
    state = "not verified (left out)" if verdict is None else "verified" if good else "not verified"
    lines.append(f"{state}: {final} ({human_size(result['bytes'])})")
    for line in lines:
        reporter.say(line)
    return result


def _check(source: Source, export_format: str, request: dict[str, Any]) -> None:
    """Raise `KitError` for an export that cannot succeed, before any work is done."""
    from kit.models.memory import free_memory
    from kit.runs.files import human_size

    if export_format == "adapter" and not source.lora:
        raise ConfigError(f"Run '{source.run.id}' trained all weights, so it has no adapter. Use --to merged-16bit.")
    quantised = getattr(source.files.config, "quantization_config", None) is not None
    if quantised and export_format != "adapter" and source.lora and request["base"] is None:
        raise ModelError(
            f"{source.run_name} has quantised weights; merging into them would round the update away. Name the 16-bit "
            "model from which they were quantised: --base ID_OR_FOLDER."
        )
    needed, free = 2.0 * source.files.parameters, free_memory("cpu")
    if export_format != "adapter" and needed > free:
        raise ModelError(
            f"The merged weights need {human_size(needed)} of main memory, but {human_size(free)} are free. Close other "
            "programs, or copy the run to a machine with more memory; --to adapter needs little."
        )
    if export_format in ("gguf", "ollama"):
        from kit.export.gguf import check_reader, find_tools

        find_tools(request["quantization"], request["llama_cpp"])
        if request["verify"]:
            check_reader(source.files.config, request["quantization"])


def _measure(source: Source, request: dict[str, Any], reporter: Reporter) -> Measured:
    """Measure the trained model's answers to held-out prompts, or to training prompts if the run held out none.

    16-bit weights that do not fit on the GPU are measured on the CPU, and then the export is verified there. Raises `KitError`.
    """
    from kit.data import load_data
    from kit.export.source import choose_rows, fits_in_float32
    from kit.export.verify import measure
    from kit.models.failures import first_line, is_out_of_memory, release
    from kit.runner.prepare import fit_prompts

    config, backend = source.config, source.files.backend
    rows = source.heldout_rows()
    if not rows:
        rows = fit_prompts(config, load_data(config.data), source.tokenizer, source.interaction).train.to_list()
    if not rows:
        raise RunError("None of the run's prompts can be used for the verification. Skip it with --no-verify.")
    rows = choose_rows(rows, request["prompts"], request["seed"])
    reporter.say(f"The trained model answers {len(rows)} held-out prompts")
    # A merged export has the weights from which the 4-bit ones were made, so its source is measured with them, too.
    rounded = config.model.load_in_4bit and (request["format"] == "adapter" or not source.unrounded)
    changes: dict[str, Any] = {"load_in_4bit": rounded}
    if backend.device == "cpu" and source.lora and not rounded and config.model.dtype != "bfloat16":
        changes["dtype"] = "float32" if fits_in_float32(source) else "bfloat16"
    try:
        return measure(source, rows, min(LONGEST, config.generation.max_completion_tokens), **changes)
    except ModelError as error:
        cause = error.__cause__
        if rounded or backend.device == "cpu" or cause is None or not is_out_of_memory(cause):
            raise
        source.note(f"verified on the CPU, because the 16-bit model does not fit on the GPU ({first_line(cause)})")
    release()
    source.files = replace(source.files, backend=replace(backend, device="cpu"))
    return _measure(source, request, reporter)


def write(source: Source, export_format: str, folder: Path, request: dict[str, Any], reporter: Reporter) -> Written:
    """Write the files of the format and the model card."""
    from kit.export.card import model_card
    from kit.export.gguf import missing_ends, modelfile

    quantization, limits = None, []
    adapter = export_format == "adapter"
    written = _write_adapter(source, folder) if adapter else _write_merged(source, folder, request, reporter)
    if written.gguf is not None:
        quantization = written.kind
        if note := missing_ends(written.gguf, source.tokenizer, _ends(source)):
            source.note(note)
            limits.append(f"{note[0].upper()}{note[1:]}.")
        check = "The verification reads the file with transformers, not with llama.cpp"
        limits.append(f"Rounded to {quantization}. {check if request['verify'] else 'Not verified'}.")
    if export_format == "ollama" and written.gguf is not None:
        text, notes = modelfile(source, _ends(source), written.gguf.name)
        (folder / "Modelfile").write_text(text, encoding="utf-8")
        source.notes += notes
    if source.config.model.load_in_4bit:
        if export_format != "adapter":
            source.note("trained on 4-bit weights, merged into the 16-bit weights from which they were quantised")
        limits.append("Trained and scored on a 4-bit base. The base in full precision answers slightly differently.")
    base = source.base if request["base"] else source.run_name
    text = model_card(source, export_format, base, written.gguf.name if written.gguf else None, quantization, limits)
    (folder / "README.md").write_text(text, encoding="utf-8")
    return written


def _ends(source: Source) -> list[int]:
    """Every token that ends a completion: those of the measured model, or those in the model's files."""
    from kit.export.source import declared_ends

    if source.ends is None:
        source.ends = declared_ends(source)
    return source.ends


def _write_adapter(source: Source, folder: Path) -> Written:
    import json

    from safetensors import safe_open

    from kit.export.card import pinned
    from kit.export.source import save_tokenizer
    from kit.export.verify import Written

    shutil.copyfile(source.weights / "adapter_model.safetensors", folder / "adapter_model.safetensors")
    config = json.loads((source.weights / "adapter_config.json").read_text(encoding="utf-8"))
    if source.base != source.files.source:
        config["base_model_name_or_path"] = source.base
    config["revision"] = pinned(source)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(source, source.tokenizer, folder)
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as tensors:
        first = tensors.get_tensor(next(iter(tensors.keys())))
    return Written(str(first.dtype).removeprefix("torch."))


def _write_merged(source: Source, folder: Path, request: dict[str, Any], reporter: Reporter) -> Written:
    """Write the merged model as safetensors or as a GGUF file."""
    from kit.export.gguf import add_sentencepiece, convert, file_template, find_tools
    from kit.export.source import merge, write_merged
    from kit.export.verify import Written

    ends, dtype, quantization = _ends(source), request["dtype"], request["quantization"]
    if request["format"] in ("gguf", "ollama") and dtype == "auto":
        dtype = HALVES.get(quantization, "auto")
    reporter.say("Merging in float32" if source.lora else "Casting the trained weights")
    model, dtype, update_kept = merge(source, dtype)
    reporter.say(f"Writing {dtype}")
    merged = folder if request["format"] == "merged-16bit" else folder / ".merged"
    tokenizer = source.tokenizer
    if request["format"] != "merged-16bit":
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = file_template(tokenizer)
    write_merged(source, model, tokenizer, ends, merged)
    del model
    if request["format"] == "merged-16bit":
        return Written(dtype, update_kept=update_kept)
    reporter.say(f"Converting to GGUF, {quantization}")
    file = folder / f"{source.run.id}-{quantization.upper()}.gguf"
    add_sentencepiece(source, merged)
    tools, model_type = find_tools(quantization, request["llama_cpp"]), source.files.config.model_type
    convert(tools, merged, file, quantization, dtype, source.run.id, model_type)
    shutil.rmtree(merged)
    return Written(quantization, file, update_kept)


def summary(verification: dict[str, Any]) -> list[str]:
    """Lines with the figures of the verification; none if the export could not be run."""
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
