"""Training that starts from an adapter (`model.adapter`), as supervised fine-tuning leaves one.

    continue       the adapter is trained on; its rank, alpha and targets take the place of `model.lora`
    merge          it is added to the weights in float32 once, and a new adapter (or every weight) is trained on these

The reference policy is the policy as it starts. TRL scores it with the adapter named `ref` where there is one, and with
adapters off elsewhere: so the first adapter stands in the model under that name, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kit.config import LoraConfig, ModelConfig
from kit.errors import ModelError
from kit.models.cache import built_once

REFERENCE = "ref"
"""The name under which TRL looks for the policy as it was."""
TRAINED = "default"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MODES = "Set model.adapter_mode: merge, which adds it to the weights whatever its kind."


@dataclass(frozen=True)
class Start:
    """An adapter that training starts from. `folder` holds PEFT's two files."""

    folder: Path
    mode: str

    def settings(self) -> dict[str, Any]:
        """The adapter's configuration."""
        content: dict[str, Any] = json.loads((self.folder / CONFIG).read_text(encoding="utf-8"))
        return content

    def sha256(self) -> str:
        """The SHA-256 of its weights and settings."""
        files = (self.folder / CONFIG, self.folder / WEIGHTS)
        return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def find_start(config: ModelConfig) -> Start | None:
    """The adapter that the configuration names; None where it names none. Raises `ModelError`."""
    if config.adapter is None:
        return None
    folder, name = Path(config.adapter).expanduser(), config.adapter
    if not folder.is_dir():
        if name.count("/") != 1 or name.startswith((".", "/", "~")):
            raise ModelError(f"model.adapter: there is no folder {name}. Give an adapter's folder, or a hub id.")
        from huggingface_hub import snapshot_download

        try:
            patterns = ["adapter_*", "token*", "*.jinja", "vocab*", "merges*"]
            folder = Path(snapshot_download(name, allow_patterns=patterns))
        except Exception as error:  # the hub's client raises by kind of failure, and any of them means the same here
            raise ModelError(
                f"model.adapter: {name} is no folder here, and could not be fetched as a hub id ({error})."
            ) from error
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ModelError(
                f"model.adapter: {folder} has no {name}, so it is not an adapter that PEFT has saved. Give the folder that "
                "`save_pretrained` wrote, or set model.name where this is a whole model."
            )
    start = Start(folder, config.adapter_mode)
    settings = start.settings()
    odd = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out", "target_parameters")
    kinds = [key for key in odd if settings.get(key)]  # beyond plain LoRA on linear layers
    kinds += ["biases"] if settings.get("bias", "none") != "none" else []
    kinds += [str(settings.get("peft_type"))] if settings.get("peft_type") != "LORA" else []
    if config.adapter_mode != "merge" and kinds:
        raise ModelError(
            f"model.adapter: {folder} is an adapter with {', '.join(kinds)}, which cannot be exported exactly after "
            f"training. {MODES}"
        )
    return start


def described(config: ModelConfig) -> ModelConfig:
    """The configuration with `lora` as the adapter has it, where that is trained on. Raises `ModelError`."""
    start = find_start(config)
    if start is None or start.mode != "continue" or config.lora is None:
        return config
    settings, targets = start.settings(), start.settings()["target_modules"]
    lora = LoraConfig(
        rank=settings["r"],
        alpha=settings["lora_alpha"],
        dropout=config.lora.dropout,
        targets=targets if isinstance(targets, str) else sorted(targets),
        rslora=bool(settings.get("use_rslora")),
    )
    return config.model_copy(update={"lora": lora})


def peft_config(start: Start, dropout: float) -> Any:
    """PEFT's description of the adapter that is trained on. Dropout is the run's own: sampling knows none."""
    from peft import PeftConfig

    settings = PeftConfig.from_pretrained(str(start.folder))
    settings.inference_mode, settings.lora_dropout = False, dropout
    return settings


def begin(model: Any, start: Start | None, *, reference: bool) -> None:
    """Makes a model with a new adapter the policy that training starts from; call it before the optimiser is made.

    `reference`: whether the policy as it starts will be scored. Raises `ModelError` where the adapter does not fit.
    """
    if start is None or start.mode == "merge":
        return
    _fill(model, start, TRAINED)
    if reference:
        _add(model, start)
    model.save_pretrained = partial(model.save_pretrained, selected_adapters=[TRAINED])
    model.set_adapter(TRAINED)


def _add(model: Any, start: Start) -> None:
    model.add_adapter(REFERENCE, peft_config(start, 0.0))
    _fill(model, start, REFERENCE)
    model.set_requires_grad(REFERENCE, False)


def _fill(model: Any, start: Start, name: str) -> None:
    """Reads the adapter's weights, float32, into the adapter of a model."""
    from peft import load_peft_weights, set_peft_model_state_dict

    try:
        result = set_peft_model_state_dict(
            model, load_peft_weights(str(start.folder), device="cpu"), adapter_name=name, ignore_mismatched_sizes=False
        )
    except RuntimeError as error:
        raise _does_not_fit(start, str(error)) from error
    if result.unexpected_keys:
        raise _does_not_fit(start, f"'{result.unexpected_keys[0]}' has no place in it")


def _does_not_fit(start: Start, why: str) -> ModelError:
    base = start.settings().get("base_model_name_or_path")
    return ModelError(f"model.adapter: {start.folder} was made for {base} and does not fit model.name ({why}).")


def put_on(model: Any, adapter: Path, start: Start | None = None) -> Any:
    """`model` with a trained adapter as it was trained, to generate with. Raises `ModelError` where they do not fit."""
    from peft import PeftModel

    from kit.models.failures import raise_fatal

    try:
        policy = PeftModel.from_pretrained(model, str(adapter))
        if start is not None and start.mode != "merge":
            _add(policy, start)
            policy.set_adapter(TRAINED)
        return policy.eval().requires_grad_(False)
    except (RuntimeError, ValueError, OSError, KeyError) as error:
        raise_fatal(error)
        raise ModelError(f"{adapter}: the adapter cannot be put on its base model ({error}).") from error


@contextmanager
def untrained(policy: Any) -> Iterator[None]:
    """Restores a policy with adapters to its state before training, for the block."""
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
    """A loaded base model as training would start from it."""
    start = find_start(config)
    return model if start is None or start.mode == "merge" else put_on(model, start.folder)


def with_merged(files: Any, config: ModelConfig) -> Any:
    """The model's `ModelFiles`; with `adapter_mode: merge` those of a folder with the adapter merged in, made if need be.

    The folder is told by its content, and lies beside other caches (XDG_CACHE_HOME): made again, it is the same.
    """
    start = find_start(config)
    if start is None or start.mode != "merge":
        return files
    stamp = f"{files.source} {files.revision} {start.sha256()}"
    merged = built_once("merged", stamp, lambda folder: _merge(files, config, start, folder))
    return replace(files, source=str(merged), revision=None)


def _merge(files: Any, config: ModelConfig, start: Start, folder: Path) -> None:
    """Writes the model with the adapter added in float32, in the precision of its own files."""
    import torch
    from peft import PeftModel

    from kit.models.family import auto_class

    loader = auto_class(files.config).from_pretrained
    how = {"revision": files.revision, "trust_remote_code": config.trust_remote_code, "use_safetensors": True}
    own = getattr(files.config.get_text_config(), "dtype", None) or torch.float32
    model = loader(files.source, dtype=torch.float32, **how)
    if getattr(model, "is_quantized", False):
        raise ModelError(
            f"model.adapter_mode: merge, but {files.source} holds quantised weights, into which an adapter would be rounded. "
            "Give the 16-bit model and model.load_in_4bit: true, or set model.adapter_mode: continue."
        )
    try:
        merged = PeftModel.from_pretrained(model, str(start.folder)).merge_and_unload()
    except (RuntimeError, ValueError, KeyError) as error:
        raise _does_not_fit(start, str(error)) from error
    merged.to(own).save_pretrained(folder)
    files.tokenizer.save_pretrained(folder)
    if files.processor is not None:
        files.processor.save_pretrained(folder)
