"""Everything that can be checked of a run without running it; `grpo-kit validate` prints the notes."""

from __future__ import annotations

from kit.config import RunConfig

WHOLE_COMPLETIONS = {"gspo": "sequence_mean", "gmpo": "sequence_mean", "luspo": "sequence_sum"}
"""Clips whose loss is one number a completion, and the reduction of their papers."""


def check(config: RunConfig) -> list[str]:
    """Takes the steps that a run takes before its first one, and returns notes worth knowing.

    Raises `KitError` for whatever would keep the run from starting.
    """
    from kit.models.memory import free_memory, note, planned
    from kit.runner.prepare import prepare

    found = prepare(config)
    config, data, preset, files = found.config, found.data, found.preset, found.files
    notes = [f"model: {config.model.name}, {files.parameters / 1e6:.2f}M weights, {files.backend.reason}"]
    if files.shape is not None:
        device = files.backend.device
        notes.append(note(planned(config, files.shape, device, found.objective), free_memory(device)))
    rows = data.info["rows"]
    skipped = f", {rows['skipped']} bad rows left out" if rows.get("skipped") else ""
    notes.append(f"data: {len(data.train)} training and {len(data.heldout)} held-out rows{skipped}")
    notes += [f"data: {note}" for note in data.info.get("notes", [])]
    notes.append(f"reward: {preset.name}, {preset.parts}")
    if found.checker.checker is None:
        notes.append("reward: no component decides correctness, so held-out evaluation reports reward, not accuracy")
    needs = ", ".join(sorted(found.objective.needs)) or "nothing beyond the policy"
    notes.append(f"objective: {config.objective.recipe}, needs {needs}")
    clip, reduction = found.objective.clip.name, found.objective.reduction.name
    if config.optimisation.iterations == 1 and clip not in ("reinforce", "clip_cov", "kl_cov"):
        notes.append(
            "objective: on-policy, as every generation is learned from once (optimisation.iterations: 1); every ratio is "
            "1, so the clip's bounds never act. Set optimisation.iterations: 2 for clipping to matter"
        )
    meant = WHOLE_COMPLETIONS.get(clip, reduction)
    if reduction != meant:
        notes.append(
            f"objective: {clip} weighs completions as wholes and is meant for reduction {meant}; with {reduction} longer "
            "completions count for more"
        )
    for name in config.selection.methods:
        settings = getattr(config.selection, name).model_dump(exclude_none=True)
        notes.append(f"selection: {name}, {', '.join(f'{key} {value}' for key, value in settings.items())}")
    if found.engine.name == "vllm" or found.engine.note:
        notes.append(f"engine: {found.engine.name}, {found.engine.reason}")
    prompts = config.optimisation.batch_size // config.generation.num_generations
    passes = config.optimisation.steps / config.optimisation.iterations * prompts / max(1, len(data.train))
    notes.append(
        f"steps: {config.optimisation.steps} x {prompts} prompts x {config.generation.num_generations} completions, "
        f"{passes:.2f} passes over the training rows"
    )
    return notes
