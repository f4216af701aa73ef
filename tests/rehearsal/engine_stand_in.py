"""A package `vllm` 0.31 for the rehearsal: the parts that TRL's `VLLMGeneration` and the kit call, over a transformers model.

`install(FOLDER)` writes it into a folder for `sys.path`, with a distribution of that name. It enforces the rules of the
engine, so that a caller who breaks one fails here as on a GPU:

- sleep of level 2 discards the weights, and both levels the cache; generating while either sleeps raises a `RuntimeError`;
- bitsandbytes' quantisation is only known if `vllm_bnb_plugin` is installed (vLLM removed it in 0.28);
- weights are copied when they are loaded, so a step without a hand-over generates with the old ones;
- each request names its adapter by a number that was added before.
"""

from __future__ import annotations

import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.version import Version

MODULES = {
    "vllm": "from engine_stand_in import LLM, RequestOutput, SamplingParams\n__version__ = '0.31.0'\n",
    "vllm.sampling_params": "from engine_stand_in import SamplingParams, StructuredOutputsParams\n",
    "vllm.utils": "",
    "vllm.utils.network_utils": "def get_ip(): return '127.0.0.1'\n",
    "vllm.distributed": "",
    "vllm.distributed.weight_transfer": "",
    "vllm.distributed.weight_transfer.nccl_common": "trainer_init = None\n",
    "vllm.distributed.weight_transfer.packed_tensor": "packed_nccl_broadcast_producer = None\n",
    "vllm.lora": "",
    "vllm.lora.request": "from engine_stand_in import LoRARequest\n",
    "vllm.lora.peft_helper": "from engine_stand_in import PEFTHelper\n",
    "vllm.config": "",
    "vllm.config.lora": "from typing import Literal\nMaxLoRARanks = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]\n",
}


def install(folder: Path) -> None:
    """Write the packages of the extra `vllm` as stand-ins, and put their folder first on `sys.path`."""
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for name, text in MODULES.items():
        path = folder.joinpath(*name.split("."))
        path.mkdir(parents=True, exist_ok=True)
        (path / "__init__.py").write_text(text)
    for requirement in map(Requirement, extras["vllm"]):
        name = requirement.name.replace("-", "_")
        version = max((bound.version for bound in requirement.specifier), key=Version)
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "__init__.py").touch()
        metadata = folder / f"{name}-{version}.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {requirement.name}\nVersion: {version}\n")
    sys.path.insert(0, str(folder))


class SamplingParams(SimpleNamespace):
    """The settings of a request."""


class StructuredOutputsParams(SimpleNamespace):
    """The grammar of a request."""


class RequestOutput(SimpleNamespace):
    """A result with `prompt_token_ids` and `outputs`, each with `token_ids` and `logprobs`."""


class LoRARequest(SimpleNamespace):
    """A request with an adapter's name and number."""

    def __init__(self, lora_name: str, lora_int_id: int, lora_path: str = "", **tensors: Any) -> None:
        named = {"lora_name": lora_name, "lora_int_id": lora_int_id, "lora_path": lora_path, "is_3d_lora_weight": False}
        super().__init__(**named | tensors)


class PEFTHelper(SimpleNamespace):
    """Rank and scale of an adapter."""


class _LoadedAdapter:
    """vLLM's `LoRAModel`: copies of an adapter's matrices by layer name."""

    is_3d_lora_weight = False

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.loras: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            layer, _, matrix = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
            self.loras.setdefault(layer, {})[matrix] = tensor.detach().cpu().clone()

    @classmethod
    def from_lora_tensors(cls, number: int, tensors: dict[str, torch.Tensor], *_: Any, **__: Any) -> _LoadedAdapter:
        return cls(tensors)


class LLM:
    """An engine with its own weights, read from the model's folder; it samples from the model at the temperature."""

    made: list[LLM] = []  # noqa: RUF012 (the engines of this process, for whoever looks at them)

    def __init__(self, model: str, shared_weights: bool = False, **settings: Any) -> None:
        from transformers import AutoModelForCausalLM

        if settings.get("quantization") == "bitsandbytes" and find_spec("vllm_bnb_plugin") is None:
            raise ValueError("Unknown quantization method: bitsandbytes.")
        self.settings, self.calls, self.shared_weights = settings, [], shared_weights
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, settings["dtype"])).eval()
        # The stand-in computes on the host, without simulated operations.
        self.model.to("cpu")
        self.tied = self.model.config.get_text_config().tie_word_embeddings
        self.draw = torch.Generator().manual_seed(settings["seed"])
        self.asleep: set[str] = set()
        self.adapters: dict[int, _LoadedAdapter] = {}
        names = {name for name, layer in self.model.named_modules() if isinstance(layer, torch.nn.Linear)}
        manager = SimpleNamespace(
            _adapter_manager=SimpleNamespace(model=self.model, modules=dict.fromkeys(names), packed_modules={}),
            _lora_model_cls=_LoadedAdapter, device="cpu", vocab_size=None,
            lora_config=SimpleNamespace(lora_dtype=torch.float32),
        )  # fmt: skip
        runner = SimpleNamespace(
            model=SimpleNamespace(load_weights=self.load_weights), get_model=lambda: self.model, lora_manager=manager
        )
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(
            model_executor=executor,
            add_lora=lambda request: self.adapters.__setitem__(request.lora_int_id, manager._load_adapter(request)),
            model_config=SimpleNamespace(max_model_len=settings["max_model_len"] or 512),
            vllm_config=SimpleNamespace(
                model_config=SimpleNamespace(max_model_len=settings["max_model_len"], enable_sleep_mode=True),
                lora_config=manager.lora_config,
            ),
        )
        LLM.made.append(self)

    def load_weights(self, weights: Any) -> set[str]:
        if "weights" in self.asleep:
            raise RuntimeError("CUDA error: an illegal memory access was encountered: weights written while they sleep")
        mine = dict(self.model.named_parameters())
        for name, tensor in weights:
            if name not in mine and not (self.tied and name == "lm_head.weight"):
                raise KeyError(name)
            with torch.no_grad():
                mine.get(name, self.model.get_input_embeddings().weight).copy_(tensor.detach().cpu())
        if self.calls[-1:] != ["load_weights"]:
            self.calls.append("load_weights")
        return set()

    def sleep(self, level: int = 1) -> None:
        self.asleep = {"kv_cache"} if self.shared_weights else {"weights", "kv_cache"}
        self.calls.append(f"sleep {level}")
        if level == 2 and not self.shared_weights:
            with torch.no_grad():
                for weight in self.model.parameters():
                    weight.fill_(torch.nan)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.asleep -= set(tags or ("weights", "kv_cache"))
        self.calls.append(f"wake_up {' '.join(tags or [])}".strip())

    def reset_prefix_cache(self) -> bool:
        return True

    @torch.no_grad()
    def generate(
        self, prompts: list[dict[str, Any]], sampling_params: Any = None, use_tqdm: bool = False, lora_request: Any = None
    ) -> list[RequestOutput]:  # fmt: skip
        if self.asleep:
            raise RuntimeError(f"CUDA error: an illegal memory access was encountered: {sorted(self.asleep)} asleep")
        self.calls.append("generate")
        if hasattr(lora_request, "lora_tensors"):  # Unsloth's request has the adapter itself, with its scale apart
            scale = lora_request.lora_config["lora_alpha"] / lora_request.lora_config["r"]
            tensors = {
                name: tensor * (scale if "lora_B" in name else 1) for name, tensor in lora_request.lora_tensors.items()
            }
            self.adapters[lora_request.lora_int_id] = _LoadedAdapter(tensors)
        with _AdapterOn(self.model, None if lora_request is None else self.adapters[lora_request.lora_int_id]):
            return [self._complete(prompt["prompt_token_ids"], sampling_params) for prompt in prompts]

    def _complete(self, prompt: list[int], how: Any) -> RequestOutput:
        ids, logps = list(prompt), []
        ends = set(how.stop_token_ids)
        for _ in range(how.max_tokens):
            logits = self.model(torch.tensor([ids])).logits[0, -1].float()
            logp = (logits / (how.temperature or 1.0)).log_softmax(-1)
            greedy = how.temperature == 0
            token = int(logp.argmax() if greedy else torch.multinomial(logp.exp(), 1, generator=self.draw))
            ids.append(token)
            logps.append({token: SimpleNamespace(logprob=float(logp[token]), rank=1)})
            if token in ends:
                break
        completion = SimpleNamespace(token_ids=ids[len(prompt) :], logprobs=logps)
        return RequestOutput(prompt_token_ids=list(prompt), outputs=[completion])


class _AdapterOn:
    """A context in which the model's layers add B·A of an adapter."""

    def __init__(self, model: Any, adapter: _LoadedAdapter | None) -> None:
        self.model, self.adapter, self.hooks = model, adapter, []

    def __enter__(self) -> None:
        layers = dict(self.model.named_modules())
        for name, pair in (self.adapter.loras if self.adapter else {}).items():
            down, up = pair["lora_A"], pair["lora_B"]

            def add(_: Any, inputs: Any, output: Any, down: Any = down, up: Any = up) -> Any:
                return output + (inputs[0].float() @ down.float().T @ up.float().T).to(output.dtype)

            self.hooks.append(layers[name].register_forward_hook(add))

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()
