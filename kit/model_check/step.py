"""Short trials of a model in this process: scorer against plain logits, gradients through the objective, one GRPO step."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kit.models.family import FamilyAdapter

PROMPTS = (
    "Add 2 and 3.",
    "What is left when five apples out of nine are eaten?",
    "Say yes.",
    "How many legs have two cats?",
)
PADDING = 5
"""Tokens of padding that the shorter row of the canary gets."""


@dataclass(frozen=True)
class Scores:
    """Mean differences in nats a token, each to the model's own logits on rows alone and unpadded."""

    padded: float
    """Plain logits of a left-padded batch."""
    head: float
    """The scorer on rows alone: what the fused head leaves out of the logits shows here."""
    scorer: float
    """The scorer on the left-padded batch, as in training."""


def score_three_ways(model: Any, family: FamilyAdapter, vocab: int, tokens: int = 24) -> Scores:
    """Two rows of random ids, one shorter by `PADDING`, scored alone and in a batch. Puts TRL's head on the model."""
    fuse(model)
    generator, device = torch.Generator().manual_seed(1), model.device
    rows = [torch.randint(0, vocab, (1, size), generator=generator).to(device) for size in (tokens, tokens + PADDING)]
    batch = torch.cat([torch.nn.functional.pad(rows[0], (PADDING, 0)), rows[1]])
    mask = torch.ones_like(batch)
    mask[0, :PADDING] = 0
    seen = family.completed(model)
    with torch.no_grad():
        alone = [plain_logps(seen, row, torch.ones_like(row)) for row in rows]
        padded = plain_logps(seen, batch, mask)
        fused = [fused_logps(seen, row, torch.ones_like(row)) for row in rows]
        scored = fused_logps(seen, batch, mask)
    back = [padded[:1, PADDING:], padded[1:]], [scored[:1, PADDING:], scored[1:]]
    return Scores(_apart(back[0], alone), _apart(fused, alone), _apart(back[1], alone))


def fuse(model: Any) -> None:
    """TRL's fused head on `model`, over the kit's kernel; once."""
    from trl.trainer.utils import add_fused_lm_head

    from kit.scoring.trl_kernel import install_torch_logprob_kernel

    install_torch_logprob_kernel()
    if not getattr(model, "_kit_fused", False):
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        model._kit_fused = True


def plain_logps(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """(B, L-1) nats of the tokens after the first, from the model's own logits."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    logps: Tensor = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return logps


def fused_logps(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """(B, L-1) nats by the scorer; 0 on padding."""
    labels = ids.masked_fill(mask == 0, -100)
    scored: Tensor = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
    return scored.float()


def _apart(found: list[Tensor], expected: list[Tensor]) -> float:
    differences = torch.cat([(a - b).abs().flatten() for a, b in zip(found, expected, strict=True)])
    return float(differences.mean())


@dataclass(frozen=True)
class Step:
    """What one GRPO step did."""

    loss: float
    grad_norm: float
    moved: float
    """Largest change of a trained weight."""
    trained: int
    """Weights that train."""
    adapted: tuple[str, ...]
    """Kinds of linear layers that got an adapter."""
    completion_ids: tuple[tuple[int, ...], ...]
    scored: dict[str, Any]
    """The trainer's `packing_report`: how completions went through the model."""


def grpo_step(model: Any, processing_class: Any, peft_config: Any, rows: list[dict[str, Any]] | None = None) -> Step:
    """One step of `HookedGRPOTrainer` on 8 completions, all of the first-step checks on. Raises what training raises."""
    from datasets import Dataset, Features, Image, List, Value
    from trl import GRPOConfig

    from kit.trainer.trainer import make_trainer_class

    chat = bool(getattr(processing_class, "chat_template", None))
    if rows is None:
        rows = [{"prompt": [{"role": "user", "content": text}] if chat else text} for text in PROMPTS]
    data = Dataset.from_list(rows)
    if "images" in rows[0]:
        message = {"role": Value("string"), "content": Value("string")}
        data = Dataset.from_list(rows, features=Features({"prompt": List(message), "images": List(Image())}))
    seen: list[tuple[int, ...]] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.extend(tuple(ids) for ids in completion_ids)
        return [float(sum(ids) % 7) + index % 4 for index, ids in enumerate(completion_ids)]

    with _quietly(), tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder, max_steps=1, per_device_train_batch_size=8, num_generations=4, max_completion_length=8,
            learning_rate=1e-3, report_to="none", save_strategy="no", use_cpu=model.device.type == "cpu", bf16=False,
            disable_tqdm=True, logging_steps=1, seed=0, gradient_checkpointing=False, remove_unused_columns=False,
        )  # fmt: skip
        trainer = make_trainer_class()(
            model,
            reward,
            args,
            train_dataset=data,
            processing_class=processing_class,
            peft_config=peft_config,
            objective="dapo",
        )
        weights = [weight for weight in trainer.model.parameters() if weight.requires_grad]
        before = [weight.detach().clone() for weight in weights]
        trainer.train()
        after = trainer.state.log_history[0]
    moved = max(float((new.detach() - old).abs().max()) for new, old in zip(weights, before, strict=True))
    adapted = {
        name.partition(".lora_A")[0].rpartition(".")[2]
        for name, _ in trainer.model.named_parameters()
        if ".lora_A" in name
    }
    count = sum(weight.numel() for weight in weights)
    return Step(
        after["loss"], after["grad_norm"], moved, count, tuple(sorted(adapted)), tuple(seen), trainer.packing_report
    )


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keeps what libraries print from the card."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        disabled = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)
