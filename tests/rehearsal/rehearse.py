"""A process that rehearses training runs on pretended GPUs: `rehearse.py FOLDER BACKEND KIND ...`

A kind is a compute capability, `+4bit` behind it for 4-bit weights, `+wait` for a wait more in every micro-batch: `9.0+4bit`.
For each the real trainer makes three steps of two micro-batches, of 8 and of 16 completions. What was seen is in
FOLDER/BACKEND-KIND.json. Kernels in Triton are interpreted. `rehearse.py FOLDER gpu_check KIND ...` does the rows of
benchmarks/gpu_check.py that have a process of their own instead, in small.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ |= {
    "TRITON_INTERPRET": "1", "UNSLOTH_COMPILE_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_COMPILE_LOCATION": tempfile.mkdtemp(), "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip

import torch
from pretended_gpu import PretendedGPU, pretended
from tiny_qwen import VOCABULARY, tiny_tokenizer

PROMPTS = ["1 2 3 + 5 =", "12 - 4 + 7 =", "1 =", "The sum of 2 and 7 is"]
SIZES = (8, 16)
"""Completions of a micro-batch."""
STEPS = 3


def build_model(place: Path) -> None:
    """Two layers whose heads are as wide as real ones; bfloat16."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = tiny_tokenizer()
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=512, tie_word_embeddings=True, **ids,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(place)
    tokenizer.save_pretrained(place)


def rehearse(folder: Path, backend: str, kind: str, micro: int) -> dict[str, Any]:
    """A run with micro-batches of so many completions."""
    capability, *options = kind.split("+")
    major, minor = map(int, capability.split("."))
    with pretended(PretendedGPU((major, minor))) as gpu:
        from datasets import Dataset

        from kit.config import load_config
        from kit.models.backend import activate_backend, choose_backend
        from kit.models.failures import BatchSizeBackoff
        from kit.models.loading import find_model, keep_trainable_in_float32, load_model
        from kit.models.unsloth import loading
        from kit.trainer.arguments import grpo_config
        from kit.trainer.savings import switches

        config = load_config({
            "model": {
                "name": str(folder / "model"), "backend": backend, "load_in_4bit": "4bit" in options,
                "lora": {"rank": 8, "alpha": 16.0},
            },
            "data": {"source": "reasoning-gym:chain_sum", "limit": 64, "heldout": 8, "chat": False},
            "reward": {"preset": "reasoning-gym"},
            "objective": {"recipe": "dapo"},
            "generation": {"engine": "hf", "num_generations": 4, "max_completion_tokens": 12},
            "optimisation": {"steps": STEPS, "batch_size": 2 * micro, "micro_batch_size": micro, "learning_rate": 1e-4},
            "run": {"id": "rehearsal", "root": str(folder), "save_every": 0},
        })  # fmt: skip
        with activate_backend(choose_backend(config.model)):
            files = find_model(config.model, chat=False)
            loaded = load_model(files, config.model, loading(config, files.backend, files.context))
            from kit.trainer.trainer import HookedGRPOTrainer

            args = grpo_config(config, loaded.backend, folder / "trainer", [1.0])
            args.save_strategy = "no"
            settings = config.optimisation
            trainer = HookedGRPOTrainer(
                loaded.model,
                lambda completion_ids, **_: [
                    sum(p * t for p, t in enumerate(ids, 1)) % 101 / 101 for ids in completion_ids
                ],
                args,
                train_dataset=Dataset.from_dict({"prompt": PROMPTS * 16}),
                processing_class=loaded.tokenizer,
                peft_config=loaded.peft_config,
                objective="dapo",
                memory=BatchSizeBackoff(),
                packing=settings.packing,
                share_prompts=settings.share_prompts,
                **switches(config),
            )
            keep_trainable_in_float32(trainer.model)
            ragged(trainer)
            waits = watch(trainer, gpu, planted="wait" in options)
            trainer.train()
        log = trainer.state.log_history
        return {
            "steps": trainer.state.global_step,
            "losses": [entry["loss"] for entry in log if "loss" in entry],
            "gradients": [entry["grad_norm"] for entry in log if "grad_norm" in entry],
            "packing": trainer.packing_report,
            "dtypes": sorted({str(one.dtype) for one in loaded.model.parameters()}),
            "half": "bf16" if args.bf16 else "fp16" if args.fp16 else None,
            "waits": waits,
            "where": [[*key, count] for key, count in gpu.waits.most_common()],
            "mixed": [[*key, count] for key, count in gpu.mixed.most_common()],
            "attention": [[*key, count] for key, count in Counter(gpu.attention).most_common()],
            "kernels": dict(gpu.kernels),
        }


def ragged(trainer: Any) -> None:
    """Completions are cut at lengths of their own: a random model seldom ends one."""
    generate = trainer._generate_and_score_completions

    def cut(inputs: Any) -> Any:
        output = generate(inputs)
        mask = output["completion_mask"]
        for row in range(len(mask)):
            mask[row, 2 + 3 * row % (mask.shape[1] - 2) :] = 0
        output["num_items_in_batch"] = mask.sum()
        return output

    trainer._generate_and_score_completions = cut


def watch(trainer: Any, gpu: PretendedGPU, *, planted: bool) -> list[int]:
    """The waits of every micro-batch, in their order. planted: each asks for one value more."""
    waits: list[int] = []
    step, generate, log = trainer.training_step, trainer._generate_and_score_completions, trainer.log

    def training_step(model: Any, inputs: Any, *args: Any) -> Any:
        with gpu.within("train"):
            before = gpu.waits_in("train")
            loss = step(model, inputs, *args)
            if planted:
                loss.item()
            waits.append(gpu.waits_in("train") - before)
        return loss

    def rollout(inputs: Any) -> Any:
        with gpu.within("rollout"):
            return generate(inputs)

    def logged(*args: Any) -> None:
        with gpu.within("log"):
            log(*args)

    trainer.training_step, trainer._generate_and_score_completions, trainer.log = training_step, rollout, logged
    return waits


def rehearse_gpu_check(folder: Path, kind: str) -> dict[str, Any]:
    """The answer of every row, and why it is wrong; stages 2, 3, 5 and 6."""
    import gpu_check
    import random_models
    from gpu_arms import Row, answers

    capability, *options = kind.split("+")
    major, minor = map(int, capability.split("."))
    # Heads as wide as flash attention's, and layers as wide as bitsandbytes'.
    random_models.SHAPES["tiny"] |= {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    random_models.build_model("tiny", folder)
    like: dict[str, Any] = {
        "work": "smoke", "model": "tiny", "bits": 4 if "4bit" in options else 16,
        "dtype": "bfloat16" if major >= 8 else "float16",
    }  # fmt: skip
    rows = [Row(2, "update", loss="own", **like), Row(2, "update", **like)]
    if not options:
        rows += [
            Row(3, "update", counts=True, **like),
            *(Row(5, "update", more={"kernel": name}, **like) for name in ("efficient", "groups")),
            *(Row(5, "attention", "smoke", more={"way": name}) for name in ("varlen", "packed", "efficient", "groups")),
            Row(5, "head", "smoke", more={"way": "kit"}),
            Row(6, "generate", **like),
        ]
    with pretended(PretendedGPU((major, minor))) as gpu:
        import gpu_kernels

        gpu_kernels.HEADS, gpu_kernels.HEAD = (4, 2, 16), (16, 32, 64)
        done: dict[str, Any] = {}
        for some in gpu_check.alike(rows):
            for row, answer in zip(some, answers(some, folder), strict=True):
                done[row.key] = answer | {"wrong": gpu_check.wrong(row, answer)}
        attention = [[*key, count] for key, count in gpu.attention.items()]
        return {"rows": done, "attention": attention, "mixed": [[*key, count] for key, count in gpu.mixed.items()]}


if __name__ == "__main__":
    place, chosen = Path(sys.argv[1]), sys.argv[2]
    for one in sys.argv[3:]:
        if chosen == "gpu_check":
            found: dict[Any, Any] = rehearse_gpu_check(place, one)
        else:
            found = {size: rehearse(place, chosen, one, size) for size in SIZES}
        (place / f"{chosen}-{one}.json").write_text(json.dumps(found))
