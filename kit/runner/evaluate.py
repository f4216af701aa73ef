"""Scores a run's weights on its held-out problems again: `python -m kit.runner.evaluate REQUEST`, a process of its own.

The request: run_dir, overrides (`section.key=value` strings), checkpoint (`best`, `last`, a step, or null for the run's
result) and name (the result is eval/NAME.json).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config import RunConfig, load_config
from kit.errors import RunError
from kit.evaluation.heldout import HeldOut
from kit.evaluation.results import read_result, weights_of
from kit.runs.lock import held_gpu

if TYPE_CHECKING:
    from kit.data import DataSplit
    from kit.generation.tools import ToolSetup
    from kit.models.loading import ModelFiles
    from kit.runner.console import Reporter
    from kit.runs.store import RunDir


def evaluate_run(request: dict[str, Any], quiet: bool) -> dict[str, Any]:
    """Scores a run's weights with the run's own data, reward and settings, `overrides` aside."""
    from kit.runner.console import LogCapture, Reporter
    from kit.runs.store import RunDir

    run, logs = RunDir(Path(request["run_dir"])), LogCapture()
    with held_gpu("an evaluation"), logs.collecting(), logs.written_to(run.log):
        return _evaluate(run, request, Reporter(quiet))


def _evaluate(run: RunDir, request: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    # Everything that can be wrong is looked at before anything heavy is imported.
    from kit.evaluation.checker import build_checker, check_evaluation
    from kit.models.libraries import load_libraries
    from kit.runner.prepare import build_reward

    config: RunConfig = load_config(run.config, request.get("overrides", []))
    step, weights = weights_of(run, request.get("checkpoint"))
    preset = build_reward(config)
    checker = build_checker(config, preset)
    check_evaluation(config, checker)
    load_libraries(config.model, training=False)

    from kit.generation.tools import check_turns, load_tools
    from kit.models.backend import use_threads
    from kit.models.failures import BatchSizeBackoff
    from kit.models.loading import autocast_dtype, find_model, load_model
    from kit.models.start import put_on

    use_threads(config.run.threads, config.model.name)
    # Nothing trains here, and what Unsloth trained are transformers' weights and PEFT's adapters, on any machine.
    config.model.backend = "transformers"
    if config.model.lora is None:
        config.model = config.model.model_copy(update={"name": str(weights), "adapter": None})
    files = find_model(config.model, chat=config.data.chat, template=config.data.chat_template_kwargs)
    loaded = load_model(files, config.model)
    model = loaded.model if config.model.lora is None else put_on(loaded.model, weights, loaded.start)
    interaction = load_tools(config.generation)
    check_turns(interaction, loaded.tokenizer, chat=config.data.chat, source=config.model.name)
    rows = heldout_rows(run, config, files, interaction)
    memory = BatchSizeBackoff()
    settings = (config.evaluation, config.generation)
    heldout = HeldOut(rows, preset, loaded.tokenizer, *settings, checker, memory, interaction, loaded.processor)
    heldout.half = autocast_dtype(config.model, files.backend)
    name = request.get("name", "again")
    with reporter.bar(f"Held-out score, {name}") as advance:
        result = heldout.score(model, advance, step=step)
    run.write_json(f"eval/{name}.json", result)
    after = read_result(run.eval / "after.json") if (run.eval / "after.json").is_file() else {}
    same = after.keys() >= {key for key, value in result.items() if isinstance(value, dict)}  # kinds of scores
    reporter.scores(({"after": after} if same else {}) | {name: result})
    reporter.say(f"{result['problems']} problems, weights of step {step}: {run.eval / name}.json")
    return result


def heldout_rows(run: RunDir, config: RunConfig, files: ModelFiles, interaction: ToolSetup) -> list[dict[str, Any]]:
    """The held-out rows of a run, in the order of its evaluations: its own copy, so that the data may have moved since.

    The source is read again where the run has no copy or `config` asks for other data. Raises `KitError`.
    """
    from kit.data import load_data
    from kit.generation.prompts import fit_pictures
    from kit.runner.prepare import fit_prompts

    if run.heldout.is_file() and config.data == load_config(run.config).data:
        import pyarrow.parquet as pq
        from datasets import Dataset

        rows: list[dict[str, Any]] = Dataset(pq.read_table(run.heldout)).to_list()
        return rows
    data = fit_prompts(config, unchanged(run, load_data(config.data)), files.tokenizer, interaction)
    return list(fit_pictures(config, data, files).heldout.to_list())


def unchanged(run: RunDir, data: DataSplit) -> DataSplit:
    """Returns the data. Raises `RunError` if it is not what the run was trained on: other rows would be held out."""
    trained = json.loads(run.data.read_text(encoding="utf-8"))
    if data.info["sha256"] != trained["sha256"]:
        raise RunError(
            f"The data in {trained['source']} has changed since run '{run.id}' (its content hash differs), so problems that it "
            "was trained on could be held out now. Bring the old file back, or train again."
        )
    return data


if __name__ == "__main__":
    from kit.runs.worker import serve

    sys.exit(serve(evaluate_run))
