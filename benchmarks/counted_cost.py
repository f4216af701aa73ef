"""Count what the train phase of a GRPO step costs on CUDA, at the shapes of real models and without a GPU.

`uv run python benchmarks/counted_cost.py [--models ...] [--works ...] [--arms ...] [--sm 75|89|90] [--out FILE]`

The counts are FLOPs, peak bytes of the allocator, memory traffic outside matrix products and kernel launches, for the loss
and backward pass of one step with LoRA of rank 16 on all linear layers, gradient checkpointing, bfloat16 weights and
micro-batches of 16 completions. The arms:

    ours     the real HookedGRPOTrainer on transformers' models, without a library of fused norms
    liger    the same with Liger's kernels, which must be installed; each counts as one launch that touches its tensors
    trl      the real GRPOTrainer
    floor    computed by hand: each live token once, prompts once a group, one recomputation, a head of two products

The trainers' code runs on tensors without data (`cost_meter.py`), over a CUDA runtime that reports a GPU and does nothing
(`fake_cuda.c`, compiled with gcc), so that torch chooses the kernels that it would choose on a GPU. All counts are linear in
the number of layers, so that two small depths give the counts of the full model (three for Gemma, which has two kinds of
layers).

`--memory FILE` counts the peaks of the file's rows again, writes them to the file and prints the relative changes; `--models`
selects rows. The tests compare the formula of `plan` with `results/counted_memory.json`.

The results are counts, not measurements. Seconds are a roofline: FLOPs divided by `--tflops`, plus traffic outside products
divided by `--tbs`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import random_models  # noqa: E402

PRELOADED = "KIT_FAKE_CUDA"
GIB = 2**30
RANK = 16
MODELS: dict[str, dict[str, Any]] = random_models.SHAPES | {
    "qwen2.5-7b": {
        "kind": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "gemma-3-4b": {
        "kind": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "sliding_window": 1024,
        "query_pre_attn_scalar": 256, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Configurations by model name. `kind` is the model type of transformers, in any case."""
WORKS = ("gsm8k", "reasoning", "long")
ARMS = ("ours", "liger", "trl", "floor")

Groups = list[tuple[int, list[int]]]
"""The prompts of one step: tokens of the prompt, tokens of each of its completions."""


def workload(name: str) -> Groups:
    """Lengths of a workload, the same in every call.

    gsm8k has 4 prompts and completions of 250 tokens on average; reasoning has 2 prompts, 2k on average and at most 8k; long
    has 1 prompt and 20k each. COUNTxPROMPTxCOMPLETION is one prompt with completions of equal length.
    """
    draw = random.Random(0)

    def lognormal(middle: float, spread: float, least: int, most: int) -> list[int]:
        return [max(least, min(most, round(draw.lognormvariate(middle, spread)))) for _ in range(8)]

    if name == "gsm8k":
        return [(200, lognormal(math.log(225), 0.5, 16, 512)) for _ in range(4)]
    if name == "reasoning":
        return [(300, lognormal(math.log(2000) - 0.32, 0.8, 64, 8192)) for _ in range(2)]
    if name == "long":
        return [(500, [20000] * 8)]
    if name == "small":  # for the test
        return [(40, [16, 24, 32, 64]), (30, [8, 48, 48, 56])]
    sizes = name.split("x")
    if len(sizes) == 3 and all(size.isdigit() for size in sizes):
        count, prompt, completion = map(int, sizes)
        return [(prompt, [completion] * count)]
    raise SystemExit(f"There is no work {name}. Choose one of {', '.join(WORKS)}, or COUNTxPROMPTxCOMPLETION.")


@dataclass(frozen=True)
class Case:
    """The settings of one row. `layers` is a depth; for Gemma a letter a layer: s for sliding, f for full attention."""

    model: str
    work: str
    arm: str
    layers: int | str
    checkpointing: bool = True
    budget: int | None = None
    micro: int = 16  # completions of a micro-batch
    offload: bool = False  # keep the inputs of blocks in main memory; in our arms only

    @property
    def ours(self) -> bool:
        return self.arm in ("ours", "liger")


@dataclass(frozen=True)
class Count:
    """The counts of a full model, or of one with few layers."""

    flops: dict[str, float]  # by kind
    peaks: dict[str, float]  # bytes, by pass and phase
    traffic: dict[str, float]  # bytes; gemm, attention, other
    launches: float
    attention: dict[str, int]  # calls in the model with few layers, by kernel and mask

    @property
    def tflop(self) -> float:
        return sum(self.flops.values()) / 1e12

    @property
    def peak(self) -> float:
        return max(self.peaks.values())

    def seconds(self, tflops: float, tbs: float) -> float:
        """Seconds of the roofline, in which nothing overlaps."""
        outside = sum(value for kind, value in self.traffic.items() if kind != "gemm")
        return self.tflop / tflops + outside / 1e12 / tbs

    def times(self, factor: float) -> Count:
        def scaled(values: dict[str, Any]) -> dict[str, Any]:
            return {name: factor * value for name, value in values.items()}

        parts = scaled(self.flops), scaled(self.peaks), scaled(self.traffic)
        return Count(*parts, factor * self.launches, self.attention)

    def plus(self, other: Count) -> Count:
        def summed(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
            return {name: left.get(name, 0) + right.get(name, 0) for name in {**left, **right}}

        parts = ((getattr(self, name), getattr(other, name)) for name in ("flops", "peaks", "traffic"))
        return Count(*(summed(*pair) for pair in parts), self.launches + other.launches, self.attention)


def depths(model: str) -> dict[int | str, float]:
    """Small depths, each with the factor of its counts in the sum that gives the counts of the full model."""
    layers = MODELS[model]["num_hidden_layers"]
    if "sliding_window" in MODELS[model]:
        full = layers // 6
        return {"sf": 3.0 - layers, "ssf": layers - full - 1.0, "sff": full - 1.0}
    return {2: 3.0 - layers, 3: layers - 2.0}


def count_model(case: Case) -> Count:
    """The counts of the full model."""
    if case.arm == "floor":
        return floor(case)
    total: Count | None = None
    for layers, factor in depths(case.model).items():
        part = count_layers(replace(case, layers=layers)).times(factor)
        total = part if total is None else total.plus(part)
    assert total is not None
    return total


# --- the floor --------------------------------------------------------------------------------------------------------


def floor(case: Case) -> Count:
    """Compute FLOPs and peak memory by hand at full depth. Memory is that of the longest completion with its prompt."""
    from cost_meter import causal_pairs

    shape, groups, forwards = MODELS[case.model], workload(case.work), 2 if case.checkpointing else 1
    hidden, middle, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    layers, vocabulary = shape["num_hidden_layers"], shape["vocab_size"]
    size = shape.get("head_dim", hidden // heads)
    query, key = heads * size, shape["num_key_value_heads"] * size
    linear = [(hidden, query), (hidden, key), (hidden, key), (query, hidden)]
    linear += [(hidden, middle), (hidden, middle), (middle, hidden)]
    weights, lora = sum(a * b for a, b in linear), RANK * sum(a + b for a, b in linear)
    tokens = sum(prompt + sum(lengths) for prompt, lengths in groups)
    scored = sum(sum(lengths) for _, lengths in groups)
    pairs = 0
    for layer in range(layers):
        window = None if "sliding_window" not in shape or (layer + 1) % 6 == 0 else shape["sliding_window"]
        for prompt, lengths in groups:
            pairs += causal_pairs(prompt, prompt, window)
            pairs += sum(causal_pairs(length, prompt + length, window) for length in lengths)
    flops = {
        "linear": layers * 2 * weights * tokens * (forwards + 1),
        "lora": layers * 2 * lora * tokens * (forwards + 2),
        "attention": pairs * query * (4 * forwards + 10),
        "head": 4 * scored * vocabulary * hidden,
    }
    longest = max(prompt + max(lengths) for prompt, lengths in groups)
    layer_bytes = 2 * longest * (4 * hidden + 2 * query + 2 * key + 3 * middle) + 4 * heads * longest
    activations = 2 * layers * hidden * longest + layer_bytes
    if not case.checkpointing:
        activations = 2 * layers * longest * (4 * hidden + 2 * query + 2 * key + 2 * middle) + 2 * longest * middle
    embeddings = vocabulary * hidden * (1 if shape["tie_word_embeddings"] else 2)
    parameters = 2 * (layers * weights + embeddings) + 8 * layers * lora
    rows = 2 * hidden * max(max(lengths) for _, lengths in groups)
    return Count(flops, {"floor": parameters + activations + 4 * longest * hidden + rows}, {}, 0, {})


# --- an arm on tensors without data -----------------------------------------------------------------------------------


def count_layers(case: Case) -> Count:
    """Run the train phase of a model with few layers and count it."""
    import torch
    from cost_meter import Meter
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.manual_seed(0)
    mode, meter = FakeTensorMode(allow_non_fake_inputs=True), Meter(RANK)
    with patched(liger=case.arm == "liger"), meter.counting_triton():
        model = build_model(case, mode)
        for weight in (*model.parameters(), *model.buffers()):
            meter.hold(weight)
        run_trainer(case, model, mode, meter)
    return Count(dict(meter.flops), dict(meter.peaks), dict(meter.traffic), meter.launches, dict(meter.attention))


def build_model(case: Case, mode: Any) -> Any:
    """A model without data, with LoRA adapters and TRL's fused head."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    shape = dict(MODELS[case.model])
    kind = shape.pop("kind")
    if isinstance(case.layers, str):
        shape["layer_types"] = [{"s": "sliding_attention", "f": "full_attention"}[letter] for letter in case.layers]
    shape["num_hidden_layers"] = len(case.layers) if isinstance(case.layers, str) else case.layers
    config = AutoConfig.for_model(kind.lower(), max_position_embeddings=131072, **shape)
    with mode, torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
        model.config.use_cache = False
        lora = LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
        if case.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        model.train()
    inner = model.forward

    def forward(*args: Any, **keywords: Any) -> Any:  # like a model that accelerate has prepared
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return inner(*args, **keywords)

    model.forward = forward
    return model


class Accelerator:
    """Stand-in for `accelerate.Accelerator`, with what the trainers use in one process on one GPU in bfloat16."""

    num_processes, process_index, distributed_type = 1, 0, "NO"
    scaler, mixed_precision, gradient_accumulation_steps = None, "bf16", 1
    sync_gradients = is_main_process = True

    def __init__(self) -> None:
        import torch

        self.device = torch.device("cuda", 0)

    def autocast(self) -> Any:
        import torch

        return torch.autocast("cuda", dtype=torch.bfloat16)

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        return model

    def backward(self, loss: Any) -> None:
        loss.backward()

    def gather(self, value: Any) -> Any:
        return value

    reduce = gather_for_metrics = lambda _, value, **__: value


def run_trainer(case: Case, model: Any, mode: Any, meter: Any) -> None:
    """Run loss and backward pass with the real trainer. It is built around a small model, which `model` then replaces."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils

    from kit.models.embedded import source_of
    from kit.trainer.trainer import HookedGRPOTrainer

    is_ours = case.ours
    shape = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    small = Qwen2ForCausalLM(Qwen2Config(num_attention_heads=1, num_key_value_heads=1, **shape))
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        per_device_train_batch_size=case.micro, num_generations=min(8, case.micro), max_completion_length=64, loss_type="dapo",
        epsilon_high=None if is_ours else 0.28,
    )  # fmt: skip
    own_arguments: dict[str, Any] = (
        {"objective": "dapo", "first_step_checks": False, "token_budget": case.budget} if is_ours else {}
    )
    trainer = (HookedGRPOTrainer if is_ours else GRPOTrainer)(
        model=small,
        reward_funcs=lambda completion_ids, **_: [0.0] * len(completion_ids),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["1 ="] * 8}),
        processing_class=AutoTokenizer.from_pretrained(source_of("embedded")),
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
        **own_arguments,
    )
    trainer.model = trainer.model_wrapped = model
    trainer.accelerator = Accelerator()
    trainer.current_gradient_accumulation_steps = 1
    mark_heads(meter)
    if is_ours:
        rebuild_parts(trainer, case)
    parts = micro_batches(case)
    longest = max(max(lengths) for part in parts for _, lengths in part)
    for number, part in enumerate(parts):
        batch = padded_batch(part, longest, model.config.vocab_size, number)
        # The kit's trainer has replaced TRL's head for the rest of the process.
        head = utils._ChunkedLogProbFunction if is_ours else ChunkedLogProbFunction
        with mode, meter, mock.patch.object(utils, "_ChunkedLogProbFunction", head):
            inputs = {name: value.to("cuda") for name, value in batch.items()}
            trainer._stepping = is_ours
            loss = trainer.compute_loss(model, inputs)
            trainer.accelerator.backward(loss)
            del inputs, loss


def rebuild_parts(trainer: Any, case: Case) -> None:
    """Build the parts of our trainer again for its new model and device, without the proofs, which need values."""
    from kit.models.fused import Fused
    from kit.scoring.scorer import Verdict

    trainer._build_parts(packing=True, share_prompts=True, checked=False, fast_decoding=False)
    trainer.set_savings(token_budget=case.budget)
    trainer.scorer.offload = case.offload
    trainer.scorer.verdicts[id(trainer.model)] = Verdict("packed")
    trainer.scorer.fused[id(trainer.model)] = Fused(trainer.model)


def micro_batches(case: Case) -> list[Groups]:
    """Split the groups into micro-batches, with the completions of a prompt together."""
    groups = enumerate(workload(case.work))
    flat = [(number, prompt, length) for number, (prompt, lengths) in groups for length in lengths]
    batches = []
    for start in range(0, len(flat), case.micro):
        part: dict[int, tuple[int, list[int]]] = {}
        for number, prompt, length in flat[start : start + case.micro]:
            part.setdefault(number, (prompt, []))[1].append(length)
        batches.append(list(part.values()))
    return batches


def padded_batch(groups: Groups, longest: int, vocabulary: int, seed: int) -> dict[str, Any]:
    """A micro-batch in TRL's layout. `longest` is the longest completion of the step, to which TRL pads all of them."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    width, rows = max(prompt for prompt, _ in groups), sum(len(lengths) for _, lengths in groups)
    prompt_ids, prompt_mask = torch.zeros(rows, width, dtype=torch.long), torch.zeros(rows, width, dtype=torch.long)
    ids, mask = torch.zeros(rows, longest, dtype=torch.long), torch.zeros(rows, longest, dtype=torch.long)
    row = 0
    for prompt, lengths in groups:
        text = torch.randint(4, vocabulary - 4, (prompt,), generator=draw)
        for length in lengths:
            prompt_ids[row, width - prompt :], prompt_mask[row, width - prompt :] = text, 1
            ids[row, :length], mask[row, :length] = torch.randint(4, vocabulary - 4, (length,), generator=draw), 1
            row += 1
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor([1.0 - 2.0 * (row % 2) for row in range(rows)]),
        "num_items_in_batch": mask.sum().float(),
    }


def mark_heads(meter: Any) -> None:
    """Count the autograd functions of TRL's head and of the kit's as the head."""
    import torch
    import trl.kernels.chunked_logprob as trl_head

    import kit.scoring.head as kit_head

    for module in (trl_head, kit_head):
        for member in list(vars(module).values()):
            if isinstance(member, type) and issubclass(member, torch.autograd.Function):
                meter.mark_head(member)


@contextmanager
def patched(*, liger: bool = False) -> Iterator[None]:
    """Patch the code that reads values of tensors without data, and undo the patches at the end.

    `liger` says whether our trainer finds Liger.
    """
    import torch
    import trl.kernels.chunked_logprob as head
    import trl.trainer.grpo_trainer as grpo
    from torch.utils._python_dispatch import _disable_current_modes
    from transformers import AttentionInterface, masking_utils

    import kit.models.fused as fused
    import kit.scoring.packing as packed

    originals: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, name: str, value: Callable[..., Any]) -> None:
        originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    patch(torch.nn.Module, "_apply", _apply)
    units = {75: 40, 89: 142, 90: 132}[int(os.environ["FAKE_SM"])]  # SMs of a T4, an L40S and an H100
    patch(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=units))
    patch(fused, "find_spec", find_spec if liger else lambda _: None)
    patch(masking_utils, "is_tracing", lambda *_: False)  # it takes tensors without data for tracing
    patch(grpo, "nanmin", torch.Tensor.min)  # for metrics
    patch(grpo, "nanmax", torch.Tensor.max)
    functions = [
        member
        for member in vars(head).values()
        if isinstance(member, type) and issubclass(member, torch.autograd.Function)
    ]
    for function in functions:
        patch(function, "forward", function.forward)
        patch(function, "backward", function.backward)
    causal_lower_right = packed.causal_lower_right

    def lower_right(*sizes: int) -> Any:  # its result is a subclass of Tensor, which no mode can create
        with _disable_current_modes():
            return causal_lower_right(*sizes)

    patch(packed, "causal_lower_right", lower_right)
    kernel = "flash" if int(os.environ["FAKE_SM"]) >= 80 else "efficient"
    patch(packed, "_kernel", lambda *_: kernel)  # the proof of a kernel needs values
    mapping = dict(AttentionInterface._global_mapping)
    try:
        yield
    finally:
        for owner, name, value in reversed(originals):
            setattr(owner, name, staticmethod(value) if owner in functions else value)
        AttentionInterface._global_mapping.clear()
        AttentionInterface._global_mapping.update(mapping)


def _apply(self: Any, change: Callable[[Any], Any], recurse: bool = True) -> Any:
    """`nn.Module._apply` for parameters without data, which torch cannot swap in place."""
    import torch

    for child in self.children() if recurse else ():
        _apply(child, change)
    for name, weight in self._parameters.items():
        if weight is not None:
            with torch.no_grad():
                self._parameters[name] = torch.nn.Parameter(change(weight.detach()), weight.requires_grad)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = change(buffer)
    return self


# --- the command ------------------------------------------------------------------------------------------------------


def preload_fake_cuda(sm: int) -> None:
    """Replace this process by one that has the CUDA runtime that does nothing, unless this one has it."""
    if os.environ.get(PRELOADED) == str(sm):
        return
    triton = find_spec("triton")
    include = Path((triton and triton.origin) or "").parent / "backends" / "nvidia" / "include"
    library = Path(tempfile.gettempdir()) / f"kit-fake-cuda-{os.getuid()}" / "libcuda.so.1"
    library.parent.mkdir(exist_ok=True)
    built = library.with_suffix(f".{os.getpid()}")
    command = ["gcc", "-shared", "-fPIC", f"-I{include}", "-Wl,-soname,libcuda.so.1", "-o", built, HERE / "fake_cuda.c"]
    subprocess.run(command, check=True)
    built.replace(library)
    variables = {PRELOADED: str(sm), "FAKE_SM": str(sm), "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    variables |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | variables)


def table(counts: dict[tuple[str, str], dict[str, Count]], arms: Sequence[str], tflops: float, tbs: float) -> str:
    """A Markdown table with the numbers of all arms in each cell."""
    lines = [
        f"| model | work | {' / '.join(arms)}: TFLOP | peak GiB | TB outside products | launches, k | roofline s |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for (model, work), row in counts.items():
        cells = [
            " / ".join(f"{row[arm].tflop:,.0f}" for arm in arms),
            " / ".join(f"{row[arm].peak / GIB:.1f}" for arm in arms),
            *(
                " / ".join(number(row[arm]) for arm in arms if arm != "floor")
                for number in (
                    lambda count: f"{(count.traffic.get('other', 0) + count.traffic.get('attention', 0)) / 1e12:.2f}",
                    lambda count: f"{count.launches / 1e3:.1f}",
                    lambda count: f"{count.seconds(tflops, tbs):.2f}",
                )
            ),
        ]
        lines.append(f"| {model} | {work} | {' | '.join(cells)} |")
    return "\n".join(lines)


def recount(file: Path, models: Sequence[str]) -> None:
    """Count the peaks of these models' rows in the file again, and write them to it."""
    memory = json.loads(file.read_text())
    for row in memory["rows"]:
        if row["model"] not in models:
            continue
        completions, work = row["completions"], "{completions}x{prompt}x{completion}".format(**row)
        layers = next(iter(depths(row["model"])))
        peak = count_model(
            Case(
                row["model"],
                work,
                "ours",
                layers,
                row["checkpointing"],
                row["token_budget"],
                completions,
                row.get("offload", False),
            )
        ).peak
        print(
            f"{row}: {peak:,.0f}, {100 * (peak / row['peak_bytes'] - 1) if row['peak_bytes'] else 0:+.2f} %", flush=True
        )
        row["peak_bytes"] = round(peak)
    shapes = ",\n".join(f"  {json.dumps(name)}: {json.dumps(shape)}" for name, shape in memory["models"].items())
    rows = ",\n".join(f"  {json.dumps(row)}" for row in memory["rows"])
    file.write_text(
        f'{{\n "how": {json.dumps(memory["how"])},\n "models": {{\n{shapes}\n }},\n "rows": [\n{rows}\n ]\n}}\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["qwen2.5-0.5b", "llama-3.1-8b", "gemma-3-4b"], choices=MODELS)
    parser.add_argument("--works", nargs="+", default=list(WORKS))
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=[arm for arm in ARMS if arm != "liger" or find_spec("liger_kernel")]
    )
    parser.add_argument("--sm", type=int, default=90, choices=(75, 89, 90), help="compute capability")
    parser.add_argument("--budget", type=int, help="optimisation.token_budget of our arms")
    parser.add_argument("--micro", type=int, default=16, help="completions of a micro-batch")
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--shallow", action="store_true", help="count two layers of the model only, as the test does")
    parser.add_argument("--offload", action="store_true", help="gradient_checkpointing: offload, in our arms")
    parser.add_argument("--memory", type=Path, metavar="FILE", help="count the peaks of the rows of FILE again")
    parser.add_argument("--tflops", type=float, default=600.0)
    parser.add_argument("--tbs", type=float, default=2.7, help="TB/s")
    parser.add_argument("--out", type=Path, help="file to which a line of JSON is appended for every row")
    options = parser.parse_args()
    preload_fake_cuda(options.sm)
    warnings.filterwarnings("ignore")
    from cost_meter import without_a_gpu

    from kit.models.libraries import UNUSED, hidden

    without_a_gpu()
    with hidden((*UNUSED, "bitsandbytes", "torchao")):  # two seconds of imports
        import trl.trainer.grpo_trainer  # noqa: F401
    if options.memory is not None:
        return recount(options.memory, options.models)
    counts: dict[tuple[str, str], dict[str, Count]] = {}
    for model in options.models:
        for work in options.works:
            row = counts.setdefault((model, work), {})
            for arm in options.arms:
                case = Case(
                    model, work, arm, 0, not options.no_checkpointing, options.budget, options.micro, options.offload
                )
                shallow = replace(case, layers=next(iter(depths(model))))
                row[arm] = count_layers(shallow) if options.shallow else count_model(case)
                print(
                    f"{model} {work} {arm}: {row[arm].tflop:,.1f} TFLOP, {row[arm].peak / GIB:.2f} GiB", file=sys.stderr
                )
                if options.out is not None:
                    with options.out.open("a") as file:
                        file.write(json.dumps({"sm": options.sm, **vars(case), **vars(row[arm])}) + "\n")
    print(table(counts, options.arms, options.tflops, options.tbs))


if __name__ == "__main__":
    main()
