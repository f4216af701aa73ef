"""TRL's interface to vLLM, extended by a seed, the trainer's precision, exact weights, and a timeout.

TRL 1.15 creates the engine in the trainer's constructor and has no arguments for these. During the constructor, `making_engine`
replaces the class of the engine. Remove it when TRL accepts a factory. This module is imported only if vLLM generates, because
TRL's module imports vLLM.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from accelerate.utils.other import get_free_port
from trl.generation import vllm_generation

from kit.errors import EngineError
from kit.models.backend import switched
from kit.models.failures import EngineSettings, engine_failure
from kit.runs.worker import Watchdog

CPU_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""GiB of cache, and no threads pinned to cores, because the trainer uses the same cores. A user's own values have priority."""
PINNED = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
"""Usage statistics are off."""
OF_TRL = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Set by TRL for the start of the engine. They are restored, because they would make this process look launched."""
Result = TypeVar("Result")


class WatchedGeneration(vllm_generation.VLLMGeneration):  # type: ignore[misc]
    """`VLLMGeneration` with a timeout: every call ends with a result or with an `EngineError`."""

    def __init__(
        self,
        model: Any,
        *arguments: Any,
        settings: EngineSettings,
        generation_kwargs: dict[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        self.settings = settings
        settings_of_trl = generation_kwargs or {}
        settings_of_trl = settings_of_trl | {"stop_token_ids": stop_ids(model, settings_of_trl)}
        super().__init__(model, *arguments, generation_kwargs=settings_of_trl, **keywords)

    def _init_vllm(self) -> None:
        self._adapter: Any = None
        """vLLM's request for the current adapter."""
        device = self.accelerator.device
        # Unsloth's engine copies tokens on the stream on which it was started.
        if hasattr(self.model, "vllm_engine"):
            prepare = partial(torch.cuda.set_stream, torch.cuda.current_stream())
        elif device.type == "cuda":  # accelerate's device has no index on one GPU, but set_device needs one
            prepare = partial(torch.cuda.set_device, torch.cuda.current_device())
        else:
            prepare = partial(torch.set_num_threads, torch.get_num_threads())
        self._watchdog = Watchdog(self.settings.timeout, prepare)
        # TRL would use port 29500, like every other run that starts at the same time on another GPU.
        defaults = {"MASTER_PORT": str(get_free_port())} | (CPU_DEFAULTS if device.type == "cpu" else {})
        started_with = PINNED | {name: value for name, value in defaults.items() if name not in os.environ}
        with switched(started_with, *OF_TRL, *CPU_DEFAULTS), self._making():
            self._call("starting", super()._init_vllm)
        if load := getattr(self, "_unsloth_load_lora", None):  # it would write a file into the working directory
            folder = os.environ.get("UNSLOTH_COMPILE_LOCATION", "")
            self._unsloth_load_lora = lambda name, **how: load(os.path.join(folder, name), **how)
        _into_the_log(logging.getLogger("vllm"))

    @contextmanager
    def _making(self) -> Iterator[None]:
        """Adds arguments to TRL's `LLM(...)` inside the block."""
        settings, made = self.settings, getattr(vllm_generation, "LLM", None)
        arguments: dict[str, Any] = {
            "seed": settings.seed + self.accelerator.process_index,
            "max_num_seqs": settings.at_once,
            "dtype": str(settings.dtype or next(self.model.parameters()).dtype).removeprefix("torch."),
            "use_tqdm_on_load": False,
            "enable_prefix_caching": True,  # a prompt is computed once for its group
        }
        if self.accelerator.device.type == "cuda" and arguments["dtype"] != "float32":
            arguments["hf_overrides"] = {"head_dtype": "float32"}  # the trainer's logits are float32 too
        if settings.eager or (settings.eager is None and self.accelerator.device.type == "cpu"):
            arguments["enforce_eager"] = True
        if settings.revision is not None:
            arguments |= {"revision": settings.revision, "tokenizer_revision": settings.revision}
        if settings.adapter_alone:
            rank, tensors = adapter_tensors(self.model)
            arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": engine_rank(rank)}
            # By default vLLM also supports adapters on head, embedding and experts, which costs time at every token.
            arguments["lora_target_modules"] = sorted({name.split(".")[-3] for name in tensors})
        _into_the_log(logging.getLogger("vllm"))
        vllm_generation.LLM = lambda **keywords: self._with_adapter(made(**keywords | arguments))  # type: ignore[misc]
        try:
            yield
        finally:
            vllm_generation.LLM = made

    def _with_adapter(self, llm: Any) -> Any:
        """The engine, with the adapter in every request, and with its weights kept during sleep."""
        if not self.settings.adapter_alone:
            return llm
        generate, sleep = llm.generate, llm.sleep
        llm.generate = lambda *arguments, **keywords: generate(*arguments, **keywords, lora_request=self._adapter)
        llm.sleep = lambda level=1: sleep(level=1)  # level 2 would discard the weights
        manager = llm.llm_engine.model_executor.driver_worker.model_runner.lora_manager
        manager._load_adapter = partial(adapter_from_memory, manager, self.model)
        return llm

    def generate(self, prompts: Any, *rest: Any, **keywords: Any) -> Any:
        """TRL's method with a timeout. Raises `EngineError`."""
        make = partial(super().generate, prompts, *rest, **keywords)
        return self._call(f"making {len(prompts)} completions", make)

    def sync_weights(self) -> None:
        """TRL's method with a timeout. On the CPU, vLLM reloads the weights, because its layers keep packed copies.

        With `adapter_alone`, only the adapter is updated. Raises `EngineError`.
        """
        if self.settings.adapter_alone:
            self._call("taking over the adapter", torch.no_grad()(self._hand_over_adapter))
            return
        take = self._reload if self.accelerator.device.type == "cpu" else super().sync_weights
        self._call("taking over the weights", torch.no_grad()(take))

    def _wake_weights(self) -> None:
        if self.enable_sleep_mode:
            vllm_generation.empty_cache()  # as in TRL's sync_weights: vLLM maps its weights outside of torch's allocator
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False

    def _reload(self) -> None:
        self._wake_weights()
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(weights_iterator=self._iter_named_params())
        # Reloading skips a head that is tied to the embedding, so its packed copy must be updated here.
        for module in runner.get_model().modules():
            if hasattr(module, "cpu_linear") and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)
        self.llm.reset_prefix_cache()

    def _hand_over_adapter(self) -> None:
        """Pass the adapter with a new id, so that vLLM reuses nothing that was cached with an earlier one."""
        from vllm.lora.request import LoRARequest

        self._wake_weights()
        number = 1 if self._adapter is None else self._adapter.lora_int_id + 1
        request = LoRARequest(f"policy-{number}", number, "in memory")
        self.llm.llm_engine.add_lora(request)
        self.llm.reset_prefix_cache()
        self._adapter = request

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The merged weights under the engine's names.

        TRL merges in place and subtracts the adapter again, which rounds the frozen weights at every step. Here they do not
        change: each merged weight is a temporary copy.
        """
        merged = merged_weights(self.model)
        if merged is None:
            yield from super()._iter_named_params()
            return
        for name, weight in merged:
            yield self._fix_param_name_to_vllm(name, extra_prefixes=["modules_to_save.default."]), weight

    def _call(self, doing: str, do: Callable[[], Result]) -> Result:
        def work() -> Result:
            self._wait_for_all_streams()
            result = do()
            self._wait_for_all_streams()
            return result

        try:
            return self._watchdog.call(work)
        except EngineError:
            raise
        except Exception as error:
            raise engine_failure(error, doing, self.settings) from error

    def _wait_for_all_streams(self) -> None:
        """Synchronises the work of this thread and of the trainer's in both directions.

        vLLM uses a separate CUDA stream in every thread. Unsloth starts it in the trainer's thread, so that the optimiser
        does not run on the default stream either. The engine must not read weights before they are written.
        """
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()


def stop_ids(model: Any, generation_kwargs: Mapping[str, Any]) -> list[int]:
    """All ids that end a completion of this model, and those in `generation_kwargs`.

    The engine only reads the end tokens of the model's folder, without the one of the chat template.
    """
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [*(generation_kwargs.get("stop_token_ids") or []), *([ends] if isinstance(ends, int) else ends or [])]
    return sorted({int(number) for number in ids})


def adapter_tensors(model: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """The rank and the tensors of a LoRA model by PEFT's names, with the scale in B. Active adapters are combined into one.

    Raises `EngineError` for adapters other than plain LoRA on linear layers.
    """
    from peft.tuners.lora import LoraLayer

    tensors: dict[str, torch.Tensor] = {}
    ranks = {0}
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        active = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
        plain = isinstance(layer.get_base_layer(), torch.nn.Linear) and not (layer.merged or layer.lora_variant)
        if not active or not plain or any(layer.lora_B[adapter].bias is not None for adapter in active):
            raise EngineError(
                f"The adapter of {name} is not plain LoRA on a linear layer, but vLLM supports no other adapters. Set "
                "generation.vllm.hand_over: merged."
            )
        down = torch.cat([layer.lora_A[adapter].weight.detach() for adapter in active])
        up = torch.cat([layer.lora_B[adapter].weight.detach() * layer.scaling[adapter] for adapter in active], dim=1)
        tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        ranks.add(len(down))
    return max(ranks), tensors


def engine_rank(rank: int) -> int:
    """The smallest rank of vLLM that is at least `rank`. vLLM refuses larger ranks than it supports."""
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    return min((room for room in get_args(MaxLoRARanks) if room >= rank), default=rank)


def adapter_from_memory(manager: Any, model: Any, request: Any) -> Any:
    """Replaces a loader of vLLM's worker that reads files: returns the current adapter of the trained model.

    Raises `EngineError` if the engine does not support an adapted layer, which it would ignore silently.
    """
    from vllm.lora.peft_helper import PEFTHelper

    rank, tensors = adapter_tensors(model)
    inner = manager._adapter_manager
    renamed = getattr(inner.model, "hf_to_vllm_mapper", None)
    lora = manager._lora_model_cls.from_lora_tensors(
        request.lora_int_id,
        tensors,
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
        device=str(manager.device),
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=renamed and renamed.get_rename_mapper(),
    )
    lora.is_3d_lora_weight = request.is_3d_lora_weight
    taken = {*inner.modules, *(part for parts in inner.packed_modules.values() for part in parts)}
    if left := sorted(set(lora.loras) - taken):
        raise EngineError(
            f"vLLM does not support adapters on {len(left)} of the adapted layers (e.g. {left[0]}). Set model.lora.targets to "
            "layers of attention and MLP, or generation.vllm.hand_over: merged."
        )
    return lora


def merged_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]] | None:
    """(name in the base model, merged weight) of a LoRA model; None unless it is plain LoRA on linear layers."""
    from peft import PeftModel
    from peft.tuners.lora import Linear as LoraLinear
    from peft.tuners.lora import LoraLayer

    if not isinstance(model, PeftModel):
        return None
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for layer in layers.values():
        plain = type(layer) is LoraLinear and isinstance(layer.base_layer, torch.nn.Linear) and not layer.merged
        if not plain or layer.lora_variant:
            return None
    return _merged(model, layers)


def _merged(model: Any, layers: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in model.named_parameters():
        if model.prefix in name or "original_module" in name:  # an adapter's, or replaced by modules_to_save
            continue
        layer = layers.get(name.removesuffix(".base_layer.weight"))
        data = weight.data
        if layer is not None and name.endswith(".base_layer.weight"):
            for adapter in (name for name in layer.active_adapters if name in layer.lora_A):
                data = (data.float() + layer.get_delta_weight(adapter).float()).to(weight.dtype)
        yield name.removeprefix("base_model.model.").replace(".base_layer", ""), data


@contextmanager
def making_engine(trainer_class: type, settings: EngineSettings | None) -> Iterator[None]:
    """Makes a trainer of this class use `WatchedGeneration` inside the block. settings None: no change."""
    modules = [sys.modules[base.__module__] for base in trainer_class.__mro__ if base.__module__ in sys.modules]
    swapped = [module for module in modules if hasattr(module, "VLLMGeneration")]
    if settings is None or not swapped:
        yield
        return
    module: Any = swapped[0]
    made = module.VLLMGeneration
    module.VLLMGeneration = partial(WatchedGeneration, settings=settings)
    try:
        yield
    finally:
        module.VLLMGeneration = made


def _into_the_log(logger: logging.Logger) -> None:
    """Removes the handler with which vLLM's logger writes to the terminal."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.propagate = True
    logger.setLevel(logging.WARNING)
