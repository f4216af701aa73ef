"""A process that rehearses training runs on simulated GPUs: `rehearse.py FOLDER BACKEND KIND ...`.

A kind is a compute capability with options: `9.0+4bit` for 4-bit weights, `+wait` for an additional wait in every micro-batch,
`+host` for an operand on the host. The real trainer makes three steps of two micro-batches for each kind, with 8 and 16
completions, and writes FOLDER/BACKEND-KIND.json. Triton kernels are interpreted; torch replaces those of Unsloth that run one
program per token. `rehearse.py FOLDER gpu_check KIND ...` runs small versions of the rows of benchmarks/gpu_check.py that have a
process of their own. `rehearse.py FOLDER model` creates the model of all other calls.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ |= {
    "TRITON_INTERPRET": "1", "UNSLOTH_COMPILE_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_COMPILE_LOCATION": tempfile.mkdtemp(), "TOKENIZERS_PARALLELISM": "false",
    "UNSLOTH_FUSED_ADD_RMSNORM": "0", "UNSLOTH_DECODE_FUSED_ROPE": "0",
}  # fmt: skip

import torch
from pretended_gpu import PretendedGPU, pretended
from tiny_qwen import VOCABULARY, tiny_tokenizer

PROMPTS = ["1 2 3 + 5 =", "12 - 4 + 7 =", "1 =", "The sum of 2 and 7 is"]
SIZES = (8, 16)
"""Completions of a micro-batch."""
STEPS = 3


def build_model(place: Path, architecture: str = "qwen3", *, tools: bool = False) -> None:
    """Write a random bfloat16 model of two layers, with heads and layers as wide as flash attention and bitsandbytes need."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tiny_tokenizer("embedded-tools" if tools else "embedded")
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    if architecture != "qwen2":
        sizes["head_dim"] = 64
    if architecture == "qwen3_5":
        sizes |= {
            "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 64, "linear_value_head_dim": 64,
            "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        }  # fmt: skip
        architecture = "qwen3_5_text"
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **sizes)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(place)
    # Qwen's templates read `enable_thinking`, which presets set.
    tokenizer.chat_template = (
        "{% if enable_thinking is defined and not enable_thinking %}{% endif %}" + tokenizer.chat_template
    )
    tokenizer.save_pretrained(place)


def rehearse(folder: Path, backend: str, kind: str, micro: int) -> dict[str, Any]:
    """Train a run with micro-batches of `micro` completions; return the counts."""
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

        config = load_config({
            "model": {
                "name": str(folder / "model"), "backend": backend, "load_in_4bit": "4bit" in options,
                "lora": {"rank": 8, "alpha": 16.0},
            },
            "data": {"source": "reasoning-gym:chain_sum", "limit": 64, "heldout": 8, "chat": False},
            "reward": {"preset": "reasoning-gym"},
            "objective": {"recipe": "dapo"},
            "generation": {"engine": "hf", "num_generations": 4, "max_completion_tokens": 4},
            "optimisation": {"steps": STEPS, "batch_size": 2 * micro, "micro_batch_size": micro, "learning_rate": 1e-4},
            "run": {"id": "rehearsal", "root": str(folder), "save_every": 0},
        })  # fmt: skip
        with ExitStack() as stack:
            # Unsloth checks autograd on the CPU, and collects garbage a dozen times a run in processes that are not the
            # kit's, which takes a second each time.
            with gpu.within("import"), mock.patch("kit.models.backend.is_of_the_kit", return_value=True):
                stack.enter_context(activate_backend(choose_backend(config.model)))
            if backend == "unsloth":
                stack.enter_context(unsloths_kernels())
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
                skip_flat_groups=settings.skip_flat_groups,
            )
            keep_trainable_in_float32(trainer.model)
            ragged(trainer)
            waits, copies = watch(trainer, gpu, options)
            trainer.train()
        log = trainer.state.log_history
        return {
            "steps": trainer.state.global_step,
            "losses": [entry["loss"] for entry in log if "loss" in entry],
            "gradients": [entry["grad_norm"] for entry in log if "grad_norm" in entry],
            "packing": trainer.packing_report,
            "dtypes": sorted({str(weight.dtype) for weight in loaded.model.parameters()}),
            "half": "bf16" if args.bf16 else "fp16" if args.fp16 else None,
            "waits": waits,
            "copies": copies,
            "copied": [[*key, count] for key, count in gpu.copies.most_common()],
            "where": [[*key, count] for key, count in gpu.waits.most_common()],
            "mixed": [[*key, count] for key, count in gpu.mixed.most_common() if key[0] != "import"],
            "attention": [[*key, count] for key, count in Counter(gpu.attention).most_common()],
            "kernels": dict(gpu.kernels),
        }


def ragged(trainer: Any) -> None:
    """Cut completions to several lengths, because a random model seldom ends one."""
    generate = trainer._generate_and_score_completions

    def cut(inputs: Any) -> Any:
        output = generate(inputs)
        mask = output["completion_mask"]
        for row in range(len(mask)):
            mask[row, 2 + 3 * row % (mask.shape[1] - 2) :] = 0
        output["num_items_in_batch"] = mask.sum()
        return output

    trainer._generate_and_score_completions = cut


def watch(trainer: Any, gpu: PretendedGPU, planted: list[str]) -> tuple[list[int], list[int]]:
    """Record the waits, and the copies from the host, of each micro-batch.

    `planted` names defects to add: a `wait` for a value, or an operand of the `host`.
    """
    waits: list[int] = []
    copies: list[int] = []
    step, generate, log = trainer.training_step, trainer._generate_and_score_completions, trainer.log

    def training_step(model: Any, inputs: Any, *args: Any) -> Any:
        with gpu.within("train"):
            before, copied = gpu.waits_in("train"), gpu.copies_in("train")
            loss = step(model, inputs, *args)
            if "wait" in planted:
                loss.item()
            if "host" in planted:
                loss.detach() * torch.ones(1)
            waits.append(gpu.waits_in("train") - before)
            copies.append(gpu.copies_in("train") - copied)
        return loss

    def rollout(inputs: Any) -> Any:
        with gpu.within("rollout"):
            return generate(inputs)

    def logged(*args: Any) -> None:
        with gpu.within("log"):
            log(*args)

    trainer.training_step, trainer._generate_and_score_completions, trainer.log = training_step, rollout, logged
    return waits, copies


@contextmanager
def unsloths_kernels() -> Iterator[None]:
    """Reduce the work of Triton's interpreter for Unsloth, which takes some 10 ms a program; norms have one program per token.

    torch computes norms and rotary embeddings, bitsandbytes for the CPU reads 4-bit weights, and gated products are Unsloth's in
    fewer programs. `rehearse_kernels` compares each with Unsloth's kernel.
    """
    from packs_on_unsloth import read_four_bit, rowwise_in_torch
    from unsloth.kernels import fast_lora, swiglu, utils

    with ExitStack() as stack:
        stack.enter_context(rowwise_in_torch())
        stack.enter_context(mock.patch.object(swiglu, "BLOCK_SIZE", 2**16))
        for module in (utils, fast_lora):
            stack.enter_context(mock.patch.object(module, "fast_dequantize", read_four_bit))
        yield


def rehearse_kernels(dtype: torch.dtype) -> dict[str, Any]:
    """Run Unsloth's kernels on a few tokens in Triton's interpreter, and compare them with their replacements.

    Returns the differences `off` forward and backward, the host's waits, operands on two devices, and the same with a `planted`
    defect: a norm's weight on the host.
    """
    with pretended(PretendedGPU((9, 0))) as gpu:
        import unsloth  # noqa: F401
        from unsloth.kernels import qk_norm_rope, swiglu
        from unsloth.models import qwen3

        def norm(weight: Any) -> Any:
            return SimpleNamespace(weight=weight, variance_epsilon=1e-6, eps=1e-6)

        def drawn(*shape: int) -> Any:
            return torch.randn(*shape, generator=draw).to("cuda", dtype)

        def rotated(query: Any, key: Any) -> Any:
            inputs = (norm(weight), norm(weight), query, key, cos, sin, places)
            if qk_norm_rope.QK_NORM_ROPE_ENABLED:
                return qwen3.fast_qk_norm_rope(*inputs)
            heads = (qwen3.fast_rms_layernorm(norm(weight), x).transpose(1, 2) for x in (query, key))
            return qwen3.fast_rope_embedding(*heads, cos, sin, places)

        def gated(gate: Any, up: Any) -> Any:
            made = swiglu.swiglu_fg_kernel(gate, up)
            return made, *swiglu.swiglu_DWf_DW_dfg_kernel(*(x.flatten(0, 1).clone() for x in (pull, gate, up)))

        def results() -> list[Any]:
            leaves = [x.detach().requires_grad_() for x in (states, query, key)]
            done = [qwen3.fast_rms_layernorm(norm(wide), leaves[0]), *rotated(*leaves[1:])]
            back = torch.autograd.grad([output.float().square().sum() for output in done], leaves)
            with torch.no_grad():
                return [*done, *back, *gated(states, pull)]

        draw = torch.Generator().manual_seed(0)
        states, pull, wide, weight = drawn(1, 3, 128), drawn(1, 3, 128), drawn(128), drawn(64)
        query, key, angles = drawn(1, 3, 2, 64), drawn(1, 3, 1, 64), drawn(8, 32)
        cos, sin = (torch.cat((x, x), 1) for x in (angles.cos(), angles.sin()))
        places = torch.tensor([[2, 0, 5]], dtype=torch.int32, device="cuda")
        with gpu.within("own"):
            own = results()
        with unsloths_kernels():
            played = results()
        with gpu.within("planted"), torch.no_grad():
            qwen3.fast_rms_layernorm(norm(wide.cpu()), states)
        return {
            "waits": gpu.waits_in("own"),
            "mixed": [[*key, count] for key, count in gpu.mixed.items() if key[0] == "own"],
            "planted": [[*key, count] for key, count in gpu.mixed.items() if key[0] == "planted"],
            "off": [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(played, own, strict=True)],
        }


def rehearse_gpu_check(folder: Path, kind: str) -> dict[str, Any]:
    """The result of each row of stages 2, 3, 5 and 6 of gpu_check, with its failure, if any."""
    import gpu_check
    import random_models
    from gpu_arms import Row, answers

    capability, *options = kind.split("+")
    major, minor = map(int, capability.split("."))
    # Heads as wide as flash attention needs, and layers as wide as bitsandbytes' blocks.
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
            *(Row(5, "update", options={"kernel": name}, **like) for name in ("efficient", "groups")),
            *(
                Row(5, "attention", "smoke", options={"arm": arm})
                for arm in ("varlen", "packed", "efficient", "groups")
            ),
            Row(5, "head", "smoke", options={"arm": "kit"}),
            Row(6, "generate", **like),
        ]
    with pretended(PretendedGPU((major, minor))) as gpu:
        import gpu_kernels

        gpu_kernels.HEADS, gpu_kernels.HEAD = (4, 2, 16), (16, 32, 64)
        done: dict[str, Any] = {}
        for batch in gpu_check.by_process(rows):
            for row, answer in zip(batch, answers(batch, folder), strict=True):
                done[row.key] = answer | {"failure": gpu_check.failure_of(row, answer)}
                if row.loss == "own":
                    from trl.trainer import utils

                    done[row.key]["head"] = utils._ChunkedLogProbFunction.__module__
        attention = [[*key, count] for key, count in gpu.attention.items()]
        return {"rows": done, "attention": attention, "mixed": [[*key, count] for key, count in gpu.mixed.items()]}


if __name__ == "__main__":
    place, chosen = Path(sys.argv[1]), sys.argv[2]
    if chosen == "model":
        build_model(place / "model")
    for job in sys.argv[3:]:
        if chosen == "gpu_check":
            results: dict[Any, Any] = rehearse_gpu_check(place, job)
        elif job in ("bfloat16", "float16"):
            results = rehearse_kernels(getattr(torch, job))
        else:
            results = {size: rehearse(place, chosen, job, size) for size in (SIZES[:1] if "+wait" in job else SIZES)}
        (place / f"{chosen}-{job}.json").write_text(json.dumps(results))
