"""Everything that can be checked of a run without running it; `grpo-kit validate` prints the notes."""

from __future__ import annotations

from kit.config import EMBEDDED, RunConfig


def check(config: RunConfig) -> list[str]:
    """Reads the data, finds the model and builds reward and objective. Returns notes worth knowing.

    Raises `KitError` for whatever would keep the run from starting. The embedded model is not built for this.
    """
    from kit.data import load_data
    from kit.training.preparation import (
        build_objective,
        build_reward,
        check_context,
        check_engine,
        check_heldout,
        find_model,
        fit_prompts,
    )

    check_engine(config)
    objective = build_objective(config)
    preset = build_reward(config)
    data = load_data(config.data)
    check_heldout(config, len(data.heldout))
    notes = []
    if config.model.name != EMBEDDED:
        files = find_model(config)
        check_context(config, files)
        data = fit_prompts(config, data, files.tokenizer)
        notes.append(f"model: {config.model.name}, {files.parameters / 1e6:.0f}M weights, {files.backend.reason}")
    rows = data.info["rows"]
    skipped = f", {rows['skipped']} bad rows left out" if rows.get("skipped") else ""
    notes.append(f"data: {len(data.train)} training and {len(data.heldout)} held-out rows{skipped}")
    notes += [f"data: {note}" for note in data.info.get("notes", [])]
    notes.append(f"reward: {preset!r}")
    if preset.checker is None:
        notes.append("reward: no component decides correctness, so held-out evaluation reports reward, not accuracy")
    needs = ", ".join(sorted(objective.needs)) or "nothing beyond the policy"
    notes.append(f"objective: {config.objective.recipe}, needs {needs}")
    prompts = config.optimisation.batch_size // config.generation.num_generations
    passes = config.optimisation.steps / config.optimisation.iterations * prompts / max(1, len(data.train))
    notes.append(
        f"steps: {config.optimisation.steps} x {prompts} prompts x {config.generation.num_generations} completions, "
        f"{passes:.2f} passes over the training rows"
    )
    return notes
