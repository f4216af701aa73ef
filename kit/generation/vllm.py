"""TRL's handle on vLLM, with what TRL 1.15 leaves out: a seed, the trainer's precision, exact weights, and a watch.

TRL makes the engine itself, inside the trainer's constructor, and takes no such arguments. So for the time of that
constructor the class it makes the engine with is ours (`making_engine`); this can go when TRL's accepts a factory. Imported
only where completions come from vLLM, because TRL's module imports vLLM.
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
from trl.generation import vllm_generation

from kit.errors import EngineError
from kit.models.backend import switched
from kit.models.failures import EngineSettings, engine_failure
from kit.runs.worker import Watchdog

CPU_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""GiB of cache, and no thread pinned to a core: the trainer uses the same cores. What the user has set stands."""
PINNED = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
"""A training run reports to nobody."""
OF_TRL = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Set by TRL for the engine's start; left behind they would make this process look like one of a launcher's."""
Result = TypeVar("Result")


class WatchedGeneration(vllm_generation.VLLMGeneration):  # type: ignore[misc]
    """`VLLMGeneration` whose every call ends: in a result, or in an `EngineError` that says what to do."""

    def __init__(
        self,
        model: Any,
        *arguments: Any,
        settings: EngineSettings,
        generation_kwargs: dict[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        self.settings = settings
        given = generation_kwargs or {}
        given = given | {"stop_token_ids": stop_ids(model, given)}
        super().__init__(model, *arguments, generation_kwargs=given, **keywords)

    def _init_vllm(self) -> None:
        threads, device = torch.get_num_threads(), self.accelerator.device

        def prepare() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            else:
                torch.set_num_threads(threads)

        self._watchdog = Watchdog(self.settings.timeout, prepare)
        defaults = CPU_DEFAULTS if device.type == "cpu" else {}
        started_with = PINNED | {name: value for name, value in defaults.items() if name not in os.environ}
        with switched(started_with, *OF_TRL, *CPU_DEFAULTS), self._making():
            self._asked("starting", super()._init_vllm)
        _into_the_log(logging.getLogger("vllm"))

    @contextmanager
    def _making(self) -> Iterator[None]:
        """Inside, TRL's `LLM(...)` is also told what it has no argument for."""
        settings, made = self.settings, getattr(vllm_generation, "LLM", None)
        told: dict[str, Any] = {
            "seed": settings.seed + self.accelerator.process_index,
            "dtype": str(settings.dtype or next(self.model.parameters()).dtype).removeprefix("torch."),
            "use_tqdm_on_load": False,
            "enable_prefix_caching": True,  # a prompt is read once for its group
        }
        if settings.eager or (settings.eager is None and self.accelerator.device.type == "cpu"):
            told["enforce_eager"] = True
        if settings.float8_kv_cache:
            told["kv_cache_dtype"] = "fp8"
        if settings.revision is not None:
            told |= {"revision": settings.revision, "tokenizer_revision": settings.revision}
        told |= settings.further
        _into_the_log(logging.getLogger("vllm"))
        vllm_generation.LLM = lambda **given: made(**given | told)  # type: ignore[misc]
        try:
            yield
        finally:
            vllm_generation.LLM = made

    def generate(self, prompts: Any, *rest: Any, **keywords: Any) -> Any:
        """TRL's, watched. Raises `EngineError`."""
        make = partial(super().generate, prompts, *rest, **keywords)
        return self._asked(f"making {len(prompts)} completions", make)

    def sync_weights(self) -> None:
        """TRL's, watched; by vLLM's reloading where its layers keep packed or rounded weights. Raises `EngineError`."""
        packed = self.mode == "colocate" and (
            self.accelerator.device.type == "cpu" or "quantization" in self.settings.further
        )
        take = self._reload if packed else super().sync_weights
        self._asked("taking over the weights", torch.no_grad()(take))

    def _reload(self) -> None:
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(weights_iterator=self._iter_named_params())
        # A head that is tied to the embedding is no weight of its own, so reloading passes it by; its packed copy is old.
        for module in runner.get_model().modules():
            if hasattr(module, "cpu_linear") and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)
        self.llm.reset_prefix_cache()

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as the engine names them, adapters merged in.

        TRL merges in place and takes the adapter off again, which rounds the frozen weights anew at every step. Here they
        are read only: each merged weight is made, handed over and forgotten.
        """
        merged = None if self._dist.is_fsdp or self._dist.is_zero3 else merged_weights(self.model)
        if merged is None:
            yield from super()._iter_named_params()
            return
        for name, weight in merged:
            yield self._fix_param_name_to_vllm(name, extra_prefixes=["modules_to_save.default."]), weight

    def _asked(self, doing: str, do: Callable[[], Result]) -> Result:
        try:
            return self._watchdog.call(do)
        except EngineError:
            raise
        except Exception as error:
            raise engine_failure(error, doing, self.settings) from error


def stop_ids(model: Any, given: Mapping[str, Any]) -> list[int]:
    """Every id that ends a completion of this model, and what generation was told already.

    By itself the engine knows the ends that stand in the model's folder, and not the one of the chat template.
    """
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [*(given.get("stop_token_ids") or []), *([ends] if isinstance(ends, int) else ends or [])]
    return sorted({int(one) for one in ids})


def merged_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]] | None:
    """(name in the base model, weight with its adapter) of a LoRA model; None for what is not plain LoRA on linear layers."""
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
        if model.prefix in name or "original_module" in name:  # an adapter's own, or what modules_to_save replaced
            continue
        layer = layers.get(name.removesuffix(".base_layer.weight"))
        data = weight.data
        if layer is not None and name.endswith(".base_layer.weight"):
            for adapter in (name for name in layer.active_adapters if name in layer.lora_A):
                data = (data.float() + layer.get_delta_weight(adapter).float()).to(weight.dtype)
        yield name.removeprefix("base_model.model.").replace(".base_layer", ""), data


@contextmanager
def making_engine(trainer_class: type, settings: EngineSettings | None) -> Iterator[None]:
    """Inside, a trainer of this class makes its engine with `WatchedGeneration`. None: TRL's own, or none at all."""
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
    """vLLM's logger writes to the terminal by a handler of its own; here it goes where all others go."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.propagate = True
    logger.setLevel(logging.WARNING)
