"""The model card: README.md of every export, as the Hugging Face hub reads it."""

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

LIBRARIES = {
    "adapter": "peft",
    "merged-16bit": "transformers",
    "gguf": "gguf",
    "ollama": "gguf",
}
PICTURES = "AutoModelForImageTextToText"
PACKAGES = ("grpo-kit", "trl", "transformers", "peft", "torch")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def public_name(name: str) -> str | None:
    """A hub id as it is; None for folders of this machine, which mean nothing elsewhere."""
    return name if HUB_ID.fullmatch(name) and not Path(name).expanduser().exists() else None


def model_card(
    source: Source, what: str, base: str, file: str | None, quantization: str | None, limits: list[str]
) -> str:
    """The card as Markdown with YAML front matter. The license is left to whoever publishes it."""
    config, record = source.config, read_tree(source.run.env)
    data = public_name(config.data.source)
    pictures = file is None and _loader(source) == PICTURES  # a GGUF file holds the language model alone
    front: dict[str, Any] = {
        **({"base_model": name} if (name := public_name(base)) else {}),
        "library_name": LIBRARIES[what],
        "pipeline_tag": "image-text-to-text" if pictures else "text-generation",
        "tags": ["grpo", "reinforcement-learning", "trl", "grpo-kit", *(["lora"] if what == "adapter" else [])],
        **({"datasets": [data]} if data else {}),
    }
    kind = {
        "adapter": "LoRA adapter for",
        "merged-16bit": "Merged model made from",
        "gguf": f"GGUF file ({quantization}) made from",
        "ollama": f"GGUF file ({quantization}) and Modelfile made from",
    }[what]
    origin = f" {record['model_origin']}" if base == source.run_name and record.get("model_origin") else ""
    recipe, step = config.objective.recipe, source.step
    packages = record.get("packages", {})
    versions = [f"{name} {packages[name]}" for name in PACKAGES if name in packages]
    trained = f"\n\nTrained with {', '.join(versions)}." if versions else ""
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {source.run.id}\n\n{kind} {_shown(base)}, fine-tuned with GRPO ({recipe}); weights of step {step}.{origin}",
        f"## Scores\n{_scores(source)}",
        f"## How to load\n{_loading(source, what, base, file)}",
        f"## How it was trained\n{_training(source)}{trained}",
        "## Limits\n" + "\n".join(f"- {each}" for each in [*limits, *LIMITS]),
    ]
    return redact("\n\n".join(parts) + "\n")


LIMITS = (
    "The scores are of the task it was trained on; nothing is known of any other, and what it could do before may have suffered.",
    "A policy trained on a reward does what is rewarded, which is not always what was meant.",
    "No license is stated: the base model's and the data's terms apply. Set `license:` above before publishing.",
)


def _shown(name: str) -> str:
    return public_name(name) or (
        "the embedded model of grpo-kit" if name.startswith("embedded") else f"`{Path(name).name}`, a local model"
    )


def _scores(source: Source) -> str:
    evaluations = source.run.evaluations()
    own = [
        name for name in (f"step-{source.step:05d}", "after") if evaluations.get(name, {}).get("step") == source.step
    ][:1]
    names = (["before"] if "before" in evaluations else []) + own
    last = evaluations[names[-1]] if own else {}
    keys = [key for key, value in last.items() if isinstance(value, dict) and "low" in value]
    if not keys:
        return "No held-out score was taken of these weights."
    lines = [f"| held-out score (95 % interval) | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {key} | {' | '.join(interval(evaluations[name].get(key)) for name in names)} |" for key in keys]
    checker = f"; right is what `{last['checker']}` says" if last.get("checker") else ""
    return "\n".join([*lines, "", f"{last['problems']} held-out problems{checker}."])


def _loader(source: Source) -> str:
    """The transformers class that loads this model."""
    from kit.models.family import auto_class

    return str(auto_class(source.files.config).__name__)


def pinned(source: Source) -> str | None:
    """The revision of the base that the run names; None where none is named, or another base was taken."""
    return source.config.model.revision if source.lora and source.base == source.files.source else None


def _loading(source: Source, what: str, base: str, file: str | None) -> str:
    where, own = public_name(base) or "BASE_MODEL", "THIS_FOLDER_OR_REPOSITORY"
    if what in ("gguf", "ollama"):
        run = "ollama create NAME -f Modelfile && ollama run NAME" if what == "ollama" else f"llama-cli -m {file}"
        return f"```bash\n{run}\n```"
    loader, kind = _loader(source), "Tokenizer" if source.files.processor is None else "Processor"
    code = [f"from transformers import {', '.join(sorted((loader, f'Auto{kind}')))}", ""]
    if what == "adapter":
        named = f', revision="{revision}"' if (revision := pinned(source)) else ""
        code = ["from peft import PeftModel", *code, f'base = {loader}.from_pretrained("{where}"{named})']
        code.append(f'model = PeftModel.from_pretrained(base, "{own}")')
    else:
        code.append(f'model = {loader}.from_pretrained("{own}")')
    code.append(f'{kind.lower()} = Auto{kind}.from_pretrained("{own}")')
    return "```python\n" + "\n".join(code) + "\n```"


def _training(source: Source) -> str:
    config = source.config
    lora, best = config.model.lora, config.optimisation
    rows = {
        "data": _shown(config.data.source) if "/" in config.data.source else config.data.source,
        "reward": config.reward.preset or "functions of the user's",
        "recipe": config.objective.recipe,
        "steps": f"{source.step} of {best.steps}",
        "completions a step": f"{best.batch_size} in groups of {config.generation.num_generations}",
        "learning rate": f"{best.learning_rate}, {best.schedule}",
        "LoRA": f"rank {lora.rank}, alpha {lora.alpha:g}, on {lora.targets}" if lora else "none, all weights trained",
        **({"base's revision": config.model.revision} if config.model.revision else {}),
        "base in 4 bits": "yes" if config.model.load_in_4bit else "no",
        "completion": f"at most {config.generation.max_completion_tokens} tokens, temperature {config.generation.temperature:g}",
        "seed": config.run.seed,
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())])
