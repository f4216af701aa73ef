"""TRL's handle on vLLM, with what TRL 1.15 leaves out: a seed, the trainer's precision, exact weights, and a watch.

TRL makes the engine itself, inside the trainer's constructor, and takes no such arguments. So for the time of that
constructor the class it makes the engine with is ours (`making_engine`); this can go when TRL's accepts a factory. Imported
only where completions come from vLLM, because TRL's module imports vLLM.
"""

from __future__ import annotations

import logging
import os
import socket
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
        settings_of_trl = generation_kwargs or {}
        settings_of_trl = settings_of_trl | {"stop_token_ids": stop_ids(model, settings_of_trl)}
        super().__init__(model, *arguments, generation_kwargs=settings_of_trl, **keywords)

    def _init_vllm(self) -> None:
        self._adapter: Any = None
        """vLLM's request for the adapter that was handed over last."""
        device = self.accelerator.device
        # Unsloth's: it copies its tokens in step with the stream that it started in.
        if hasattr(self.model, "vllm_engine"):
            prepare = partial(torch.cuda.set_stream, torch.cuda.current_stream())
        elif device.type == "cuda":  # accelerate leaves the index out on one GPU, and torch sets no device without it
            prepare = partial(torch.cuda.set_device, torch.cuda.current_device())
        else:
            prepare = partial(torch.set_num_threads, torch.get_num_threads())
        self._watchdog = Watchdog(self.settings.timeout, prepare)
        # TRL takes 29500 where that is free by then, as every run does that starts at the same time on another GPU.
        defaults = {"MASTER_PORT": free_port()} | (CPU_DEFAULTS if device.type == "cpu" else {})
        started_with = PINNED | {name: value for name, value in defaults.items() if name not in os.environ}
        with switched(started_with, *OF_TRL, *CPU_DEFAULTS), self._making():
            self._asked("starting", super()._init_vllm)
        if load := getattr(self, "_unsloth_load_lora", None):  # it writes a file under a name without a folder
            folder = os.environ.get("UNSLOTH_COMPILE_LOCATION", "")
            self._unsloth_load_lora = lambda name, **how: load(os.path.join(folder, name), **how)
        _into_the_log(logging.getLogger("vllm"))

    @contextmanager
    def _making(self) -> Iterator[None]:
        """Inside, TRL's `LLM(...)` is also told what it has no argument for."""
        settings, made = self.settings, getattr(vllm_generation, "LLM", None)
        arguments: dict[str, Any] = {
            "seed": settings.seed + self.accelerator.process_index,
            "dtype": str(settings.dtype or next(self.model.parameters()).dtype).removeprefix("torch."),
            "use_tqdm_on_load": False,
            "enable_prefix_caching": True,  # a prompt is read once for its group
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
            # By itself vLLM makes room for adapters on the head, the embedding and experts too, which cost time at every token.
            arguments["lora_target_modules"] = sorted({name.split(".")[-3] for name in tensors})
        _into_the_log(logging.getLogger("vllm"))
        vllm_generation.LLM = lambda **given: self._told(made(**given | arguments))  # type: ignore[misc]
        try:
            yield
        finally:
            vllm_generation.LLM = made

    def _told(self, llm: Any) -> Any:
        """The engine, which is told of the adapter in every request, and keeps its weights while it sleeps."""
        if not self.settings.adapter_alone:
            return llm
        generate, sleep = llm.generate, llm.sleep
        llm.generate = lambda *arguments, **keywords: generate(*arguments, **keywords, lora_request=self._adapter)
        llm.sleep = lambda level=1: sleep(level=1)  # nothing would bring back what level 2 forgets
        manager = llm.llm_engine.model_executor.driver_worker.model_runner.lora_manager
        manager._load_adapter = partial(adapter_from_memory, manager, self.model)
        return llm

    def generate(self, prompts: Any, *rest: Any, **keywords: Any) -> Any:
        """TRL's, watched. Raises `EngineError`."""
        make = partial(super().generate, prompts, *rest, **keywords)
        return self._asked(f"making {len(prompts)} completions", make)

    def sync_weights(self) -> None:
        """TRL's, watched; by vLLM's reloading where its layers keep packed or rounded weights, or of the adapter alone.

        Raises `EngineError`.
        """
        if self.settings.adapter_alone:
            self._asked("taking over the adapter", torch.no_grad()(self._hand_over_adapter))
            return
        take = self._reload if self.accelerator.device.type == "cpu" else super().sync_weights
        self._asked("taking over the weights", torch.no_grad()(take))

    def _wake_weights(self) -> None:
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False

    def _reload(self) -> None:
        self._wake_weights()
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(weights_iterator=self._iter_named_params())
        # A head that is tied to the embedding is no weight of its own, so reloading passes it by; its packed copy is old.
        for module in runner.get_model().modules():
            if hasattr(module, "cpu_linear") and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)
        self.llm.reset_prefix_cache()

    def _hand_over_adapter(self) -> None:
        """The adapter under a number that it never had: nothing that was cached with another is taken for it."""
        from vllm.lora.request import LoRARequest

        self._wake_weights()
        number = 1 if self._adapter is None else self._adapter.lora_int_id + 1
        request = LoRARequest(f"policy-{number}", number, "in memory")
        self.llm.llm_engine.add_lora(request)
        self.llm.reset_prefix_cache()
        self._adapter = request

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as the engine names them, adapters merged in.

        TRL merges in place and takes the adapter off again, which rounds the frozen weights anew at every step. Here they
        are read only: each merged weight is made, handed over and forgotten.
        """
        merged = merged_weights(self.model)
        if merged is None:
            yield from super()._iter_named_params()
            return
        for name, weight in merged:
            yield self._fix_param_name_to_vllm(name, extra_prefixes=["modules_to_save.default."]), weight

    def _asked(self, doing: str, do: Callable[[], Result]) -> Result:
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
        """Orders the work of this thread and of the trainer's, each way.

        vLLM moves every thread that it works in to a CUDA stream of its own; Unsloth starts it in the trainer's thread, so
        that the optimiser does not write on the default stream either. What the engine reads must have been written.
        """
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()


def free_port() -> str:
    """A TCP port that nobody uses."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return str(listener.getsockname()[1])


def stop_ids(model: Any, generation_kwargs: Mapping[str, Any]) -> list[int]:
    """Every id that ends a completion of this model, and what generation was told already.

    By itself the engine knows the ends that stand in the model's folder, and not the one of the chat template.
    """
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [*(generation_kwargs.get("stop_token_ids") or []), *([ends] if isinstance(ends, int) else ends or [])]
    return sorted({int(number) for number in ids})


def adapter_tensors(model: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """Rank, and the tensors of a LoRA model by PEFT's names, their scale in B; adapters that are active together as one.

    Raises `EngineError` for what is not plain LoRA on linear layers.
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
                f"The adapter of {name} is not plain LoRA on a linear layer, which is all that vLLM takes as an adapter. Set "
                "generation.vllm.hand_over: merged."
            )
        down = torch.cat([layer.lora_A[adapter].weight.detach() for adapter in active])
        up = torch.cat([layer.lora_B[adapter].weight.detach() * layer.scaling[adapter] for adapter in active], dim=1)
        tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        ranks.add(len(down))
    return max(ranks), tensors


def engine_rank(rank: int) -> int:
    """The least rank that vLLM has room for and that holds this one; above all of them vLLM refuses it."""
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    return min((room for room in get_args(MaxLoRARanks) if room >= rank), default=rank)


def adapter_from_memory(manager: Any, model: Any, request: Any) -> Any:
    """Replaces a loader of vLLM's worker, which reads files: returns the adapter of the trained model as it is now.

    Raises `EngineError` for a layer that the engine has no adapter for: it would be left out without a word.
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
            f"vLLM takes no adapter on {len(left)} of the adapted layers ({left[0]}, for example). Set model.lora.targets to "
            "layers of attention and MLP, or generation.vllm.hand_over: merged."
        )
    return lora


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
