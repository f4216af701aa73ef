"""The worker processes of benchmarks/gpu_check.py: build a trainer, make rollouts for it and measure each row.

`python benchmarks/gpu_arms.py REQUEST ANSWERS` runs the rows of REQUEST (JSON) and appends one JSON line for each row to
ANSWERS. All rows of a process have the same model, backend, precision and loss, because the kit's trainer replaces TRL's head
and attention for the rest of a process. Weights and token ids are random. All arms of a model have the same adapters and the
same rollouts; the first gradient of an arm is compared with the gradient that the first arm of that model and work saved in
the folder.
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
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import random_models  # noqa: E402

from kit.models.backend import expand_segments  # noqa: E402

LIMITS = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}
"""Largest relative difference between two gradients that rounding explains: in bfloat16 each is off by a percent or two."""
GPU_LOST = 75
"""Exit code of a process with a dead CUDA context. A new process runs the rows that it did not answer."""
LOSS_SCALE = 1024.0
"""Loss scale of float16. GradScaler starts at 65,536 and would overflow in the first steps."""
PROBLEM = 48
"""Tokens of the longest of chain_sum's problems."""
SPREAD = 0.02
"""Standard deviation of the adapters' weights. It is not 0, so that both factors get a gradient."""


@dataclass(frozen=True)
class Work:
    """The rollouts of one optimiser step. Completion lengths are lognormal, or equal if `sigma` is 0."""

    prompts: int
    group: int
    prompt: int
    completion: int  # mean
    longest: int
    sigma: float
    micro: int
    steps: int  # timed steps, after one that is not timed

    def lengths(self, seed: int = 0) -> list[list[int]]:
        """Lengths of the completions of each prompt."""
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
    """One row of the result table: the task and its settings."""

    stage: int
    kind: str  # doctor, quickstart, train, plan: by grpo-kit; update, generate, attention, head: here
    work: str = "gsm8k"
    model: str = ""
    backend: str = "transformers"
    loss: str = "ours"  # the kit's; own: that of the backend
    bits: int = 16  # bits of a frozen weight: 4 or 16
    dtype: str = "bfloat16"  # dtype of the computation
    options: dict[str, Any] = field(default_factory=dict)  # changes from a run's defaults
    limit: float = 100.0  # seconds, including the start of its process
    counts: bool = False  # also count FLOPs and kernels

    @property
    def key(self) -> str:
        trainer = {"ours": "ours", "own": "Unsloth's own" if self.backend == "unsloth" else "TRL's own"}[self.loss]
        arm = [self.model, f"{self.bits}-bit", self.backend, *(["float32"] if self.dtype == "float32" else [])]
        settings = {"doctor": [], "quickstart": [], "head": [], "attention": [self.work]}
        settings["update"] = [*arm, trainer, self.work]
        options = [f"{name}={value}" for name, value in self.options.items()]
        return f"{self.stage} {self.kind} {', '.join([*settings.get(self.kind, [*arm, self.work]), *options])}".strip()

    @property
    def process(self) -> tuple[str, ...]:
        """Rows with equal values can share a process."""
        return self.backend, self.dtype, self.loss, self.model


def configuration(row: Row, model: Path, folder: Path, longest: tuple[int, int]) -> dict[str, Any]:
    """The configuration of this row as a run of `grpo-kit train`. `longest` is the longest prompt and completion, in tokens."""
    work, options = WORKS[row.work], dict(row.options)
    engine = options.pop("engine", "hf")
    vllm = {name: options.pop(name) for name in ("eager", "standby") if name in options}
    for switch in ("kernel", "fused", "arm"):
        options.pop(switch, None)
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
            # With an engine, high enough that weights which do not reach the engine show within a few steps.
            "learning_rate": 1e-5 if engine == "hf" else 5e-3,
        } | options,
        "evaluation": {"before": False, "prompts": 8, "k": 1},
        "run": {"root": str(folder / "runs"), "save_every": 2},
    }  # fmt: skip


def rollout(work: Work, vocabulary: int, pad: int) -> list[dict[str, Any]]:
    """Micro-batches in TRL's layout: shuffled rows, prompts of several lengths padded on the left, completions on the right."""
    import torch

    draw = random.Random(1)
    samples: list[tuple[list[int], list[int], float]] = []
    for number, lengths in enumerate(work.lengths()):
        prompt = [draw.randrange(8, min(vocabulary, 500)) for _ in range(work.prompt - 3 * number)]
        samples += [
            (prompt, [draw.randrange(8, min(vocabulary, 500)) for _ in range(n)], draw.gauss(0, 1)) for n in lengths
        ]
    draw.shuffle(samples)
    width, length = max(len(prompt) for prompt, _, _ in samples), max(len(ids) for _, ids, _ in samples)
    mask = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for _, ids, _ in samples])
    batch = {
        "prompt_ids": torch.tensor([[pad] * (width - len(p)) + p for p, _, _ in samples]),
        "prompt_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _, _ in samples]),
        "completion_ids": torch.tensor([ids + [pad] * (length - len(ids)) for _, ids, _ in samples]),
        "completion_mask": mask,
        "advantages": torch.tensor([advantage for *_, advantage in samples]),
    }
    starts = range(0, len(samples), work.micro)
    return [
        {name: value[start : start + work.micro] for name, value in batch.items()}
        | {"num_items_in_batch": mask.sum().float()}
        for start in starts
    ]


class Bench:
    """The model and the trainer of one arm."""

    def __init__(self, row: Row, model: Path, folder: Path, longest: tuple[int, int]) -> None:
        import torch
        from datasets import Dataset

        from kit.config import load_config
        from kit.models.loading import find_model, keep_trainable_in_float32, load_model
        from kit.models.unsloth import loading
        from kit.objective import Objective
        from kit.trainer.arguments import changes, grpo_config

        self.folder = folder
        config = load_config(configuration(row, model, folder, longest))
        self.files = find_model(config.model, chat=False)
        parts: Any = SimpleNamespace(config=config, files=self.files, objective=Objective.from_spec("dapo"))
        token_budget = None
        if row.loss == "ours":
            from kit.runner.build import chosen_sizes  # imports the kit's trainer, which replaces TRL's head

            token_budget, *_ = chosen_sizes(parts, None)  # for the free memory, as in a run
        torch.manual_seed(0)
        loaded = load_model(self.files, config.model, loading(config, self.files.backend, self.files.context))
        from trl import GRPOTrainer

        args = grpo_config(config, loaded.backend, folder / "trainer", [1.0])
        settings = config.optimisation
        switches = ("packing", "share_prompts", "skip_flat_groups")
        own_arguments = {name: getattr(settings, name) for name in switches} | {
            "objective": "dapo",
            "fast_decoding": True,
            "token_budget": token_budget,
        }
        self.trainer = trainer_class(row.loss, on_gpu=loaded.backend.device == "cuda")(
            loaded.model,
            random_models.position_weighted_ids,
            args,
            train_dataset=Dataset.from_dict({"prompt": ["1 + 2 ="] * 64}),
            processing_class=loaded.tokenizer,
            peft_config=loaded.peft_config,
            **(own_arguments if row.loss == "ours" else {}),
        )
        self.changed = changes(args, self.trainer.args)
        self.base = GRPOTrainer.__name__
        keep_trainable_in_float32(self.trainer.model)
        parameters = self.trainer.model.named_parameters()
        self.weights = {name.replace("base_model.model.", ""): p for name, p in parameters if p.requires_grad}
        draw = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name in sorted(self.weights):
                self.weights[name].copy_(SPREAD * torch.randn(self.weights[name].shape, generator=draw))
        recompute_activations(self.trainer, row.backend)
        if hasattr(self.trainer.model, "for_training"):
            self.trainer.model.for_training()
        self.trainer.model.train()
        accelerator = self.trainer.accelerator
        # As in `Trainer.train()`: its forward has the autocast.
        self.model = accelerator.prepare_model(self.trainer.model)
        if accelerator.scaler is not None:
            accelerator.scaler.scale(torch.zeros((), device=accelerator.device))  # creates the scale
            accelerator.scaler.update(LOSS_SCALE)
        self.on_gpu = accelerator.device.type == "cuda"

    def batches(self, work: Work) -> list[dict[str, Any]]:
        """Put the rollouts of a step on the device, and set the trainer's number of micro-batches."""
        from kit.trainer.policy_loss import grouped_by_prompt

        trainer, device = self.trainer, self.trainer.accelerator.device
        batches = rollout(work, self.files.config.vocab_size, self.files.tokenizer.pad_token_id)
        trainer.args.steps_per_generation = trainer.args.gradient_accumulation_steps = len(batches)
        trainer.current_gradient_accumulation_steps = len(batches)
        if getattr(trainer, "objective", None) is not None and trainer.shares_prompts:
            batches = grouped_by_prompt(batches)
        return [{name: value.to(device) for name, value in batch.items()} for batch in batches]

    def step(self, batches: list[dict[str, Any]]) -> float:
        """Run loss and backward pass of every micro-batch and return the seconds. The gradient stays in the weights."""
        self.trainer.model.zero_grad()
        self.wait()
        started = time.perf_counter()
        for batch in batches:
            self.trainer._prepare_inputs = lambda _, batch=batch: dict(batch)  # instead of a rollout
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
    """The kit's trainer class, or that of TRL or Unsloth. On a CPU all use the kit's head, because TRL's needs a GPU."""
    from trl import GRPOTrainer

    if loss == "ours" or not on_gpu:
        from kit.scoring.head import install_torch_logprob_kernel

        install_torch_logprob_kernel()
    if loss != "ours":
        return GRPOTrainer
    from kit.trainer.trainer import HookedGRPOTrainer

    return HookedGRPOTrainer


def recompute_activations(trainer: Any, backend: str) -> None:
    """Enable gradient checkpointing, as `Trainer.train()` does before its first step.

    Unsloth enables its own when it adds the adapters.
    """
    if backend == "transformers" and trainer.args.gradient_checkpointing:
        keywords = dict(trainer.args.gradient_checkpointing_kwargs or {})
        trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=keywords)


def update(bench: Bench, row: Row) -> dict[str, Any]:
    """Measure gradient, seconds and memory of steps on the same rollouts. The first step, which compiles, is separate."""
    import torch
    from gpu_kernels import compare_gradients

    trainer, work = bench.trainer, WORKS[row.work]
    batches = bench.batches(work)
    result: dict[str, Any] = {"trainer": bench.base, "changed": bench.changed}
    if row.backend == "unsloth":  # its attention depends on the installed packages
        with suppress(ImportError):  # other versions may have another name for it
            from unsloth.utils.attention_dispatch import select_attention_backend

            result["attention"] = select_attention_backend(use_varlen=True)
    if row.loss == "ours" and row.stage == 2:
        result["nats_off_plain_logits"] = nats_off(trainer, batches[0])
    memory = torch.cuda if bench.on_gpu else None
    if memory is not None:
        memory.reset_peak_memory_stats()
    forwarded: list[int] = []
    embeddings = trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings()
    precisions: set[str] = set()

    def record(_: Any, args: Any) -> None:
        kind = args[0].device.type
        forwarded.append(args[0].numel())
        precisions.add(str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "none")

    handle = embeddings.register_forward_pre_hook(record)
    result["first_seconds"] = bench.step(batches)
    handle.remove()
    gradient = bench.gradient()
    result["autocast"] = sorted(precisions)
    reference = bench.folder / f"{row.model}-{row.bits}-{row.work}.gradient"
    owner = reference.with_suffix(".of")
    if not (reference.is_file() and owner.is_file()) or owner.read_text() == row.key:  # a repeated row writes it again
        reference.unlink(missing_ok=True)
        owner.write_text(row.key)
    result |= compare_gradients(gradient, reference) | {"reference": owner.read_text()}
    result["without_gradient"] = len(bench.weights) - len(gradient)
    if memory is not None:
        result |= {"first_peak_bytes": memory.max_memory_allocated(), "held_bytes": memory.memory_allocated()}
        memory.reset_peak_memory_stats()
    seconds = [bench.step(batches) for _ in range(work.steps)]
    tokens = sum(int(batch["completion_mask"].sum()) for batch in batches)
    result |= {
        "seconds": statistics.median(seconds),
        "tokens_per_second": tokens / statistics.median(seconds),
        "completion_tokens": tokens,
        "forwarded_tokens": sum(forwarded),
    }
    if memory is not None:
        result |= {"peak_bytes": memory.max_memory_allocated(), "reserved_bytes": memory.max_memory_reserved()}
    if row.loss == "ours":
        result |= {"packing": trainer.packing_report, "savings": trainer.savings_report}
    if row.counts:
        try:
            result |= count_step(bench, batches)
        except Exception as error:  # the measurements above remain valid
            result["not_counted"] = f"{type(error).__name__}: {error}"[:500]
    trainer.model.zero_grad()
    return result


def nats_off(trainer: Any, batch: dict[str, Any]) -> float:
    """Mean difference in nats between the scorer on the padded batch and plain logits of one unpadded row."""
    from kit.trainer.policy_loss import MicroBatch
    from kit.trainer.sanity_checks import scoring_error

    return scoring_error(trainer.services, trainer.model, MicroBatch(batch))


def count_step(bench: Bench, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the FLOPs of a step (matrix products and attention that torch knows); on a GPU also profile its kernels."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.flop_counter import FlopCounterMode

    def product(_: Any, a: Any, b: Any, *__: Any, **___: Any) -> int:
        """FLOPs from shapes. torch's formula for `addmm` does not take the overload with an output dtype that the head calls."""
        return 2 * int(a[0]) * int(a[1]) * int(b[1])

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm: product}) as flops:
        bench.step(batches)
    result: dict[str, Any] = {"tflop": flops.get_total_flops() / 1e12}
    if not bench.on_gpu:
        return result
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            seconds = bench.step(batches)
    except (AssertionError, RuntimeError) as error:  # torch cannot load CUPTI
        return result | {"not_profiled": f"{type(error).__name__}: {error}"[:500]}
    kernels = [k for k in profiler.key_averages() if k.device_type == DeviceType.CUDA and k.self_device_time_total]
    kernels.sort(key=lambda kernel: -kernel.self_device_time_total)
    return result | {
        "kernels": sum(kernel.count for kernel in kernels),
        "busy": sum(kernel.self_device_time_total for kernel in kernels) / 1e6 / seconds,
        "most": {
            kernel.key[:80]: [kernel.count, round(kernel.self_device_time_total / 1e3, 2)] for kernel in kernels[:12]
        },
    }


def generate(bench: Bench, row: Row) -> dict[str, Any]:
    """Measure completion tokens a second of the trainer's generation. With random weights no completion ends early."""
    import torch

    trainer, work = bench.trainer, WORKS[row.work]
    batches = bench.batches(work)
    prompts = [
        ids[mask.bool()].tolist()
        for batch in batches
        for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    ]
    prompts.sort()  # completions of a prompt are adjacent, as in a rollout
    seconds = []
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        bench.wait()
        started = time.perf_counter()
        completions = trainer._generate_single_turn(prompts, None, {}, work.group)[0]
        bench.wait()
        seconds.append(time.perf_counter() - started)
    tokens = sum(map(len, completions))
    result = {"first_seconds": seconds[0], "seconds": seconds[1], "completion_tokens": tokens}
    if bench.on_gpu:
        result["peak_bytes"] = torch.cuda.max_memory_allocated()
    return result | {"tokens_per_second": tokens / seconds[1]}


# --- a process --------------------------------------------------------------------------------------------------------


@contextmanager
def apply_switches(row: Row, trainer: Any = None) -> Iterator[None]:
    """Apply the options that are no settings of a run: a single `kernel` of packed attention, or no `fused` operations."""
    from kit.scoring import packing

    kernels, name = dict(packing.KERNELS), row.options.get("kernel", row.options.get("arm"))
    if name in ("groups", *kernels):  # `groups` uses no kernel
        for other in kernels.keys() - {name}:
            del packing.KERNELS[other]
    packing._kernel.cache_clear()
    if hasattr(trainer, "scorer"):  # TRL's own trainer has none
        trainer.scorer.fuses = trainer.scorer.fuses and row.options.get("fused", True)
    try:
        yield
    finally:
        packing.KERNELS.clear()  # restore their order, too
        packing.KERNELS.update(kernels)
        packing._kernel.cache_clear()


class Worker:
    """Runs rows one after the other. It loads a new model for every arm."""

    def __init__(self, rows: list[Row], folder: Path) -> None:
        self.folder = folder
        self.longest = max(WORKS[row.work].prompt for row in rows), max(WORKS[row.work].longest for row in rows)
        self.arm: Any = None
        self.bench: Bench | None = None

    def answer(self, row: Row) -> dict[str, Any]:
        if row.kind in ("attention", "head"):
            import gpu_kernels

            work, arm = WORKS[row.work], row.options["arm"]
            with apply_switches(row):
                if row.kind == "head":
                    return gpu_kernels.head(arm, self.folder / "head.values")
                return gpu_kernels.attention(arm, work.prompt, work.lengths, self.folder / f"{row.work}.attention")
        bench = self._bench(row)
        with apply_switches(row, bench.trainer):
            return update(bench, row) if row.kind == "update" else generate(bench, row)

    def _bench(self, row: Row) -> Bench:
        import torch

        arm = (row.model, row.bits, row.loss, row.options)
        if self.bench is None or arm != self.arm:
            self.bench = None  # free its memory first
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.bench, self.arm = Bench(row, self.folder / row.model, self.folder, self.longest), arm
        return self.bench


def dump_stack_before_limit(row: Row) -> None:
    """Write the stack to the log shortly before the row's time limit."""
    faulthandler.dump_traceback_later(max(1.0, 0.9 * row.limit))


def answers(rows: list[Row], folder: Path) -> Iterator[dict[str, Any]]:
    """The results of the rows, in order. They end early if the CUDA context of this process dies."""
    from kit.config import load_config
    from kit.models import backend
    from kit.models.failures import is_out_of_memory

    worker = Worker(rows, folder)
    config = load_config(configuration(rows[0], folder, folder, worker.longest))
    # With the kit's switches, Unsloth's own loss would keep all logits and compile no block.
    defaults = {"UNSLOTH_VLLM_FP32_LM_HEAD": "0", "UNSLOTH_BLOCK_COMPILE": "1"} if rows[0].loss == "own" else {}
    chosen = backend.choose_backend(config.model)
    with mock.patch.dict(backend._NEUTRAL, defaults), backend.activate_backend(chosen):
        for row in rows:
            if row is not rows[0]:  # its limit includes the imports
                dump_stack_before_limit(row)
            try:
                yield worker.answer(row)
            except Exception as error:
                worker.bench = None
                result = {"error": "".join(traceback.format_exception(error))[-2000:]}
                yield result | ({"out_of_memory": True} if is_out_of_memory(error) else {})
                if "CUDA error" in str(error):
                    return
            finally:
                faulthandler.cancel_dump_traceback_later()


def main() -> None:
    request, results = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    rows = [Row(**row) for row in request["rows"]]
    dump_stack_before_limit(rows[0])  # imports may hang, too
    expand_segments()
    count = 0
    with results.open("a") as file:
        for answer in answers(rows, Path(request["folder"])):
            file.write(json.dumps(answer, default=str) + "\n")
            file.flush()
            count += 1
    sys.exit(0 if count == len(rows) else GPU_LOST)


if __name__ == "__main__":
    main()
