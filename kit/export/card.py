"""The model card: README.md of every export, in the format of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kit.evaluation.results import interval
from kit.report.record import read_tree
from kit.runs.secrets import redact

if TYPE_CHECKING:
    from kit.runner.trained import Source

LIBRARIES = {"adapter": "peft", "merged-16bit": "transformers", "gguf": "gguf", "ollama": "gguf"}
PICTURES = "AutoModelForImageTextToText"
PACKAGES = ("grpo-kit", "trl", "transformers", "peft", "torch")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def public_name(name: str) -> str | None:
    """The name if it is a hub id; None for a local folder, which means nothing on another machine."""
    return name if HUB_ID.fullmatch(name) and not Path(name).expanduser().exists() else None


def model_card(
    source: Source, export_format: str, base: str, file: str | None, quantization: str | None, limits: list[str]
) -> str:
    """The card as Markdown with YAML front matter. It states no license; the publisher adds one."""
    config, record = source.config, read_tree(source.run.env)
    data = public_name(config.data.source)
    pictures = file is None and _loader(source) == PICTURES  # a GGUF file has only the language model
    front: dict[str, Any] = {
        **({"base_model": name} if (name := public_name(base)) else {}),
        "library_name": LIBRARIES[export_format],
        "pipeline_tag": "image-text-to-text" if pictures else "text-generation",
        "tags": ["grpo", "reinforcement-learning", "trl", "grpo-kit"] + ["lora"] * (export_format == "adapter"),
        **({"datasets": [data]} if data else {}),
    }
    kind = {
        "adapter": "LoRA adapter for",
        "merged-16bit": "Merged model made from",
        "gguf": f"GGUF file ({quantization}) made from",
        "ollama": f"GGUF file ({quantization}) and Modelfile made from",
    }[export_format]
    origin = f" {record['model_origin']}" if base == source.run_name and record.get("model_origin") else ""
    recipe, step = config.objective.recipe, source.step
    packages = record.get("packages", {})
    versions = [f"{name} {packages[name]}" for name in PACKAGES if name in packages]
    trained = f"\n\nTrained with {', '.join(versions)}." if versions else ""
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {source.run.id}\n\n{kind} {_shown(base)}, fine-tuned with GRPO ({recipe}); weights of step {step}.{origin}",
        f"## Scores\n{_scores(source)}",
        f"## How to load\n{_loading(source, export_format, base, file)}",
        f"## How it was trained\n{_training(source)}{trained}",
        "## Limits\n" + "\n".join(f"- {limit}" for limit in [*limits, *LIMITS]),
    ]
    return redact("\n\n".join(parts) + "\n")


LIMITS = (
    "The scores are for the training task. Other abilities were not measured and may have become worse.",
    "A policy learns what its reward pays for, which may differ from what was intended.",
    "No license is stated: the terms of the base model and of the data apply. Set `license:` above before you publish.",
)


def _shown(name: str) -> str:
    return public_name(name) or (
        "the embedded model of grpo-kit" if name.startswith("embedded") else f"`{Path(name).name}`, a local model"
    )


def _scores(source: Source) -> str:
    evaluations = source.run.evaluations()
    of_step = [
        name for name in (f"step-{source.step:05d}", "after") if evaluations.get(name, {}).get("step") == source.step
    ][:1]
    names = (["before"] if "before" in evaluations else []) + of_step
    last = evaluations[names[-1]] if of_step else {}
    keys = [key for key, value in last.items() if isinstance(value, dict) and "low" in value]
    if not keys:
        return "These weights have no held-out score."
    lines = [f"| held-out score (95 % interval) | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {key} | {' | '.join(interval(evaluations[name].get(key)) for name in names)} |" for key in keys]
    checker = f"; `{last['checker']}` decides what is right" if last.get("checker") else ""
    return "\n".join([*lines, "", f"{last['problems']} held-out problems{checker}."])


def _loader(source: Source) -> str:
    """The transformers class that loads this model."""
    from kit.models.family import auto_class

    return str(auto_class(source.files.config).__name__)


def pinned(source: Source) -> str | None:
    """The revision of the base in the run's configuration; None if there is none or the export has another base."""
    return source.config.model.revision if source.lora and source.base == source.files.source else None


def _loading(source: Source, export_format: str, base: str, file: str | None) -> str:
    base_name, export_name = public_name(base) or "BASE_MODEL", "THIS_FOLDER_OR_REPOSITORY"
    if export_format in ("gguf", "ollama"):
        ollama = "ollama create NAME -f Modelfile && ollama run NAME"
        return f"```bash\n{ollama if export_format == 'ollama' else f'llama-cli -m {file}'}\n```"
    loader, kind = _loader(source), "Tokenizer" if source.files.processor is None else "Processor"
    code = [f"from transformers import {', '.join(sorted((loader, f'Auto{kind}')))}", ""]
    if export_format == "adapter":
        argument = f', revision="{revision}"' if (revision := pinned(source)) else ""
        code = ["from peft import PeftModel", *code, f'base = {loader}.from_pretrained("{base_name}"{argument})']
        code.append(f'model = PeftModel.from_pretrained(base, "{export_name}")')
    else:
        code.append(f'model = {loader}.from_pretrained("{export_name}")')
    code.append(f'{kind.lower()} = Auto{kind}.from_pretrained("{export_name}")')
    return "```python\n" + "\n".join(code) + "\n```"


def _training(source: Source) -> str:
    config = source.config
    lora, optimisation = config.model.lora, config.optimisation
    rows = {
        "data": _shown(config.data.source) if "/" in config.data.source else config.data.source,
        "reward": config.reward.preset or "the user's functions",
        "recipe": config.objective.recipe,
        "steps": f"{source.step} of {optimisation.steps}",
        "completions a step": f"{optimisation.batch_size} in groups of {config.generation.num_generations}",
        "learning rate": f"{optimisation.learning_rate}, {optimisation.schedule}",
        "LoRA": f"rank {lora.rank}, alpha {lora.alpha:g}, on {lora.targets}"
        if lora
        else "none; all weights were trained",
        **({"revision of the base": config.model.revision} if config.model.revision else {}),
        "base in 4 bits": "yes" if config.model.load_in_4bit else "no",
        "completion": f"at most {config.generation.max_completion_tokens} tokens, temperature {config.generation.temperature:g}",
        "seed": config.run.seed,
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())])
