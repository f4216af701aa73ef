"""What no CI machine can execute, in one command on a machine with CUDA; nothing is downloaded.

`python benchmarks/gpu_check.py [--out FILE] [--models ...]`: random weights in the shapes of Qwen2.5-1.5B, Qwen2.5-3B
and Llama-3.1-8B, in 4-bit with LoRA, and a tokenizer that the kit builds. For each of them, in processes of their own:

    ours       the kit's trainer, on Unsloth where it is installed and on transformers, with each engine that is there;
               on transformers also with padded rows, to tell what packing is worth
    unsloth    Unsloth's trainer with its own GRPO loss, on its own
    trl        TRL's trainer with its own loss, on transformers

The first of them makes rollouts, whose completions are then cut to lengths in even steps, as random weights never end
one; every arm makes 5 optimiser steps on those, so that only the update differs. Each divides them into micro-batches
as its trainer does: shuffled, or by prompt. Seconds a step, completion tokens a second, peak memory, and the norm of the
first step's gradient, which is the same for all but rounding. Activations are
recomputed in every arm, as in a run on a GPU. `ours` also trains 5 steps with rollouts of its own and every check of
the first steps on, and compares one unpadded row with the padded batch. With vLLM these 5 steps move the adapters
far, and fail where the engine's log-probabilities leave the trainer's: weights that were not handed over.
transformers with a colocated vLLM has no 4-bit, so that arm is in 16 bits; it is left out where the card does not
hold the weights twice. Writes JSON and prints a table; exits with 1 if a check failed. `--cpu-smoke` does the same
with a tiny model on the CPU, transformers only: it shows that this file works, no more.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_arms import ENGINE_SHARE, STEPS, Arm, Size, arms, configuration, holds_engine, size_of
from random_models import SHAPES, build_model

SOLVED = "State the final answer to the following problem: 12 - 4 + 7 = 15\n"
PROMPTS = [
    6 * SOLVED + "3 + 5 =",
    8 * SOLVED + "12 - 4 + 7 =",
    2 * SOLVED + "1 =",
    4 * SOLVED + "The sum of 2 and 7 is",
]
"""Of several lengths; a few examples in front are what many tasks have."""
NEEDS_CUDA = (
    "benchmarks/gpu_check.py needs a CUDA GPU, and torch finds none here. Run it on a machine with one, or try the "
    "file itself on the CPU: python benchmarks/gpu_check.py --cpu-smoke"
)


def make_trainer(arm: Arm, model: Path, folder: Path, size: Size) -> Any:
    """The trainer of an arm, in this process; the backend is imported before TRL."""
    import torch
    from datasets import Dataset

    from kit.training.arguments import grpo_config
    from kit.training.engine_side import engine_settings
    from kit.training.models import find_model, keep_trainable_in_float32, load_model
    from kit.training.unsloth_model import loading

    config = configuration(arm, model, folder, size)
    files = find_model(config.model, chat=False)
    torch.manual_seed(0)
    loaded = load_model(files, config.model, loading(config, files))
    from trl import GRPOTrainer

    from kit.training.trainer import make_trainer_class
    from kit.training.trl_kernel import install_torch_logprob_kernel

    args = grpo_config(config, loaded.backend, folder / "trainer", [1.0])
    args.save_strategy = "no"
    install_torch_logprob_kernel()
    ours = {
        "objective": "dapo",
        "engine": engine_settings(config, args, print),
        "packing": config.optimisation.packing,
        "share_prompts": config.optimisation.share_prompts,
    }
    make, more = (make_trainer_class(), ours) if arm.loss == "ours" else (GRPOTrainer, {})

    def placed_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(place * token for place, token in enumerate(ids, 1)) % 101 / 101 for ids in completion_ids]

    trainer = make(
        loaded.model,
        placed_ids,
        args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 16}),
        processing_class=loaded.tokenizer,
        peft_config=loaded.peft_config,
        **more,
    )
    keep_trainable_in_float32(trainer.model)
    return trainer


def rollouts(trainer: Any) -> list[dict[str, Any]]:
    """One generation batch in micro-batches; rows are shuffled, so that prompts of several lengths stand side by side."""
    import torch

    trainer.model.train()
    rows = next(iter(trainer.get_train_dataloader()))
    output = trainer._generate_and_score_completions(rows)
    count = len(output["completion_ids"])
    mask = output["completion_mask"]
    longest = mask.shape[1]
    for row in range(count):
        mask[row, longest // 8 + (longest - longest // 8) * row // (count - 1) :] = 0
    output["num_items_in_batch"] = mask.sum()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(mask.device)
    size = trainer.args.per_device_train_batch_size
    return [
        {
            name: value[order[start : start + size]].cpu() if value.dim() else value.cpu()
            for name, value in output.items()
            if isinstance(value, torch.Tensor)
        }
        for start in range(0, count, size)
    ]


def recompute_activations(trainer: Any, backend: str) -> None:
    """What `Trainer.train()` does before its first step, and a loop of our own would leave out.

    Unsloth recomputes from the moment it puts the adapters on.
    """
    if backend == "transformers" and trainer.args.gradient_checkpointing:
        keywords = dict(trainer.args.gradient_checkpointing_kwargs or {})
        trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=keywords)


def timed_updates(trainer: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """`STEPS` optimiser steps on the same rollouts; the first, which compiles and allocates, is not in the mean."""
    import torch

    device = trainer.accelerator.device
    on_gpu = device.type == "cuda"
    trainer.model.train()
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = len(batches)
    tokens = sum(int(batch["completion_mask"].sum()) for batch in batches)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds, losses, norms = [], [], []
    for _ in range(STEPS):
        started, total = time.perf_counter(), 0.0
        for batch in batches:
            inputs = {name: value.to(device) for name, value in batch.items()}
            loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=inputs.get("num_items_in_batch"))
            trainer.accelerator.backward(loss)
            total += float(loss.detach())
        if not norms:
            norms.append(float(torch.nn.utils.get_total_norm([weight.grad.float() for weight in trained(trainer)])))
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        losses.append(total)
    step = sum(seconds[1:]) / len(seconds[1:])
    return {
        "seconds_per_step": step,
        "tokens_per_second": tokens / step,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "first_step_seconds": seconds[0],
        "losses": losses,
        "gradient_norm": norms[0],
        "completion_tokens": tokens,
    }


def trained(trainer: Any) -> list[Any]:
    """The weights that have a gradient."""
    return [weight for weight in trainer.model.parameters() if weight.grad is not None]


def canary(trainer: Any, batch: dict[str, Any]) -> float:
    """Mean difference in nats between one unpadded row through plain logits and the scorer on the padded batch."""
    from kit.training.first_steps import scoring_error

    inputs = {name: value.to(trainer.accelerator.device) for name, value in batch.items()}
    return scoring_error(trainer, trainer.model.train(), inputs)


def work(request: dict[str, Any]) -> dict[str, Any]:
    """What the process of one arm does."""
    import torch

    from kit.training.backend import running_on
    from kit.training.first_steps import HALF_TOLERANCE
    from kit.training.grouped_batches import regrouped

    arm, size = Arm(**request["arm"]), Size(**request["size"])
    folder, kept = Path(request["folder"]), Path(request["rollouts"])
    from kit.training.backend import choose_backend

    config = configuration(arm, Path(request["model"]), folder, size)
    with running_on(choose_backend(config.model)):
        trainer = make_trainer(arm, Path(request["model"]), folder, size)
        from trl import GRPOTrainer

        found: dict[str, Any] = {"trainer": GRPOTrainer.__name__, "checks": {}}
        if not kept.is_file():
            torch.save(rollouts(trainer), kept)
        batches = torch.load(kept, weights_only=False)
        if arm.loss == "ours" and trainer._wants_groups():
            batches = regrouped(batches)
        if arm.loss == "ours":
            error = canary(trainer, batches[0])
            found["checks"]["padded row equals unpadded"] = [bool(error <= HALF_TOLERANCE), f"{error:.2g} nats"]
        recompute_activations(trainer, arm.backend)
        found |= timed_updates(trainer, batches)
        if arm.loss == "ours":
            del trainer
            found["checks"] |= guarded_training(arm, Path(request["model"]), folder, size)
    return found


def guarded_training(arm: Arm, model: Path, folder: Path, size: Size) -> dict[str, Any]:
    """5 steps with rollouts of their own, every static and runtime guard on."""
    from kit.errors import KitError

    started = time.perf_counter()
    try:
        trainer = make_trainer(arm, model, folder, size)
        trainer.train()
    except KitError as error:
        return {"trains with every guard on": [False, str(error)]}
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = {
        "trains with every guard on": [
            trainer.state.global_step == STEPS and len(logged) == STEPS,
            f"{trainer.state.global_step} steps, {(time.perf_counter() - started) / STEPS:.2f} s each with rollouts",
        ]
    }
    if arm.engine == "vllm":
        limit = trainer.engine.max_logp_difference
        found["the engine samples with the trainer's weights"] = handed_over(trainer.state.log_history, limit)
    return found


def handed_over(log: list[dict[str, Any]], limit: float) -> list[Any]:
    """Whether each step's completions came with the log-probabilities of the weights that trained: nats, `limit` at most."""
    from kit.training.engine_side import DIFFERENCE

    seen = [entry[DIFFERENCE] for entry in log if DIFFERENCE in entry]
    told = (
        f"{', '.join(f'{value:.2g}' for value in seen) or 'nothing'} nats a token by step, at most {limit:g} expected"
    )
    return [len(seen) == STEPS and all(value <= limit for value in seen), told]


def run_arm(request: dict[str, Any]) -> dict[str, Any]:
    """A process of its own: what one backend has patched or allocated does not reach the next."""
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        question.write_text(json.dumps(request))
        command = [sys.executable, __file__, "--arm", str(question), "--answer", str(answer)]
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if request["smoke"] else {}
        done = subprocess.run(command, env=os.environ | hidden, capture_output=True, text=True)
        if done.returncode or not answer.is_file():
            return {"error": (done.stderr or done.stdout).strip()[-2000:]}
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def machine() -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    names = ("torch", "transformers", "trl", "peft", "bitsandbytes", "unsloth", "unsloth_zoo", "vllm", "triton")
    versions = {name: importlib.metadata.version(name) for name in names if find_spec(name) is not None}
    return {
        "gpu": gpu.name if gpu else None,
        "gpu_bytes": gpu.total_memory if gpu else None,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "packages": versions,
    }


def check(models: list[str], smoke: bool, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Everything, as one JSON value."""
    size, result = size_of(smoke), {"machine": machine(), "smoke": smoke, "models": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for name in models:
            say(f"{name}: random weights ...")
            model = build_model(name, Path(scratch), size.four_bit)
            found: dict[str, Any] = {}
            weights, card = (
                sum(file.stat().st_size for file in model.glob("*.safetensors")),
                result["machine"]["gpu_bytes"],
            )
            room = card is not None and holds_engine(weights, card)
            if not room and not smoke:
                say(f"{name}: {ENGINE_SHARE:g} of this card does not hold {weights / 2**30:.1f} GiB: no 16-bit engine")
            for arm in arms(smoke, room):
                say(f"{name}: {arm.name} ...")
                found[arm.name] = run_arm(
                    {
                        "smoke": smoke,
                        "arm": dataclasses.asdict(arm),
                        "size": dataclasses.asdict(size),
                        "model": str(model),
                        "folder": scratch,
                        "rollouts": str(Path(scratch) / f"{name}.pt"),
                    }
                )
            result["models"][name] = found
    return result


def table(result: dict[str, Any]) -> str:
    """Markdown, a line an arm."""
    lines = ["| model | arm | s/step | tokens/s | peak GiB | gradient | checks |", "|---|---|---|---|---|---|---|"]
    for model, found in result["models"].items():
        for name, one in found.items():
            if "error" in one:
                lines.append(f"| {model} | {name} | - | - | - | - | failed: {one['error'].splitlines()[-1]} |")
                continue
            peak = f"{one['peak_bytes'] / 2**30:.2f}" if one["peak_bytes"] is not None else "-"
            passed = sum(bool(ok) for ok, _ in one["checks"].values())
            checks = f"{passed} of {len(one['checks'])}" if one["checks"] else "-"
            step, speed = f"{one['seconds_per_step']:.3f}", f"{one['tokens_per_second']:.0f}"
            lines.append(f"| {model} | {name} | {step} | {speed} | {peak} | {one['gradient_norm']:.4g} | {checks} |")
    return "\n".join(lines)


def passed(result: dict[str, Any]) -> bool:
    arms = [one for found in result["models"].values() for one in found.values()]
    return bool(arms) and all("error" not in one and all(ok for ok, _ in one["checks"].values()) for one in arms)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=[*SHAPES], default=None)
    parser.add_argument("--cpu-smoke", action="store_true", help="a tiny model on the CPU, transformers only")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--arm", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.arm is not None:
        given.answer.write_text(json.dumps(work(json.loads(given.arm.read_text()))))
        return 0
    import torch

    if not given.cpu_smoke and not torch.cuda.is_available():
        print(NEEDS_CUDA, file=sys.stderr)
        return 2
    models = given.models or (["tiny"] if given.cpu_smoke else ["qwen2.5-1.5b", "qwen2.5-3b", "llama-3.1-8b"])
    result = check(models, given.cpu_smoke)
    given.out.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))
    print(f"{'passed' if passed(result) else 'FAILED'}; {given.out}")
    return 0 if passed(result) else 1


if __name__ == "__main__":
    sys.exit(main())
