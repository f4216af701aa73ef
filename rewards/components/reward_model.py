"""Reward models for sequence classification as a component: Bradley-Terry scores and labels.

The model reads a completion with its prompt, in its chat template if it has one. Rows are sorted by length and run in batches
of a fixed number of tokens. A batch that does not fit next to a trainer on the same GPU is halved until it fits.
"""

import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from rewards.components.final_text import readable
from rewards.errors import PresetError, nearest, require
from rewards.protocol import Context, Sample, Score, failure_reason
from rewards.samples import prompt_text

_PACKAGES = ("torch", "transformers", "huggingface_hub")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_AMPERE = (8, 0)
"""Compute capability of the first GPUs with bfloat16; earlier ones emulate it slowly."""
# Model types that number positions from pad_token_id + 1, so that the first positions are not used.
_SHIFTED = ("roberta", "camembert", "mpnet", "data2vec", "longformer")


class Question(NamedTuple):
    """Input of the model for one completion: (role, text) of the prompt's messages, and the text of the completion."""

    prompt: tuple[tuple[str, str], ...]
    text: str


@dataclass(frozen=True)
class ModelFiles:
    """A model's files and device, without weights, so that it can be pickled.

    Args:
        name: a folder written by `save_pretrained`, or a hub id whose files are in the local cache.
        device: `cpu`, `cuda`, `cuda:1`, `mps`; `auto` is the process's GPU, or the CPU without a GPU.
        dtype: `float32`, `bfloat16`, `float16`; `auto` is float32 on the CPU, and on a GPU bfloat16, or float16 if the
            GPU has no bfloat16.
        revision: branch, tag or commit of a hub id.
    """

    name: str
    device: str = "auto"
    dtype: str = "auto"
    revision: str | None = None

    def config(self, preset: str) -> dict[str, Any]:
        """Return the model's configuration; does not import torch. `preset` is the name in messages.

        Raises:
            PresetError: a package or file is missing, the model has another head, or the device or dtype is unknown.
        """
        for package in _PACKAGES:
            require(preset, package, package)
        kind, _, number = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda", "mps") or (number and not number.isdigit()):
            raise PresetError(f"device is {self.device!r}. Use auto, cpu, cuda, cuda:0 or mps.")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise PresetError(f"dtype is {self.dtype!r}. Use auto, float32, bfloat16 or float16.")
        folder = self.folder()
        if folder is None or not any((folder / weights).is_file() for weights in _WEIGHTS):
            where = f"no weights in {folder} ({', '.join(_WEIGHTS)})" if folder else "not in the local hub cache"
            raise PresetError(
                f"Preset {preset!r} needs the model {self.name!r}: {where}. Pass a folder written by save_pretrained as "
                f"model=, or download the model with `hf download {self.name}`."
            )
        try:
            config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            names = [str(name) for name in config.get("architectures") or []]
        except (OSError, ValueError, AttributeError, TypeError) as failure:
            raise PresetError(f"{folder / 'config.json'} is not a model configuration: {failure}.") from failure
        if not any(name.endswith("ForSequenceClassification") for name in names):
            raise PresetError(
                f"Preset {preset!r} needs a model trained as ...ForSequenceClassification; {self.name!r} is "
                f"{', '.join(names) or 'of no named architecture'}, whose head would be random."
            )
        return config

    def folder(self) -> Path | None:
        """Return the folder with the files: for a hub id its snapshot in the local cache, or None if there is none."""
        path = Path(self.name).expanduser()
        if path.is_dir():
            return path
        import huggingface_hub
        from huggingface_hub.errors import HFValidationError

        try:
            config = huggingface_hub.try_to_load_from_cache(self.name, "config.json", revision=self.revision)
        except HFValidationError:
            return None
        return Path(config).parent if isinstance(config, str) else None

    def bytes_on(self, device: str) -> float:
        """Return the bytes of the weights on `device` (cpu or cuda); 0 if they are loaded elsewhere or there are no files."""
        folder = self.folder()
        if folder is None or self.device not in ("auto", device, f"{device}:0"):
            return 0.0
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return 0.0
        files = list(folder.glob("*.safetensors")) or list(folder.glob("pytorch_model*.bin"))
        stored = _BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 4)
        loaded = _BYTES.get(self.dtype, 4 if device == "cpu" else 2)
        return sum(path.stat().st_size for path in files) / stored * loaded

    def loaded(self) -> "Loaded":
        """Return the model in evaluation mode, loaded once per process.

        Raises:
            RuntimeError: the model cannot be loaded; the message names the model and the reason.
        """
        with _LOCK:
            if self not in _LOADED:
                try:
                    _LOADED[self] = self._load()
                except Exception as failure:
                    raise RuntimeError(f"model {self.name!r} cannot be loaded: {failure_reason(failure)}") from failure
            return _LOADED[self]

    def _load(self) -> "Loaded":
        import torch
        import transformers

        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = self.dtype
        if dtype == "auto" and device.startswith("cuda"):
            has_bfloat16 = torch.cuda.get_device_capability(device) >= _AMPERE
            dtype = "bfloat16" if has_bfloat16 else "float16"
        elif dtype == "auto":
            dtype = "float32"
        folder = str(self.folder())
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder, local_files_only=True, dtype=getattr(torch, dtype), output_loading_info=True
        )
        if report["missing_keys"]:
            raise ValueError(f"its files lack {', '.join(sorted(report['missing_keys'])[:3])}, which would be random")
        model = model.to(device).eval()
        model.requires_grad_(False)
        limit = int(min(tokenizer.model_max_length, 1 << 30))
        text_config = model.config.get_text_config()
        positions = getattr(text_config, "max_position_embeddings", None)
        if isinstance(positions, int) and positions > 0:
            shifted = any(family in str(text_config.model_type) for family in _SHIFTED)
            limit = min(limit, positions - (2 if shifted else 0))
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        return Loaded(model, tokenizer, limit, device, frozenset(special | set(tokenizer.all_special_tokens)))


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model with its tokenizer. `lock` admits one thread at a time, for the tokenizer's settings and the memory."""

    model: Any
    tokenizer: Any
    max_tokens: int
    device: str
    special: frozenset[str]
    lock: threading.RLock = field(default_factory=threading.RLock)

    def conversation(self, prompt: Sequence[tuple[str, str]], text: str) -> tuple[list[int], list[int]]:
        """Return token ids and token types of a prompt with its answer.

        The model's chat template renders them; without a template they are a pair of texts.
        """
        if self.tokenizer.chat_template is not None:
            turns = [{"role": role, "content": content} for role, content in (*prompt, ("assistant", text))]
            ids = list(self.tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False))
            return ids, [0] * len(ids)
        first = "\n".join(content for _, content in prompt)
        pair = (first, text) if first else (text,)
        encoded = self.tokenizer(*pair, return_token_type_ids=True, verbose=False, split_special_tokens=True)
        return list(encoded["input_ids"]), list(encoded["token_type_ids"])

    def logits(self, rows: Sequence[Sequence[int]], types: Sequence[Sequence[int]], batch_tokens: int) -> list[Any]:
        """Return the logits (labels,) of every row of token ids, in order.

        Rows of similar length share a batch of up to `batch_tokens` tokens, padding included.
        """
        import torch

        waiting = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        results: dict[int, Any] = {}
        with self.lock, torch.inference_mode():
            while waiting:
                count = 1
                while count < len(waiting) and (count + 1) * len(rows[waiting[count]]) <= batch_tokens:
                    count += 1
                while True:
                    batch = waiting[:count]
                    try:
                        logits = self._forward([rows[row] for row in batch], [types[row] for row in batch])
                    except torch.OutOfMemoryError:
                        torch.cuda.empty_cache()
                        if count == 1:
                            raise
                        count //= 2
                    else:
                        break
                results.update(zip(batch, logits, strict=True))
                del waiting[:count]
        return [results[row] for row in range(len(rows))]

    def _forward(self, rows: Sequence[Sequence[int]], types: Sequence[Sequence[int]]) -> Any:
        """Return the logits (B, labels) of one batch."""
        import torch

        width = max(len(row) for row in rows)
        config = self.model.config.get_text_config()
        pad = config.pad_token_id
        if pad is None:
            # A decoder's head reads the last token that is not the padding id, so this id must not occur in the rows.
            row_ids = {token for row in rows for token in row}
            pad = next(token for token in range(config.vocab_size) if token not in row_ids)
            config.pad_token_id = pad
        else:
            row_ids = None

        def padded(values: Sequence[Sequence[int]], fill: int) -> Any:
            return torch.tensor([[*row, *[fill] * (width - len(row))] for row in values], device=self.device)  # (B, T)

        inputs = {"input_ids": padded(rows, pad), "attention_mask": padded([[1] * len(row) for row in rows], 0)}
        if (getattr(config, "type_vocab_size", 0) or 0) > 1:
            inputs["token_type_ids"] = padded(types, 0)
        try:
            return self.model(**inputs).logits.double()
        finally:
            if row_ids is not None:
                config.pad_token_id = None


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """A reward model's score of the final text, given the prompt.

    For a model with one output, the logit r gives sigmoid((r - center) / temperature), or with `raw` r itself within ±`limit`.
    For a model with several outputs, the score is P(`label`), or 1 - P with `desired=False`.

    Equal questions of a batch are scored once. The status is `infra` if the model cannot be loaded or fails, or if the prompt
    leaves no room for an answer. It is `format` if the completion exceeds the model's length limit or contains one of its
    special tokens. Values are rounded to six decimals (three below float32), so that they do not depend on the other texts
    of a batch.
    """

    itemwise: ClassVar[bool] = True

    name: str = "reward"
    floor: float = 0.0
    low: float = 0.0
    high: float = 1.0
    version: str = "1"
    files: ModelFiles
    index: int | None = None
    independent: bool = False
    desired: bool = True
    center: float = 0.0
    temperature: float = 1.0
    raw: bool = False
    limit: float = 20.0
    threshold: float | None = 0.5
    reads: str = "conversation"
    min_words: int = 1
    max_tokens: int | None = None
    batch_tokens: int = 16_384

    def score(self, samples: Sequence[Sample], ctx: Context) -> list[Score]:
        questions = [self._question(sample) for sample in samples]
        distinct = list(dict.fromkeys(question for question in questions if isinstance(question, Question)))
        scores = dict(zip(distinct, self._answers(distinct), strict=True))
        return [question if isinstance(question, Score) else scores[question] for question in questions]

    def _question(self, sample: Sample) -> Question | Score:
        """Return the question for one completion, or the score if it has no text to judge."""
        answer = readable(sample.full_text, min_words=self.min_words, prompt=sample.prompt)
        if answer.value is None:
            return Score(None, "format", {"reason": answer.reason})
        return Question(_turns(sample.prompt) if self.reads == "conversation" else (), answer.value)

    def _answers(self, questions: Sequence[Question]) -> list[Score]:
        try:
            return self._judge(self.files.loaded(), questions) if questions else []
        except Exception as failure:
            return [Score(None, "infra", {"reason": failure_reason(failure)})] * len(questions)

    def _judge(self, loaded: Loaded, questions: Sequence[Question]) -> list[Score]:
        limit = min(loaded.max_tokens, self.max_tokens or loaded.max_tokens)
        scores: dict[Question, Score] = {}
        inputs: dict[Question, tuple[list[int], list[int]]] = {}
        for question in questions:
            special = next((token for token in loaded.special if token in question.text), None)
            if special is not None:  # it could end the answer's turn and begin another
                scores[question] = Score(None, "format", {"reason": f"contains the special token {special}"})
                continue
            is_long = len(question.text) > 20 * limit  # no tokenizer has twenty characters per token on average
            ids, types = loaded.conversation(question.prompt, "" if is_long else question.text)
            if not is_long and 0 < len(ids) <= limit:
                inputs[question] = ids, types
            elif len(prompt_ids := loaded.conversation(question.prompt, "")[0]) >= limit:
                reason = f"the prompt alone has {len(prompt_ids)} tokens, and the reward model reads {limit}"
                scores[question] = Score(None, "infra", {"reason": reason})
            else:
                reason = f"longer than the {limit} tokens that the reward model reads"
                scores[question] = Score(None, "format", {"reason": reason})
        rows, kinds = [ids for ids, _ in inputs.values()], [types for _, types in inputs.values()]
        for question, logits in zip(inputs, loaded.logits(rows, kinds, self.batch_tokens), strict=True):
            scores[question] = self._verdict(logits, loaded)
        return [scores[question] for question in questions]

    def _verdict(self, logits: Any, loaded: Loaded) -> Score:
        """Score one text by the model's logits (labels,)."""
        digits = 6 if str(loaded.model.dtype) == "torch.float32" else 3
        info: dict[str, Any] = {}
        if self.index is None:
            value = float(logits[0])
            info = {"logit": round(value, digits)} if math.isfinite(value) else {}
        else:
            chances = logits.sigmoid() if self.independent else logits.softmax(dim=-1)
            value = float(chances[self.index]) if self.desired else 1.0 - float(chances[self.index])
        if not math.isfinite(value):
            return Score(None, "error", {"reason": f"the model returned {value!r}"})
        if self.index is None and self.raw:
            value = min(self.limit, max(-self.limit, value))
        elif self.index is None:
            odds = min(700.0, max(-700.0, (value - self.center) / self.temperature))  # exp overflows above 709
            value = 1.0 / (1.0 + math.exp(-odds))
        value = round(value, digits)
        is_passed = self.threshold is None or value >= self.threshold
        return Score(value, "ok" if is_passed else "wrong", info)


def label_index(config: Mapping[str, Any], label: str | None, model: str) -> int | None:
    """Return the index of `label` (any case) in a model's outputs; None for a model with one output, whose logit is the score.

    Raises:
        PresetError: the model has no such label, or several outputs and `label` is None.
    """
    listed = {int(index): str(name) for index, name in (config.get("id2label") or {}).items()}
    count = len(listed) or int(config.get("num_labels") or 2)  # default of transformers
    if count == 1:
        return None
    if label is None:
        raise PresetError(f"Model {model!r} has {count} outputs. Pass label=, one of: {', '.join(listed.values())}.")
    indices = {name.casefold(): index for index, name in (listed or {n: f"LABEL_{n}" for n in range(count)}).items()}
    if label.casefold() not in indices:
        raise PresetError(f"Model {model!r} has no label {label!r}. {nearest(label, listed.values())}")
    return indices[label.casefold()]


def _turns(prompt: Any) -> tuple[tuple[str, str], ...]:
    """Return (role, text) of each message of the prompt; a string is a message of the user.

    A last message of the assistant, which the completion continues (such as an open `<think>`), is dropped.
    """
    if isinstance(prompt, str):
        return (("user", prompt),)
    turns = [message for message in prompt if isinstance(message, Mapping)] if isinstance(prompt, list) else []
    if turns and turns[-1].get("role") == "assistant":
        turns = turns[:-1]
    return tuple((str(turn.get("role", "user")), prompt_text([turn])) for turn in turns)


_LOCK = threading.RLock()
_LOADED: dict[ModelFiles, Loaded] = {}
