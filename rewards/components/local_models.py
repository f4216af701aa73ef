"""Transformers models as scorers: found on disk when a preset is built, loaded once per process when first used."""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from rewards.components.packages import require
from rewards.errors import PresetError
from rewards.protocol import failure_reason

__all__ = ["Kind", "Loaded", "LocalModel", "Windows"]

Kind: TypeAlias = Literal["embedding", "classifier", "causal"]
T = TypeVar("T")

_HEADS: dict[Kind, str] = {
    "embedding": "AutoModel",
    "classifier": "AutoModelForSequenceClassification",
    "causal": "AutoModelForCausalLM",
}
_ARCHITECTURES: dict[Kind, str | tuple[str, ...]] = {
    "embedding": "",
    "classifier": "ForSequenceClassification",
    "causal": ("ForCausalLM", "LMHeadModel"),
}
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model", "spm.model")
_DOWNLOADED = ["*.json", "*.txt", "*.model", "*.safetensors", "pytorch_model*.bin"]
# These count positions from pad_token_id + 1, so that two of their 514 are never used.
_SHIFTED = ("roberta", "camembert", "mpnet", "data2vec", "longformer")
_PACKAGES = ("torch", "transformers", "huggingface_hub")
_CHARS_PER_TOKEN = 8  # more than any tokenizer packs on average; text beyond it is not even tokenized


@dataclass(frozen=True)
class Windows:
    """One text as token windows.

    `rows` are token ids per window, special tokens included. `truncated` says that the text went on behind the last.
    """

    rows: list[list[int]]
    types: list[list[int]]
    truncated: bool


@dataclass(frozen=True)
class LocalModel:
    """Which model, and where it runs. Plain data: travels between processes, the weights do not.

    Args:
        name: a folder written by `save_pretrained`, or a hub id whose files are in the local cache.
        kind: which head it has.
        device: `cpu`, `cuda`, `cuda:1`, `mps`.
        revision: branch, tag or commit of a hub id.
        max_tokens: window length, special tokens included; never more than the model takes.
    """

    name: str
    kind: Kind
    device: str = "cpu"
    revision: str | None = None
    max_tokens: int = 512

    def check(self, preset: str, download: bool = False) -> dict[str, Any]:
        """The model's configuration, read without importing torch.

        Raises:
            PresetError: a package or the model's files are missing, or the device is none.
        """
        for package in _PACKAGES:
            require(preset, package, package)
        kind, _, number = self.device.partition(":")
        if kind not in ("cpu", "cuda", "mps") or (number and not number.isdigit()):
            raise PresetError(f"device is {self.device!r}. Use cpu, cuda, cuda:0 or mps.")
        if download:
            self._download(preset)
        folder = self._folder()
        absent = _absent_files(folder)
        if absent:
            raise PresetError(
                f"Preset {preset!r} needs the model {self.name!r}; {absent}. Give model= a folder written by "
                f"save_pretrained, or fetch it once with `hf download {self.name}`, or pass download=True."
            )
        try:
            config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            names = [str(name) for name in config.get("architectures") or []]
        except (ValueError, AttributeError, TypeError) as failure:
            raise PresetError(f"{folder / 'config.json'} is no model configuration: {failure}.") from failure
        if names and not any(name.endswith(_ARCHITECTURES[self.kind]) for name in names):
            raise PresetError(
                f"Preset {preset!r} needs a {self.kind} model, {self.name!r} is {names[0]}: its head would be random. "
                f"Give a model that was trained as {_HEADS[self.kind]}."
            )
        return config

    def loaded(self) -> "Loaded":
        """The model in evaluation mode, one per process, device and revision.

        Raises:
            RuntimeError: it cannot be loaded; the message names the model and the reason.
        """
        with _LOCK:
            if self not in _LOADED:
                try:
                    _LOADED[self] = self._load()
                except Exception as failure:
                    raise RuntimeError(f"model {self.name!r} cannot be loaded: {failure_reason(failure)}") from failure
            return _LOADED[self]

    def _load(self) -> "Loaded":
        import transformers

        folder = str(self._folder())
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        head = getattr(transformers, _HEADS[self.kind])
        model, found = head.from_pretrained(folder, local_files_only=True, dtype="float32", output_loading_info=True)
        random = [key for key in found["missing_keys"] if not (self.kind == "embedding" and "pooler" in key)]
        if random:
            raise ValueError(f"its files lack {', '.join(sorted(random)[:3])}, which would be random")
        model = model.to(self.device).eval()
        model.requires_grad_(False)
        limits = [self.max_tokens, int(min(tokenizer.model_max_length, 1 << 30))]
        positions = getattr(model.config, "max_position_embeddings", None)
        if isinstance(positions, int) and positions > 0:
            shifted = any(family in str(model.config.model_type) for family in _SHIFTED)
            limits.append(positions - 2 if shifted else positions)
        return Loaded(model=model, tokenizer=tokenizer, max_tokens=min(limits), device=self.device)

    def _folder(self) -> Path:
        """The folder with the files; for a hub id its snapshot in the local cache, which may not exist."""
        given = Path(self.name).expanduser()
        if given.is_dir():
            return given
        import huggingface_hub
        from huggingface_hub.errors import HFValidationError

        try:
            config = huggingface_hub.try_to_load_from_cache(self.name, "config.json", revision=self.revision)
        except HFValidationError:
            return given
        return Path(config).parent if isinstance(config, str) else given

    def _download(self, preset: str) -> None:
        if Path(self.name).expanduser().is_dir():
            return
        import huggingface_hub

        try:
            huggingface_hub.snapshot_download(self.name, revision=self.revision, allow_patterns=_DOWNLOADED)
        except Exception as failure:
            raise PresetError(
                f"Preset {preset!r} could not download {self.name!r}: {failure_reason(failure)}. Fetch it elsewhere "
                f"with `hf download {self.name} --local-dir FOLDER` and pass model=FOLDER."
            ) from failure


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model with its tokenizer. One thread at a time: neither the tokenizer's settings nor the memory are shared."""

    model: Any
    tokenizer: Any
    max_tokens: int
    device: str
    lock: threading.RLock = field(default_factory=threading.RLock)

    def windows(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, max_windows: int = 1, stride: int = 0
    ) -> list[Windows]:
        """Each text in windows of `max_tokens` tokens that share `stride` tokens with the one before.

        With `pairs`, the second text is whole in every window; it must leave room for more than `stride` tokens.

        Text that spells a special token, such as `[SEP]`, is read as plain text: a completion cannot end its own
        field and begin another.
        """
        limit = _CHARS_PER_TOKEN * self.max_tokens * max_windows
        with self.lock:
            encoded = self.tokenizer(
                [text[:limit] for text in texts],
                list(pairs) if pairs is not None else None,
                truncation="only_first",
                max_length=self.max_tokens,
                stride=stride,
                return_overflowing_tokens=True,
                return_token_type_ids=True,
                split_special_tokens=True,
            )
        found = [Windows([], [], len(text) > limit) for text in texts]
        for row, types, owner in zip(
            encoded["input_ids"], encoded["token_type_ids"], encoded["overflow_to_sample_mapping"], strict=True
        ):
            if len(found[owner].rows) == max_windows:
                found[owner] = Windows(found[owner].rows, found[owner].types, True)
            else:
                found[owner].rows.append(row)
                found[owner].types.append(types)
        return found

    def n_tokens(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, special tokens included; counting stops at `max_tokens` + 1."""
        limit = _CHARS_PER_TOKEN * self.max_tokens
        with self.lock:
            encoded = self.tokenizer(
                [text[:limit] for text in texts],
                truncation=True,
                max_length=self.max_tokens + 1,
                split_special_tokens=True,
            )
        return [len(row) for row in encoded["input_ids"]]

    def plain_tokens(self, texts: Sequence[str], max_windows: int = 1) -> list[tuple[list[int], bool]]:
        """Token ids without special tokens, and whether characters were left out; about `max_windows` windows long."""
        limit = _CHARS_PER_TOKEN * self.max_tokens * max_windows
        with self.lock:
            encoded = self.tokenizer(
                [text[:limit] for text in texts], add_special_tokens=False, split_special_tokens=True, verbose=False
            )
        return [(row, len(text) > limit) for row, text in zip(encoded["input_ids"], texts, strict=True)]

    def run(
        self,
        rows: Sequence[Sequence[int]],
        types: Sequence[Sequence[int]] | None,
        batch_size: int,
        reduce: Callable[[Any, dict[str, Any]], list[T]],
    ) -> list[T]:
        """`reduce(outputs, inputs)` of every row of token ids, in order; rows of like length share a batch."""
        import torch

        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        results: dict[int, T] = {}
        pad = self.tokenizer.pad_token_id or 0
        with self.lock, torch.inference_mode():
            for begin in range(0, len(order), batch_size):
                chosen = order[begin : begin + batch_size]
                width = max(len(rows[row]) for row in chosen)
                ids = _padded([rows[row] for row in chosen], width, pad, self.device)
                mask = _padded([[1] * len(rows[row]) for row in chosen], width, 0, self.device)
                inputs = {"input_ids": ids, "attention_mask": mask}  # (B, T) both
                if types is not None and getattr(self.model.config, "type_vocab_size", 0) > 1:
                    inputs["token_type_ids"] = _padded([types[row] for row in chosen], width, 0, self.device)
                results.update(zip(chosen, reduce(self.model(**inputs), inputs), strict=True))
        return [results[row] for row in range(len(rows))]


def _padded(rows: Sequence[Sequence[int]], width: int, fill: int, device: str) -> Any:
    import torch

    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], device=device)  # (B, T)


def _absent_files(folder: Path) -> str | None:
    if not (folder / "config.json").is_file():
        return "no config.json was found in that folder nor in the local hub cache"
    for what, files in (("weights", _WEIGHTS), ("tokenizer", _TOKENIZERS)):
        if not any((folder / file).is_file() for file in files):
            return f"its {what} are missing in {folder} (looked for {', '.join(files)})"
    return None


_LOCK = threading.RLock()
_LOADED: dict[LocalModel, Loaded] = {}
