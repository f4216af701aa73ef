"""What the processes of benchmarks/gpu_check.py do: a trainer, rollouts for it, and what is measured of each row.

`python benchmarks/gpu_arms.py REQUEST ANSWERS` works through the rows of REQUEST (JSON) and appends an answer a line to
ANSWERS. All rows of a process have one model, backend, precision and loss: ours puts its own head and attention under TRL for
the rest of a process. Weights and token ids are random, and every arm of a model has the same adapters and the same rollouts:
its first gradient is compared, number by number, with the one that the first arm of that model and work has left in the
folder.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import math
import random
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import random_models  # noqa: E402

from kit.models.backend import expand_segments  # noqa: E402

LIMITS = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}
"""Of the difference between a gradient and the one it is held against, relative to its norm: both round, in bfloat16 by a
percent or two."""
GPU_LOST = 75
"""What a process exits with whose GPU is of no use to it any more: rows that it has not answered are for another."""
LOSS_SCALE = 1024.0
"""Of float16. GradScaler begins at 65,536, and would overflow for as many steps as it takes to come down."""
PROBLEM = 48
"""Tokens of the longest of chain_sum's problems."""
SPREAD = 0.02
"""Standard deviation of the adapters' weights: a gradient reaches both factors."""


@dataclass(frozen=True)
class Work:
    """The rollouts of one optimiser step; completions of lognormal lengths, or (`sigma` 0) all of the same."""

    prompts: int
    group: int
    prompt: int
    completion: int  # mean
    longest: int
    sigma: float
    micro: int
    steps: int  # timed, behind a first one that is not

    def lengths(self, seed: int = 0) -> list[list[int]]:
        """Of the completions of each prompt."""
        draw, mu = random.Random(seed), math.log(self.completion) - self.sigma**2 / 2
        return [
            [max(2, min(self.longest, round(draw.lognormvariate(mu, self.sigma)))) for _ in range(self.group)]
            for _ in range(self.prompts)
        ]


WORKS = {
    "gsm8k": Work(4, 8, 200, 255, 512, 0.5, 16, 4),
    "reasoning": Work(2, 8, 300, 2000, 8192, 0.8, 16, 2),
    "long": Work(1, 8, 500, 20000, 20000, 0.0, 8, 1),
    "ragged": Work(4, 4, 48, 40, 96, 0.6, 8, 1),
    "smoke": Work(2, 4, 12, 8, 16, 0.5, 4, 1),
}


@dataclass(frozen=True)
class Row:
    """A line of the result: what is done, and with what."""

    stage: int
    kind: str  # doctor, quickstart, train, plan: by grpo-kit; update, generate, attention, head: here
    work: str = "gsm8k"
    model: str = ""
    backend: str = "transformers"
    loss: str = "ours"  # or the backend's own
    bits: int = 16  # of a frozen weight: 4 or 16
    dtype: str = "bfloat16"  # of the computation
    more: dict[str, Any] = field(default_factory=dict)  # what differs from a run's defaults
    limit: float = 100.0  # seconds, the start of its process included
    counts: bool = False  # FLOPs and kernels, too

    @property
    def key(self) -> str:
        whose = {"ours": "ours", "own": "Unsloth's own" if self.backend == "unsloth" else "TRL's own"}[self.loss]
        arm = [self.model, f"{self.bits}-bit", self.backend, *(["float32"] if self.dtype == "float32" else [])]
        named = {
            "doctor": [],
            "quickstart": [],
            "head": [],
            "attention": [self.work],
            "update": [*arm, whose, self.work],
        }
        differs = [f"{name}={value}" for name, value in self.more.items()]
        return f"{self.stage} {self.kind} {', '.join([*named.get(self.kind, [*arm, self.work]), *differs])}".strip()

    @property
    def process(self) -> tuple[str, ...]:
        """Rows of which this is the same can share one."""
        return self.backend, self.dtype, self.loss, self.model


def configuration(row: Row, model: Path, folder: Path, longest: tuple[int, int]) -> dict[str, Any]:
    """The run that `grpo-kit train` would make of this row. longest: prompt and completion, in tokens."""
    work, more = WORKS[row.work], dict(row.more)
    engine = more.pop("engine", "hf")
    vllm = {name: more.pop(name) for name in ("eager", "standby") if name in more}
    for switch in ("kernel", "fused", "way"):
        more.pop(switch, None)
    return {
        "model": {
            "name": str(model),
            "backend": row.backend,
            "load_in_4bit": row.bits == 4,
            "dtype": row.dtype,
            "lora": {"rank": 16, "alpha": 16.0},
        },
        "data": {
            "source": "reasoning-gym:chain_sum", "limit": 64, "heldout": 8, "chat": False,
            "max_prompt_tokens": max(longest[0], PROBLEM),
        },
        "reward": {"functions": [{"path": f"{Path(random_models.__file__).resolve()}:position_weighted_ids"}]},
        "objective": {"recipe": "dapo"},
        "generation": {
            "engine": engine, "vllm": {"gpu_memory_utilization": 0.3} | vllm,
            "num_generations": work.group, "max_completion_tokens": longest[1],
        },
        "optimisation": {
            "steps": 4, "batch_size": work.prompts * work.group, "micro_batch_size": work.micro,
            # Where an engine samples, so high that weights which were not handed over are seen in a few steps.
            "learning_rate": 1e-5 if engine == "hf" else 5e-3,
        } | more,
        "evaluation": {"before": False, "prompts": 8, "k": 1},
        "run": {"root": str(folder / "runs"), "save_every": 2},
    }  # fmt: skip


def rollout(work: Work, vocabulary: int, pad: int) -> list[dict[str, Any]]:
    """Micro-batches as TRL makes them: rows shuffled, prompts (of several lengths) padded in front, completions behind."""
    import torch

    draw = random.Random(1)
    made: list[tuple[list[int], list[int], float]] = []
    for number, lengths in enumerate(work.lengths()):
        prompt = [draw.randrange(8, min(vocabulary, 500)) for _ in range(work.prompt - 3 * number)]
        made += [
            (prompt, [draw.randrange(8, min(vocabulary, 500)) for _ in range(n)], draw.gauss(0, 1)) for n in lengths
        ]
    draw.shuffle(made)
    width, length = max(len(prompt) for prompt, _, _ in made), max(len(ids) for _, ids, _ in made)
    mask = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for _, ids, _ in made])
    whole = {
        "prompt_ids": torch.tensor([[pad] * (width - len(p)) + p for p, _, _ in made]),
        "prompt_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _, _ in made]),
        "completion_ids": torch.tensor([ids + [pad] * (length - len(ids)) for _, ids, _ in made]),
        "completion_mask": mask,
        "advantages": torch.tensor([advantage for *_, advantage in made]),
    }
    starts = range(0, len(made), work.micro)
    return [
        {name: value[start : start + work.micro] for name, value in whole.items()}
        | {"num_items_in_batch": mask.sum().float()}
        for start in starts
    ]


class Bench:
    """A model and the trainer of an arm."""

    def __init__(self, row: Row, model: Path, folder: Path, longest: tuple[int, int]) -> None:
        import torch
        from datasets import Dataset

        from kit.config import load_config
        from kit.models.loading import find_model, keep_trainable_in_float32, load_model
        from kit.models.unsloth import loading
        from kit.trainer.arguments import changes, grpo_config

        self.folder = folder
        config = load_config(configuration(row, model, folder, longest))
        self.files = find_model(config.model, chat=False)
        torch.manual_seed(0)
        loaded = load_model(self.files, config.model, loading(config, self.files.backend, self.files.context))
        from trl import GRPOTrainer

        args = grpo_config(config, loaded.backend, folder / "trainer", [1.0])
        settings = config.optimisation
        ours = {"objective": "dapo", "packing": settings.packing, "share_prompts": settings.share_prompts}
        ours |= {
            "skip_flat_groups": settings.skip_flat_groups,
            "token_budget": settings.token_budget,
            "fast_decoding": True,
        }
        self.trainer = trainer_class(row.loss, on_gpu=loaded.backend.device == "cuda")(
            loaded.model,
            random_models.position_weighted_ids,
            args,
            train_dataset=Dataset.from_dict({"prompt": ["1 + 2 ="] * 64}),
            processing_class=loaded.tokenizer,
            peft_config=loaded.peft_config,
            **(ours if row.loss == "ours" else {}),
        )
        self.changed = changes(args, self.trainer.args)
        self.base = GRPOTrainer.__name__
        keep_trainable_in_float32(self.trainer.model)
        named = self.trainer.model.named_parameters()
        self.weights = {name.replace("base_model.model.", ""): one for name, one in named if one.requires_grad}
        draw = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name in sorted(self.weights):
                self.weights[name].copy_(SPREAD * torch.randn(self.weights[name].shape, generator=draw))
        recompute_activations(self.trainer, row.backend)
        if hasattr(self.trainer.model, "for_training"):
            self.trainer.model.for_training()
        self.trainer.model.train()
        accelerator = self.trainer.accelerator
        self.model = accelerator.prepare_model(
            self.trainer.model
        )  # as `Trainer.train()` does: autocast is in its forward
        if accelerator.scaler is not None:
            accelerator.scaler.scale(torch.zeros((), device=accelerator.device))  # makes it
            accelerator.scaler.update(LOSS_SCALE)
        self.on_gpu = accelerator.device.type == "cuda"

    def batches(self, work: Work) -> list[dict[str, Any]]:
        """The rollouts of a step on the device, and the trainer told how many micro-batches they are."""
        from kit.trainer.policy_loss import grouped_by_prompt

        trainer, device = self.trainer, self.trainer.accelerator.device
        made = rollout(work, self.files.config.vocab_size, self.files.tokenizer.pad_token_id)
        trainer.args.steps_per_generation = trainer.args.gradient_accumulation_steps = len(made)
        trainer.current_gradient_accumulation_steps = len(made)
        if getattr(trainer, "objective", None) is not None and trainer.shares_prompts:
            made = grouped_by_prompt(made)
        return [{name: value.to(device) for name, value in one.items()} for one in made]

    def step(self, batches: list[dict[str, Any]]) -> float:
        """Loss and backward pass of every micro-batch; seconds. The gradient is left in the weights."""
        self.trainer.model.zero_grad()
        self.wait()
        started = time.perf_counter()
        for batch in batches:
            self.trainer._prepare_inputs = lambda _, batch=batch: dict(batch)  # in the place of a rollout
            self.trainer.training_step(self.model, {}, None)
        self.wait()
        return time.perf_counter() - started

    def gradient(self) -> dict[str, Any]:
        scaler = self.trainer.accelerator.scaler
        scale = scaler.get_scale() if scaler is not None else 1.0
        return {
            name: weight.grad.float().div(scale).cpu()
            for name, weight in self.weights.items()
            if weight.grad is not None
        }

    def wait(self) -> None:
        import torch

        if self.on_gpu:
            torch.cuda.synchronize()


def trainer_class(loss: str, *, on_gpu: bool) -> Any:
    """Ours, or the one that TRL or Unsloth has, which is left as it is; TRL's head needs a GPU, and gets ours without one."""
    from trl import GRPOTrainer

    if loss == "ours" or not on_gpu:
        from kit.scoring.head import install_torch_logprob_kernel

        install_torch_logprob_kernel()
    if loss != "ours":
        return GRPOTrainer
    from kit.trainer.trainer import HookedGRPOTrainer

    return HookedGRPOTrainer


def recompute_activations(trainer: Any, backend: str) -> None:
    """What `Trainer.train()` does before its first step, and a loop of our own would leave out.

    Unsloth recomputes from the moment it puts the adapters on.
    """
    if backend == "transformers" and trainer.args.gradient_checkpointing:
        keywords = dict(trainer.args.gradient_checkpointing_kwargs or {})
        trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=keywords)


def update(bench: Bench, row: Row) -> dict[str, Any]:
    """Gradient, seconds, and memory of optimiser steps on the same rollouts; the first step, which compiles, aside."""
    import torch
    from gpu_kernels import compared

    trainer, work = bench.trainer, WORKS[row.work]
    batches = bench.batches(work)
    found: dict[str, Any] = {"trainer": bench.base, "changed": bench.changed}
    if row.backend == "unsloth":  # which differs by what is installed beside it
        with suppress(ImportError):  # as other versions may name it otherwise
            from unsloth.utils.attention_dispatch import select_attention_backend

            found["attention"] = select_attention_backend(use_varlen=True)
    if row.loss == "ours" and row.stage == 2:
        found["nats_off_plain_logits"] = nats_off(trainer, batches[0])
    memory = torch.cuda if bench.on_gpu else None
    if memory is not None:
        memory.reset_peak_memory_stats()
    forwarded: list[int] = []
    embeddings = trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings()
    precisions: set[str] = set()

    def seen(_: Any, given: Any) -> None:
        kind = given[0].device.type
        forwarded.append(given[0].numel())
        precisions.add(str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "none")

    handle = embeddings.register_forward_pre_hook(seen)
    found["first_seconds"] = bench.step(batches)
    handle.remove()
    gradient = bench.gradient()
    found["autocast"] = sorted(precisions)
    place = bench.folder / f"{row.model}-{row.bits}-{row.work}.gradient"
    first = place.with_suffix(".of")
    if not (place.is_file() and first.is_file()) or first.read_text() == row.key:  # done again: so is what it has left
        place.unlink(missing_ok=True)
        first.write_text(row.key)
    found |= compared(gradient, place) | {"held_against": first.read_text()}
    found["without_gradient"] = len(bench.weights) - len(gradient)
    if memory is not None:
        found |= {"first_peak_bytes": memory.max_memory_allocated(), "held_bytes": memory.memory_allocated()}
        memory.reset_peak_memory_stats()
    seconds = [bench.step(batches) for _ in range(work.steps)]
    tokens = sum(int(batch["completion_mask"].sum()) for batch in batches)
    found |= {
        "seconds": statistics.median(seconds),
        "tokens_per_second": tokens / statistics.median(seconds),
        "completion_tokens": tokens,
        "forwarded_tokens": sum(forwarded),
    }
    if memory is not None:
        found |= {"peak_bytes": memory.max_memory_allocated(), "reserved_bytes": memory.max_memory_reserved()}
    if row.loss == "ours":
        found |= {"packing": trainer.packing_report, "savings": trainer.savings_report}
    if row.counts:
        try:
            found |= counted(bench, batches)
        except Exception as error:  # what was measured stands without it
            found["not_counted"] = f"{type(error).__name__}: {error}"[:500]
    trainer.model.zero_grad()
    return found


def nats_off(trainer: Any, batch: dict[str, Any]) -> float:
    """Mean difference between one unpadded row through plain logits and the scorer on the padded batch."""
    from kit.trainer.policy_loss import MicroBatch
    from kit.trainer.sanity_checks import scoring_error

    return scoring_error(trainer.services, trainer.model, MicroBatch(batch))


def counted(bench: Bench, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """FLOPs of a step (matrix products and attention that torch knows), and on a GPU what its kernels take."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.flop_counter import FlopCounterMode

    def product(_: Any, a: Any, b: Any, *__: Any, **___: Any) -> int:
        """Of shapes. torch's formula for `addmm` does not take the overload with a precision of its own, which the head calls."""
        return 2 * int(a[0]) * int(a[1]) * int(b[1])

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm: product}) as flops:
        bench.step(batches)
    found: dict[str, Any] = {"tflop": flops.get_total_flops() / 1e12}
    if not bench.on_gpu:
        return found
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            seconds = bench.step(batches)
    except (AssertionError, RuntimeError) as error:  # where torch cannot reach CUPTI
        return found | {"not_profiled": f"{type(error).__name__}: {error}"[:500]}
    kernels = [one for one in seen.key_averages() if one.device_type == DeviceType.CUDA and one.self_device_time_total]
    kernels.sort(key=lambda one: -one.self_device_time_total)
    return found | {
        "kernels": sum(one.count for one in kernels),
        "busy": sum(one.self_device_time_total for one in kernels) / 1e6 / seconds,
        "most": {one.key[:80]: [one.count, round(one.self_device_time_total / 1e3, 2)] for one in kernels[:12]},
    }


def generate(bench: Bench, row: Row) -> dict[str, Any]:
    """Completion tokens a second of the trainer's own generation. Random weights end no completion."""
    import torch

    trainer, work = bench.trainer, WORKS[row.work]
    batches = bench.batches(work)
    prompts = [
        ids[mask.bool()].tolist()
        for batch in batches
        for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    ]
    prompts.sort()  # completions of a prompt lie behind one another, as in a rollout
    seconds = []
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        bench.wait()
        started = time.perf_counter()
        made = trainer._generate_single_turn(prompts, None, {}, work.group)[0]
        bench.wait()
        seconds.append(time.perf_counter() - started)
    tokens = sum(map(len, made))
    found = {"first_seconds": seconds[0], "seconds": seconds[1], "completion_tokens": tokens}
    if bench.on_gpu:
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found | {"tokens_per_second": tokens / seconds[1]}


# --- a process --------------------------------------------------------------------------------------------------------


@contextmanager
def differing(row: Row, trainer: Any = None) -> Iterator[None]:
    """What a row asks for that is no setting of a run: one `kernel` of packed attention alone, or no `fused` operations."""
    from kit.scoring import packing

    kept, name = dict(packing.KERNELS), row.more.get("kernel", row.more.get("way"))
    if name in ("groups", *kept):  # `groups` is none of them
        for other in kept.keys() - {name}:
            del packing.KERNELS[other]
    packing._kernel.cache_clear()
    if hasattr(trainer, "scorer"):  # TRL's own trainer has none
        trainer.scorer.fuses = trainer.scorer.fuses and row.more.get("fused", True)
    try:
        yield
    finally:
        packing.KERNELS.clear()  # their order counts
        packing.KERNELS.update(kept)
        packing._kernel.cache_clear()


class Desk:
    """Answers row after row. A model is loaded anew for every arm."""

    def __init__(self, rows: list[Row], folder: Path) -> None:
        self.folder = folder
        self.longest = max(WORKS[row.work].prompt for row in rows), max(WORKS[row.work].longest for row in rows)
        self.arm: Any = None
        self.bench: Bench | None = None

    def answer(self, row: Row) -> dict[str, Any]:
        if row.kind in ("attention", "head"):
            import gpu_kernels

            work, way = WORKS[row.work], row.more["way"]
            with differing(row):
                if row.kind == "head":
                    return gpu_kernels.head(way, self.folder / "head.values")
                return gpu_kernels.attention(way, work.prompt, work.lengths, self.folder / f"{row.work}.attention")
        bench = self._bench(row)
        with differing(row, bench.trainer):
            return update(bench, row) if row.kind == "update" else generate(bench, row)

    def _bench(self, row: Row) -> Bench:
        import torch

        arm = (row.model, row.bits, row.loss, row.more)
        if self.bench is None or arm != self.arm:
            self.bench = None  # its memory first
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.bench, self.arm = Bench(row, self.folder / row.model, self.folder, self.longest), arm
        return self.bench


def say_where_it_hangs(row: Row) -> None:
    """The stack goes to the log a moment before this process is ended."""
    faulthandler.dump_traceback_later(max(1.0, 0.9 * row.limit))


def answers(rows: list[Row], folder: Path) -> Iterator[dict[str, Any]]:
    """An answer a row, in order; fewer where the GPU is lost to this process."""
    from kit.config import load_config
    from kit.models.backend import activate_backend, choose_backend
    from kit.models.failures import is_out_of_memory

    desk = Desk(rows, folder)
    anywhere = load_config(configuration(rows[0], folder, folder, desk.longest))
    with activate_backend(choose_backend(anywhere.model)):
        for row in rows:
            say_where_it_hangs(row)
            try:
                yield desk.answer(row)
            except Exception as error:
                desk.bench = None
                told = {"error": "".join(traceback.format_exception(error))[-2000:]}
                yield told | ({"out_of_memory": True} if is_out_of_memory(error) else {})
                if "CUDA error" in str(error):
                    return
            finally:
                faulthandler.cancel_dump_traceback_later()


def main() -> None:
    request, place = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    rows = [Row(**row) for row in request["rows"]]
    say_where_it_hangs(rows[0])  # imports may, too
    expand_segments()
    count = 0
    with place.open("a") as file:
        for answer in answers(rows, Path(request["folder"])):
            file.write(json.dumps(answer, default=str) + "\n")
            file.flush()
            count += 1
    sys.exit(0 if count == len(rows) else GPU_LOST)


if __name__ == "__main__":
    main()
