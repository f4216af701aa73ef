"""A process with one of two trainer classes: `worker.py stock FOLDER`, then `worker.py unsloth FOLDER`.

`stock` makes rollouts of every recipe and computes losses and LoRA gradients from them. `unsloth` lets Unsloth generate the
trainer class for CUDA, on the CPU, and computes the same values from the same rollouts. Both write `WHICH.pt`. Since
importing Unsloth takes longer than either, a fork of that process runs `packs_on_unsloth.py`, which writes `packs.pt`.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiny_qwen import TARGETS, placed_ids, tiny_qwen, tiny_settings, tiny_tokenizer

SWITCHES = {"UNSLOTH_ALLOW_CPU": "1", "UNSLOTH_COMPILE_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1"}
PROMPTS = ["3 + 5 =", "State the final answer to the following problem: 12 - 4 + 7 =", "1 =", "The sum of 2 and 7 is"]
WITH_KL = "grpo with kl"
KL = {"name": "kl", "coef": 0.5}


def generate_unsloths_class() -> None:
    """Generate Unsloth's trainer class, as `import unsloth` does on a machine with CUDA."""
    gc.disable()  # modules leave no garbage, and searching for it takes a third of the import time
    import unsloth  # noqa: F401
    from unsloth.models import rl

    gc.freeze()
    gc.enable()
    rl.patch_trl_disable_gradient_checkpointing()
    rl.patch_trl_fused_lm_head_devices()
    rl.patch_trl_fused_lm_head_kernel()
    rl._patch_trl_rl_trainers_impl("grpo_trainer")


def recipes() -> list[str]:
    """Return the names of the recipes that need no teacher model."""
    from kit.objective import Objective
    from kit.objective.recipes import recipe_names

    needs = {name: Objective.from_spec(name).needs for name in recipe_names()}
    return [name for name, needed in needs.items() if not any(need.startswith("teacher") for need in needed)]


def objectives() -> dict[str, dict[str, Any]]:
    return {name: {"recipe": name} for name in recipes()} | {WITH_KL: {"recipe": "grpo", "regularizers": [KL]}}


class Bench:
    """Builds trainers of one tiny model, with the same random weights each time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = tiny_tokenizer()

    def model(self) -> Any:
        import torch
        from peft import LoraConfig, get_peft_model

        model = tiny_qwen(self.tokenizer)
        torch.manual_seed(0)
        lora = LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM")
        wrapped = get_peft_model(model, lora)
        wrapped.for_training = types.MethodType(lambda self, *_, **__: self.train(), wrapped)
        wrapped.for_inference = types.MethodType(lambda self, *_, **__: self.eval(), wrapped)
        return wrapped

    def arguments(self, **changes: Any) -> Any:
        from trl import GRPOConfig

        from kit.trainer.arguments import pinned

        settings = tiny_settings(self.tokenizer, self.folder / "run")
        settings |= {"fp16": False, "gradient_accumulation_steps": 2, "steps_per_generation": 2}
        return pinned(GRPOConfig, settings | changes)

    def trainer(self, objective: Any, unchecked: bool = True, **changes: Any) -> Any:
        import torch
        from datasets import Dataset

        from kit.trainer.trainer import HookedGRPOTrainer

        torch.manual_seed(0)
        return HookedGRPOTrainer(
            self.model(),
            placed_ids,
            self.arguments(**changes),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=self.tokenizer,
            objective=objective,
            first_step_checks=not unchecked,
        )

    def trainer_of(self, name: str, objective: dict[str, Any]) -> Any:
        on_policy = name == "rloo"
        return self.trainer(objective, num_iterations=1 if on_policy else 2)


def rollout(trainer: Any) -> list[dict[str, Any]]:
    """Return two micro-batches with a completion of each prompt, so that left padding is ragged; some completions end early."""
    import torch

    trainer.model.train()
    torch.manual_seed(3)
    rows = [row for row in trainer.train_dataset.to_list() for _ in range(4)]
    output = trainer._generate_and_score_completions(rows)
    order = torch.arange(16).view(4, 4).T.reshape(-1)
    picks = order[:4], order[4:8]
    return [
        {
            name: value[pick] if value.dim() else value
            for name, value in output.items()
            if isinstance(value, torch.Tensor)
        }
        for pick in picks
    ]


def adapters(model: Any) -> dict[str, Any]:
    """Return copies of the current LoRA weights."""
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if ".default." in name}


def loss_and_gradients(trainer: Any, batches: list[dict[str, Any]], drifted: bool) -> dict[str, Any]:
    import torch

    trainer.model.train()
    generator = torch.Generator().manual_seed(1)
    weights = {name: weight for name, weight in trainer.model.named_parameters() if ".default." in name}
    if drifted:
        with torch.no_grad():
            for weight in weights.values():
                weight += 0.03 * torch.randn(weight.shape, generator=generator)
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 2
    losses = []
    for inputs in batches:
        loss = trainer.compute_loss(trainer.model, dict(inputs))
        loss.backward()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), "gradients": {name: weight.grad.clone() for name, weight in weights.items()}}


def computed(bench: Bench, make: Callable[[str, Any], list[dict[str, Any]]]) -> dict[str, Any]:
    results = {}
    for name, objective in objectives().items():
        trainer = bench.trainer_of(name, objective)
        batches = make(name, trainer)
        result = loss_and_gradients(trainer, batches, drifted=name != "rloo")
        results[name] = result | {"batches": batches}
    return results


def with_kits_arguments(which: str) -> dict[str, Any]:
    """Return the trainer arguments that `grpo_config` derives from the preset `quickstart`, as plain values."""
    from kit.config import load_config
    from kit.models.backend import Backend
    from kit.trainer.arguments import grpo_config

    config = load_config("quickstart", ["model.dtype=float32"])
    backend = Backend("transformers" if which == "stock" else "unsloth", "cuda", "")
    return grpo_config(config, backend, Path("run"), [1.0]).to_dict()


def stock(folder: Path) -> dict[str, Any]:
    bench = Bench(folder)

    return {"recipes": computed(bench, lambda _, trainer: rollout(trainer)), "arguments": with_kits_arguments("stock")}


def unsloth(folder: Path) -> dict[str, Any]:
    import torch
    import trl
    from guards_on_unsloth import planted

    from kit.trainer.arguments import true_defaults
    from kit.trainer.trainer import HookedGRPOTrainer

    bench = Bench(folder)
    stock = torch.load(folder / "stock.pt", weights_only=False)["recipes"]
    moved = inspect.signature(trl.GRPOConfig).parameters
    defaults = true_defaults(trl.GRPOConfig)
    trained = bench.trainer({"recipe": "grpo", "regularizers": [KL]}, unchecked=False, max_steps=2, logging_steps=1)
    before = adapters(trained.model)
    trained.train()
    twice = bench.trainer("dapo", num_iterations=2, max_steps=2, logging_steps=1)
    twice.train()
    return {
        "class": [cls.__name__ for cls in HookedGRPOTrainer.__mro__],
        "constructors": [
            inspect.getsource(cls.__init__) for cls in HookedGRPOTrainer.__mro__ if "Unsloth" in cls.__name__
        ],
        "recipes": computed(bench, lambda name, _: stock[name]["batches"]),
        "arguments": with_kits_arguments("unsloth"),
        "moved": {
            name: [value, moved[name].default]
            for name, value in defaults.items()
            if name in moved and moved[name].default != value
        },
        "log": trained.state.log_history,
        "float32": float32_on_a_newer_gpu(bench),
        "shares asleep": shares_asleep(),
        "completions at once": completions_at_once(),
        "towers": {name: towers(name) for name in ("gemma3", "qwen3_5")},
        "moved_by": {name: (after - before[name]).abs().max() for name, after in adapters(trained.model).items()},
        "steps": trained.state.global_step,
        "guards": planted(bench),
        "savings": twice.savings_report
        | {"packing": twice.packing_report}
        | {"ratios": [entry["ratio/abs_log"] for entry in twice.state.log_history if "ratio/abs_log" in entry]},
    }


def towers(architecture: str) -> dict[str, Any]:
    """Return the layers of a multimodal model to which PEFT, and Unsloth's code for CUDA, add adapters."""
    from unittest import mock

    import torch
    from peft import get_peft_model
    from transformers import AutoConfig, AutoModelForImageTextToText
    from unsloth.models.llama import FastLlamaModel
    from unsloth.models.vision import FastBaseModel

    from kit.config import ModelConfig
    from kit.model_check.tiny import tiny_config
    from kit.models.family import adapter_of
    from kit.models.loading import adapter
    from kit.models.unsloth import Loading, adapter_arguments

    config = tiny_config(AutoConfig.for_model(architecture), 512)
    lora = adapter(ModelConfig(), adapter_of(config))

    def adapted(make: Callable[[Any], Any], engine: bool = False) -> Any:
        model = AutoModelForImageTextToText.from_config(config)
        model.max_seq_length = 64
        if engine:
            model.vllm_engine = model.fast_generate = model.fast_generate_batches = torch.nn.Identity()
        try:
            return sorted({name.split(".lora_A")[0] for name, _ in make(model).named_parameters() if ".lora_A" in name})
        except RuntimeError as error:
            return str(error)

    def unsloths(model: Any, **other: Any) -> Any:
        return FastLlamaModel.get_peft_model(model, **adapter_arguments(lora, Loading(), model) | other)

    # Disable CUDA kernels, and messages about `all-linear`.
    with (
        mock.patch.object(FastBaseModel, "post_patch_model", staticmethod(lambda model, *_, **__: model)),
        mock.patch.dict(os.environ, {"UNSLOTH_USE_NEW_MODEL": "1"}),
    ):
        return {
            "transformers": adapted(lambda model: get_peft_model(model, lora)),
            "kit": adapted(unsloths),
            "with an engine": adapted(unsloths, engine=True),
            "all-linear with an engine": adapted(
                lambda model: unsloths(model, target_modules="all-linear"), engine=True
            ),
        }


def model_of_an_engines_weights(folder: Path) -> Any:
    """Build a 4-bit model from weights in vLLM's layout with Unsloth's own function; its engine is a stand-in."""
    from unittest import mock

    import torch
    from bitsandbytes.functional import quantize_4bit
    from stand_in_llm import LLM
    from transformers import AutoConfig, BitsAndBytesConfig
    from unsloth_zoo import empty_model, vllm_utils

    from kit.config import ModelConfig
    from kit.models import unsloth as unsloth_model
    from kit.models.backend import Backend

    state: dict[str, Any] = {}
    source = tiny_qwen(tiny_tokenizer())
    source.generation_config.eos_token_id = [5, 7]
    source.save_pretrained(folder / "tiny")
    for name, weight in source.named_parameters():
        state[name] = weight.data
        if "proj" in name:
            state[name], state[f"{name}.quant_state"] = quantize_4bit(weight.data, quant_type="nf4")

    def from_pretrained(**options: Any) -> tuple[Any, None]:
        config, how = AutoConfig.from_pretrained(folder / "tiny"), BitsAndBytesConfig(load_in_4bit=True)
        config.model_name = options["model_name"]
        os.fstat(sys.stdout.fileno())  # as vLLM does when it creates process groups
        model = vllm_utils.convert_vllm_to_huggingface(state, config, options["dtype"], how)
        model.vllm_engine = LLM(shared_weights=True)
        return model, None

    host, loader = torch.device("cpu"), types.SimpleNamespace(from_pretrained=from_pretrained)
    with (
        mock.patch.object(vllm_utils, "get_target_device", return_value=host),
        mock.patch.object(empty_model, "_get_model_device", return_value=host),
        mock.patch.object(unsloth_model, "fast_language_model", return_value=loader),
    ):
        config, backend = ModelConfig(load_in_4bit=True), Backend("unsloth", "cuda", "")
        loading = unsloth_model.Loading(fast_inference={"gpu_memory_utilization": 0.3})
        return unsloth_model.load(None, config, torch.float32, backend, loading, str(folder / "tiny"))


def shared_engine(folder: Path) -> dict[str, Any]:
    """Record two rollouts of an engine that shares Unsloth's weights and sleeps between the rollouts.

    Uses TRL's class as Unsloth rewrites it, the kit's handle and Unsloth's request for the adapter; only vLLM's engine and the
    class of the request are stand-ins.
    """
    from functools import partial
    from types import ModuleType, SimpleNamespace
    from unittest import mock

    import torch
    from peft import LoraConfig, get_peft_model
    from stand_in_llm import one_gpu, vllm_stands_in, watched
    from unsloth.models.rl_replacements import vllm_generation_init_patch
    from unsloth_zoo import vllm_utils

    from kit.models.backend import Backend, switched, switches

    request = ModuleType("vllm.lora.request")
    request.LoRARequest = lambda name, number, **fields: SimpleNamespace(number=number, **fields)  # type: ignore[attr-defined]
    vllm_generation_init_patch()
    model = get_peft_model(model_of_an_engines_weights(folder), LoraConfig(r=2, target_modules=["q_proj"]))
    model.load_lora = partial(vllm_utils.load_lora, model)
    own = {"UNSLOTH_COMPILE_LOCATION": str(folder / "compiled"), "ACCELERATE_MIXED_PRECISION": "no"}
    stubs = {"vllm": ModuleType("vllm"), "vllm.lora": ModuleType("vllm.lora"), "vllm.lora.request": request}
    with (
        one_gpu(),
        vllm_stands_in(),
        mock.patch.dict(sys.modules, stubs),
        mock.patch.object(vllm_utils, "_check_lora_is_servable"),
        mock.patch.object(vllm_utils, "LORA_REQUEST_ID", None, create=True),  # Unsloth creates it if vLLM is installed
        switched(switches(Backend("unsloth", "cuda", "")) | own),
    ):
        generation = watched(model, standby=True)
        engine = model.vllm_engine
        asleep, rollouts, sums = [set(engine.asleep)], [], []
        for _ in range(2):
            rollouts.append(generation.generate([[1, 2], [3]], None, 1)[1])
            asleep.append(set(engine.asleep))
            tensors = engine.requests[-1].lora_tensors
            sums.append(sum(float(tensor.sum()) for name, tensor in tensors.items() if "lora_B" in name))
            with torch.no_grad():
                next(weight for name, weight in model.named_parameters() if "lora_B" in name).add_(1.0)
    return {
        "rollouts": rollouts, "asleep": asleep, "numbers": [request.number for request in engine.requests], "B": sums,
        "pushed": engine.loaded, "ends": model.generation_config.eos_token_id,
        "written": sorted(path.name for path in Path.cwd().glob("vllm*")),
    }  # fmt: skip


@contextmanager
def engine_of_an_l4(**variables: str) -> Iterator[Callable[..., dict[str, Any]]]:
    """Yield Unsloth's `load_vllm` for an L4; it returns the arguments of vLLM's engine instead of starting the engine."""
    from functools import partial
    from types import ModuleType
    from unittest import mock

    import torch
    from unsloth_zoo import vllm_utils

    from kit.models.backend import switched

    def arguments(
        model: Any, gpu_memory_utilization: Any, enable_sleep_mode: Any, max_num_seqs: Any, max_num_batched_tokens: Any
    ) -> None:
        """Accept the arguments that tests read; Unsloth omits all arguments that an engine does not accept."""

    names = ("LLM", "LLMEngine", "AsyncLLMEngine", "EngineArgs", "AsyncEngineArgs")
    vllm: Any = ModuleType("vllm")
    vars(vllm).update(dict.fromkeys(names, arguments))
    with (
        mock.patch.dict(sys.modules, {"vllm": vllm}),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 9)),
        mock.patch.multiple(
            vllm_utils, create=True, vllm_version="0.31.0", get_mem_info=lambda: (22 << 30, 22 << 30),
            patch_vllm_compute_dtype=mock.Mock(), get_target_device=mock.Mock(), _can_link_libcuda=mock.Mock(),
        ),
        switched(variables, "UNSLOTH_VLLM_STANDBY"),
    ):  # fmt: skip
        yield partial(vllm_utils.load_vllm, "tiny", dtype=torch.bfloat16, use_bitsandbytes=False, return_args=True)


def shares_asleep() -> list[Any]:
    """Return the share of an L4 that an engine with standby gets if 0.3 is configured, with the kit's switches and without."""
    from transformers import AutoConfig

    from kit.models.backend import Backend, switches

    results = []
    for variables in (switches(Backend("unsloth", "cuda", ""), standby=True), {"UNSLOTH_VLLM_STANDBY": "1"}):
        with engine_of_an_l4(**variables) as arguments:
            engine = arguments(AutoConfig.for_model("qwen3"), 0.3, 64)
        results.append((engine["gpu_memory_utilization"], engine["enable_sleep_mode"]))
    return results


def completions_at_once() -> dict[str, dict[int, int]]:
    """Return, by batch size, how many completions Unsloth samples at once (L4, 1.5B weights), with the kit and without."""
    from transformers import AutoConfig

    from kit.config import load_config
    from kit.models.backend import Backend
    from kit.models.unsloth import loading

    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    model = AutoConfig.for_model("qwen2", vocab_size=151936, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
    at_once: dict[str, dict[int, int]] = {"kit": {}, "unsloth": {}}
    for batch in (8, 64, 256, 512):
        keys = ["generation.engine=vllm", f"optimisation.batch_size={batch}"]
        settings = loading(load_config("gsm8k", keys), Backend("unsloth", "cuda", ""), None)
        limit = {"max_num_seqs": settings.fast_inference["max_num_seqs"]}
        share = settings.fast_inference["gpu_memory_utilization"]
        for name, keywords in (("kit", limit), ("unsloth", {})):
            with engine_of_an_l4() as arguments:
                engine = arguments(model, share, settings.max_seq_length, **keywords)
            assert engine["max_num_batched_tokens"] >= engine["max_num_seqs"], (
                "vLLM refuses fewer tokens than sequences"
            )
            at_once[name][batch] = engine["max_num_seqs"]
    return at_once


def float32_on_a_newer_gpu(bench: Bench) -> str:
    """Return the kit's message for an Unsloth trainer with dtype float32 on a GPU that supports bfloat16."""
    from unittest import mock

    from kit.errors import ModelError
    from kit.trainer.arguments import changes, check_precision

    with mock.patch("unsloth_zoo.device_type.device_is_bf16_supported", return_value=True):
        trainer = bench.trainer("grpo")
    try:
        check_precision(changes(bench.arguments(), trainer.args))
    except ModelError as error:
        return str(error)
    return "nothing"


def in_a_fork(work: Callable[[], Any]) -> None:
    """Run `work` in a forked child and wait for it."""
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0, "the forked child failed"
        return
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(which: str, folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    if which == "stock":
        torch.save(stock(folder), folder / "stock.pt")
        return
    import packs_on_unsloth

    switches = SWITCHES | {"TRITON_INTERPRET": "1", "UNSLOTH_COMPILE_LOCATION": str(folder / "unsloth_compiled_cache")}
    os.environ.update(switches)
    generate_unsloths_class()
    in_a_fork(lambda: packs_on_unsloth.main(folder))
    torch.save(unsloth(folder) | {"shared engine": shared_engine(folder)}, folder / "unsloth.pt")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(sys.argv[1], Path(sys.argv[2]))
