"""The policy as it was trained, and what it answers: what every export is held against."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config import RunConfig, load_config
from kit.errors import ModelError, RunError
from kit.evaluation.results import weights_of

if TYPE_CHECKING:
    from kit.models.loading import ModelFiles
    from kit.runs.store import RunDir

BATCH = 8
"""Prompts generated after, or scored, at once."""
PROBES = (
    "The answer is 42.",
    "  two  spaces\n\nand lines\t",
    "naïve — ünïcödé 漢字 🙂",
    "<think>1 + 1</think>",
    "def f(x):\n    return x**2",
)
"""Texts on which two tokenizers are compared besides the prompts."""


@dataclass
class Answers:
    """What a model does with prompts: its own greedy completions, and how it scores given ones.

    `logps` and `choices` have an entry for each token of the scored completions: its log-probability (nats), and the token
    that the model would choose there.
    """

    greedy: list[list[int]] = field(default_factory=list)
    logps: list[list[float]] = field(default_factory=list)
    choices: list[list[int]] = field(default_factory=list)


@dataclass
class Source:
    """A run's policy at one step: where its weights lie, and what it stands on. Loaded by `load`."""

    run: RunDir
    config: RunConfig
    files: ModelFiles
    step: int
    weights: Path
    base: str
    """What the adapter is put on when it is merged: the model's 16-bit weights."""
    run_name: str = ""
    """The model as the run's configuration names it."""
    ends: list[int] | None = None
    """Every token that ends a completion, once that is known."""
    start: str = ""
    """With all weights trained: the model that training began with."""
    start_revision: str | None = None
    notes: list[str] = field(default_factory=list)
    """What there is to say of this export."""

    @property
    def lora(self) -> bool:
        """Whether an adapter was trained, not every weight."""
        return self.config.model.lora is not None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the run used, its chat template included."""
        return self.files.tokenizer

    def load(self) -> Any:
        """Base and adapter as they were trained, on the run's device. Raises `ModelError`."""
        return put_on(self.load_base(), self.weights) if self.lora else self.load_base()

    def load_base(self) -> Any:
        """The base as it was loaded for training; with all weights trained, these."""
        from kit.models.loading import load_model

        return load_model(self.files, self.config.model).model

    def load_start(self) -> Any:
        """With all weights trained: the model that training began with, loaded as the trained one is. Raises `ModelError`."""
        from kit.models.embedded import source_of
        from kit.models.loading import load_model

        files = replace(self.files, source=source_of(self.start), revision=self.start_revision)
        return load_model(files, self.config.model).model.eval()

    def note(self, text: str) -> None:
        """Keeps what is to be said, once."""
        if text not in self.notes:
            self.notes.append(text)

    def note_no_start(self, error: Exception) -> None:
        """Says that, and why, nothing can be held against what training began with."""
        begin = f"what training began with ({self.start}) cannot be had"
        if any(note.startswith(begin) for note in self.notes):
            return
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        self.note(
            f"{begin}, so the update is not known: neither its share in the export nor the effect of training was checked, only "
            f"the trained weights were; --base MODEL names it ({first})"
        )


def put_on(model: Any, adapter: Path) -> Any:
    """`model` with the adapter of a folder. Raises `ModelError` where they do not fit."""
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, str(adapter)).eval()
    except (RuntimeError, ValueError, OSError, KeyError) as error:
        raise ModelError(f"{adapter}: the adapter cannot be put on its base model ({error}).") from error


def find_weights(run: RunDir, which: str | None) -> tuple[int, Path, str | None]:
    """Step and folder of the weights to take, and a remark where they are not the run's result. Raises `RunError`.

    A run that is still under way has no result yet: its last whole checkpoint is taken.
    """
    from kit.runs.store import ALIVE

    state = run.status()["state"]
    if which is None and state in ALIVE:
        step, path = weights_of(run, "last")
        return (
            step,
            path,
            f"Run '{run.id}' is {state}: these are the weights of its last whole checkpoint, step {step}.",
        )
    step, path = weights_of(run, which)
    return step, path, None


def open_source(run: RunDir, which: str | None, base: str | None) -> tuple[Source, str | None]:
    """The run's policy, files found and nothing loaded, and what there is to remark. Raises `KitError`."""
    from kit.models.loading import find_model

    step, weights, note = find_weights(run, which)
    config = load_config(run.config)
    named = config.model.name
    # Unsloth's models are transformers' underneath, and its adapters PEFT's.
    config.model.backend = "transformers"
    if config.model.lora is None:
        config.model.name = str(weights)
    files = find_model(config.model, chat=config.data.chat)
    source = Source(run, config, files, step, weights, base or files.source, named)
    source.start, source.start_revision = base or named, None if base else config.model.revision
    quantised = getattr(files.config, "quantization_config", None) is not None
    if quantised and source.lora and base is None:
        raise ModelError(
            f"{named} holds quantised weights, and merging into those would round the update away. Name the 16-bit model that "
            "they were made of: --base ID_OR_FOLDER."
        )
    return source, note


def keep_weights(source: Source, place: Path) -> None:
    """Takes the trained files aside by hard links: a run that goes on removes old checkpoints meanwhile."""
    place.mkdir()
    for path in source.weights.iterdir():
        if path.suffix not in (".pt", ".pth", ".bin") and path.is_file():
            try:
                os.link(path, place / path.name)
            except FileNotFoundError:
                raise RunError(f"{source.weights} was removed by the run meanwhile. Try again.") from None
            except OSError:  # another file system, or one without links
                shutil.copyfile(path, place / path.name)
    source.weights = place
    if not source.lora:
        source.config.model.name = str(place)
        source.files = replace(source.files, source=str(place))


def choose_rows(rows: Sequence[dict[str, Any]], count: int, seed: int) -> list[dict[str, Any]]:
    """`count` rows at most, the same ones for the same seed, in the order of the data."""
    chosen = random.Random(seed).sample(range(len(rows)), min(count, len(rows)))
    return [rows[index] for index in sorted(chosen)]


def prompt_ids(tokenizer: Any, rows: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The ids that a model is given for each row: those of the row, else those of its rendered prompt."""
    from kit.generation.prompts import is_plain, render

    plain = is_plain([row["prompt"] for row in rows])
    found = []
    for row in rows:
        ids = row.get("prompt_ids")
        found.append(list(ids) if ids is not None else
                     tokenizer(render(tokenizer, row["prompt"]), add_special_tokens=plain)["input_ids"])  # fmt: skip
    return found


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends a completion, in order."""
    declared = model.generation_config.eos_token_id
    declared = [declared] if isinstance(declared, int) else list(declared or [])
    return sorted({tokenizer.eos_token_id, *declared} - {None})


def generate(model: Any, prompts: list[list[int]], ends: list[int], pad: int, longest: int) -> list[list[int]]:
    """Greedy completions of `longest` tokens at most, up to and with the token that ends them."""
    import torch
    from transformers import GenerationConfig

    how = GenerationConfig(
        do_sample=False, max_new_tokens=longest, eos_token_id=ends or None, pad_token_id=pad, disable_compile=True
    )
    results: list[list[int]] = []
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        width = max(map(len, batch))
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in batch], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch], device=model.device)
        with torch.inference_mode():
            output = model.generate(input_ids=ids, attention_mask=mask, generation_config=how)
        for row in output[:, width:].tolist():
            end = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
            results.append(row[: end + 1])
    return results


def score(model: Any, prompts: list[list[int]], completions: list[list[int]], pad: int) -> Answers:
    """Log-probabilities of given completions, and what the model would have chosen in place of each token."""
    import torch

    found = Answers()
    for start in range(0, len(prompts), BATCH):
        pairs = list(zip(prompts[start : start + BATCH], completions[start : start + BATCH], strict=True))
        width = max(len(prompt) + len(completion) for prompt, completion in pairs)
        rows = [prompt + completion for prompt, completion in pairs]
        # Padded on the right: a causal model's scores of what comes before do not depend on it.
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=model.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=model.device)
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=mask).logits  # (B, L, V)
        for index, (prompt, completion) in enumerate(pairs):
            own = logits[index, len(prompt) - 1 : len(prompt) + len(completion) - 1].float()  # (T, V)
            chosen = torch.tensor(completion, device=own.device).unsqueeze(1)
            found.logps.append(own.log_softmax(-1).gather(1, chosen).squeeze(1).tolist())
            found.choices.append(own.argmax(-1).tolist())
    return found
