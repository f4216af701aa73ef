"""Training that continues an adapter (`model.adapter`), for example one of supervised fine-tuning.

The reference policy is the initial policy. TRL scores it with the adapter named `ref` if there is one, else with disabled
adapters. The model therefore gets a copy of the initial adapter under that name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kit.config import LoraConfig, ModelConfig
from kit.errors import ModelError

REFERENCE = "ref"
"""TRL's name for the adapter of the reference policy."""
TRAINED = "default"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def settings_of(adapter: Path) -> dict[str, Any]:
    """The configuration of a saved adapter."""
    content: dict[str, Any] = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))
    return content


def digest_of(adapter: Path) -> str:
    """The SHA-256 of the weights and settings of a saved adapter."""
    files = (adapter / CONFIG, adapter / WEIGHTS)
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def find_start(config: ModelConfig) -> Path | None:
    """The folder of the configured adapter; None if there is none. Raises `ModelError`."""
    if config.adapter is None:
        return None
    folder, name = Path(config.adapter).expanduser(), config.adapter
    if not folder.is_dir():
        if name.count("/") != 1 or name.startswith((".", "/", "~")):
            raise ModelError(f"model.adapter: there is no folder {name}. Use an adapter's folder, or a hub id.")
        from huggingface_hub import snapshot_download

        try:
            patterns = ["adapter_*", "token*", "*.jinja", "vocab*", "merges*"]
            folder = Path(snapshot_download(name, allow_patterns=patterns))
        except Exception as error:  # any error of the hub's client means that it is not available
            raise ModelError(
                f"model.adapter: {name} is no folder, and downloading it as a hub id failed ({error})."
            ) from error
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ModelError(
                f"model.adapter: {folder} has no {name}, so it is not an adapter of PEFT. Use the folder that "
                "`save_pretrained` wrote, or set model.name if it is a complete model."
            )
    settings = settings_of(folder)
    odd = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out", "target_parameters")
    kinds = [key for key in odd if settings.get(key)]  # beyond plain LoRA on linear layers
    kinds += ["biases"] if settings.get("bias", "none") != "none" else []
    kinds += [str(settings.get("peft_type"))] if settings.get("peft_type") != "LORA" else []
    if kinds:
        raise ModelError(
            f"model.adapter: {folder} is an adapter with {', '.join(kinds)}, which cannot be exported exactly after "
            "training. Merge it into its base model (PEFT's merge_and_unload), and set model.name to the result."
        )
    return folder


def described(config: ModelConfig) -> ModelConfig:
    """The configuration with the adapter's settings as `lora`. Raises `ModelError`."""
    start = find_start(config)
    if start is None or config.lora is None:
        return config
    settings = settings_of(start)
    targets = settings["target_modules"]
    lora = LoraConfig(
        rank=settings["r"],
        alpha=settings["lora_alpha"],
        dropout=config.lora.dropout,
        targets=targets if isinstance(targets, str) else sorted(targets),
        rslora=bool(settings.get("use_rslora")),
    )
    return config.model_copy(update={"lora": lora})


def peft_config(start: Path, dropout: float) -> Any:
    """PEFT's configuration of the adapter, with the run's dropout, because sampling has none."""
    from peft import PeftConfig

    settings = PeftConfig.from_pretrained(str(start))
    settings.inference_mode, settings.lora_dropout = False, dropout
    return settings


def begin(model: Any, start: Path | None, *, reference: bool) -> None:
    """Loads the initial policy into a model with a new adapter. Call it before the optimiser is created.

    `reference`: whether the initial policy will be scored. Raises `ModelError` if the adapter does not fit.
    """
    if start is None:
        return
    _fill(model, start, TRAINED)
    if reference:
        _add(model, start)
    model.save_pretrained = partial(model.save_pretrained, selected_adapters=[TRAINED])
    model.set_adapter(TRAINED)


def _add(model: Any, start: Path) -> None:
    model.add_adapter(REFERENCE, peft_config(start, 0.0))
    _fill(model, start, REFERENCE)
    model.set_requires_grad(REFERENCE, False)


def _fill(model: Any, start: Path, name: str) -> None:
    """Loads the adapter's float32 weights into the adapter `name` of a model."""
    from peft import load_peft_weights, set_peft_model_state_dict

    try:
        result = set_peft_model_state_dict(
            model, load_peft_weights(str(start), device="cpu"), adapter_name=name, ignore_mismatched_sizes=False
        )
        why = f"it has no '{result.unexpected_keys[0]}'" if result.unexpected_keys else None
    except RuntimeError as error:
        why = str(error)
    if why is not None:
        base = settings_of(start).get("base_model_name_or_path")
        raise ModelError(f"model.adapter: {start} was trained for {base} and does not fit model.name ({why}).")


def put_on(model: Any, adapter: Path, start: Path | None = None) -> Any:
    """`model` with a trained adapter, for generation. Raises `ModelError` if they do not fit."""
    from peft import PeftModel

    from kit.models.failures import raise_fatal

    try:
        policy = PeftModel.from_pretrained(model, str(adapter))
        if start is not None:
            _add(policy, start)
            policy.set_adapter(TRAINED)
        return policy.eval().requires_grad_(False)
    except (RuntimeError, ValueError, OSError, KeyError) as error:
        raise_fatal(error)
        raise ModelError(f"{adapter}: the adapter cannot be put on its base model ({error}).") from error


@contextmanager
def untrained(policy: Any) -> Iterator[None]:
    """Switches a policy with adapters to its initial state inside the block."""
    if REFERENCE not in policy.peft_config:
        with policy.disable_adapter():
            yield
        return
    policy.set_adapter(REFERENCE)
    try:
        yield
    finally:
        policy.set_adapter(TRAINED)
        policy.requires_grad_(False)


def as_it_starts(model: Any, config: ModelConfig) -> Any:
    """The initial policy of training, from a loaded base model."""
    start = find_start(config)
    return model if start is None else put_on(model, start)
