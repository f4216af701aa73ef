"""Write a GGUF file with llama.cpp's converter and quantiser, and an Ollama Modelfile for it.

Ollama cannot run Jinja, so the chat template is translated to Ollama's template language. Rendering the template with
placeholders shows the text before and after each role's message. The translation is compared with the original template on
several conversations, and the Modelfile states the differences.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import EnvironmentUnsupported, ModelError, RunError
from kit.export.request import CONVERTED

if TYPE_CHECKING:
    from kit.runner.trained import Source

# --- GGUF -------------------------------------------------------------------------------------------------------------


CONVERTER = "convert_hf_to_gguf.py"
QUANTIZER = "llama-quantize"
VARIABLES = ("GRPO_KIT_LLAMA_CPP", "LLAMA_CPP_DIR")
FOLDERS = ("~/.unsloth/llama.cpp", "~/llama.cpp", "llama.cpp")
"""Usual folders of llama.cpp, Unsloth's first."""
INSTALL = (
    "Get llama.cpp (git clone https://github.com/ggml-org/llama.cpp, then cmake -B build && cmake --build build -t "
    "llama-quantize) and name its folder with --llama-cpp FOLDER or GRPO_KIT_LLAMA_CPP=FOLDER"
)
SHAPES = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip
"""Header keys of a GGUF file, without the prefix of the architecture, with the names of transformers' configuration."""
PREDICTING = ("qwen3_5", "qwen3_next")
"""Prefixes of the model types with layers for multi-token prediction. transformers drops these layers, but the converter declares
them, and llama.cpp refuses a file that lacks them."""
THINKING = "enable_thinking"
MISREAD = ("gemma4", "gpt_oss", "qwen2_moe")
"""Model types whose files transformers reads without some of their weights, e.g. Gemma 4's `layer_scalar`."""
BINARIES = ("", "build/bin", "build/bin/Release", "bin")


@dataclass(frozen=True)
class Tools:
    """Paths of llama.cpp's converter (a Python file) and quantiser (a program; None if it is missing and not needed)."""

    converter: Path
    quantizer: Path | None


def find_tools(quantization: str, folder: str | None = None) -> Tools:
    """Find the tools for a conversion to `quantization` in `folder`, or in the environment, the usual folders and the path.

    Raises `EnvironmentUnsupported` with the missing tool and how to get it.
    """
    named = folder or next((os.environ[name] for name in VARIABLES if os.environ.get(name)), None)
    if named is not None and not Path(named).expanduser().is_dir():
        raise EnvironmentUnsupported(f"{named}: there is no such folder. {INSTALL}.")
    folders = [Path(named).expanduser()] if named else [Path(place).expanduser() for place in FOLDERS]
    path = [Path(place) for place in os.get_exec_path()]
    converters = (place / CONVERTER for place in [*folders, *(() if named else path)])
    quantizers = (place / QUANTIZER for place in [*(f / part for f in folders for part in BINARIES), *path])
    converter, quantizer = (
        next((file.resolve() for file in files if file.is_file()), None) for files in (converters, quantizers)
    )
    if converter is None:
        where = f"in {named}" if named else "in the usual folders or on the path"
        raise EnvironmentUnsupported(f"GGUF needs llama.cpp's {CONVERTER}, which is not {where}. {INSTALL}.")
    if quantization not in CONVERTED and quantizer is None:
        raise EnvironmentUnsupported(
            f"The quantisation {quantization} needs llama.cpp's {QUANTIZER}, which is neither next to {converter} nor on the "
            f"path. {INSTALL}; or use --quantization q8_0, which the converter writes itself."
        )
    return Tools(converter, quantizer)


def check_reader(config: Any, quantization: str) -> None:
    """Raise `EnvironmentUnsupported` if the file cannot be read back to verify it.

    The reason is a missing package `gguf`, or an architecture (`config`) or quantisation that transformers does not read.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.integrations.gguf.dequant import GGML_NAME
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_ARCHS

    kind = config.get_text_config().model_type
    known = bool({kind, kind.removesuffix("_text")} & GGUF_CONFIG_MAPPING.keys())
    if kind in GGUF_TOKENIZER_ARCHS.values():  # read by a newer module of transformers
        known = quantization.upper().startswith((*GGML_NAME.values(), "F", "BF"))
    if not known or kind.removesuffix("_text") in MISREAD:
        raise EnvironmentUnsupported(
            f"transformers does not read GGUF files of model_type '{kind}' in {quantization}, so the kit cannot verify the file. "
            "Write it with --no-verify, and compare its answers in llama.cpp; --to merged-16bit is verified."
        )
    if importlib.util.find_spec("gguf") is None:
        raise EnvironmentUnsupported(
            "To verify a GGUF file, the kit reads it back with the package gguf. Install it with: pip install gguf "
            "(or: uv sync --inexact --extra gguf), or skip the verification with --no-verify."
        )


def add_sentencepiece(source: Source, model: Path) -> None:
    """Add the SentencePiece model of the base and the special tokens to a merged model folder, if the base has one.

    llama.cpp's converter reads both from files that transformers 5 does not write.
    """
    from transformers.utils import cached_file

    from kit.models.embedded import source_of

    revision, name, original = source.config.model.revision, "tokenizer.model", None
    with suppress(OSError, ModelError):  # not on this machine, or it has none
        original = cached_file(source_of(source.run_name, revision), name, revision=revision)
    if original is None:
        return
    shutil.copyfile(original, model / name)
    path, added = model / "tokenizer_config.json", source.tokenizer.added_tokens_decoder
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["added_tokens_decoder"] = {
        id_: {"content": token.content, "special": token.special} for id_, token in added.items()
    }
    path.write_text(json.dumps(settings), encoding="utf-8")


def file_template(tokenizer: Any) -> Any:
    """The chat template for a GGUF file, in which thinking stays off if it was off in training.

    llama.cpp sets `enable_thinking` to true unless a request says otherwise (common/chat.cpp), so a default in the template has
    no effect there. transformers and vLLM leave it undefined.
    """
    template = tokenizer.chat_template
    if THINKING not in (template or ""):
        return template
    plain, on, off = (_render(tokenizer, ["user"], True, **kw) for kw in ({}, {THINKING: True}, {THINKING: False}))
    return f"{{%- set {THINKING} = false -%}}{template}" if plain == off != on else template


def convert(
    tools: Tools, model: Path, target: Path, quantization: str, dtype: str, name: str, model_type: str = ""
) -> None:
    """Convert a merged model folder to the GGUF file `target`. Raises `RunError` with the last lines of the tool's output."""
    if model_type == "granitemoehybrid":
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        # The converter knows the names of the hub's files, not those of transformers.
        names = {"linear_attention": "mamba", "full_attention": "attention"}
        config["layer_types"] = [names.get(kind, kind) for kind in config["layer_types"]]
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    direct = quantization in CONVERTED
    half = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[dtype]
    converted = target if direct else target.with_name("unquantised.gguf")
    command = [sys.executable, str(tools.converter), str(model), "--outfile", str(converted), "--model-name", name,
               "--outtype", quantization if direct else half]  # fmt: skip
    if model_type.startswith(PREDICTING) and "--no-mtp" in tools.converter.read_text(encoding="utf-8"):
        command.append("--no-mtp")
    _run(command, "The conversion to GGUF", converted)
    if not direct:
        _run([str(tools.quantizer), str(converted), str(target), quantization.upper()], "The quantisation", target)
        converted.unlink()


def _run(command: list[str], name: str, written: Path) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    output = (done.stdout + done.stderr).strip()
    if done.returncode == 0 and written.is_file() and written.stat().st_size:
        return
    if "pre-tokenizer was not recognized" in output:
        raise ModelError(
            "llama.cpp does not know how this model's tokenizer splits text (its converter says: BPE pre-tokenizer was not "
            "recognized), so a GGUF file would give the model other tokens than training did. Export this model as adapter or "
            "merged-16bit."
        )
    last = "\n".join(output.splitlines()[-6:])
    raise RunError(f"{name} failed with exit code {done.returncode} ({' '.join(command[:3])} ...):\n{last}")


def open_gguf(source: Source, path: Path, device: str, ends: Sequence[int], dtype: Any) -> tuple[Any, Any, list[str]]:
    """Load model and tokenizer of a GGUF file, dequantised to `dtype`. The list has the faults of its header.

    The model ends completions at all of `ends`, although the file names only some of them; see `missing_ends`.
    """
    from transformers import GgufConfig

    from kit.export.source import load_plain

    header = read_header(path)
    # transformers misreads some shapes from the file, for example Qwen3's head_dim. `check_shapes` compares them.
    # The file has no vision tower, and its weights are not quantised by bitsandbytes.
    config = copy.deepcopy(source.files.config.get_text_config())
    config.tie_word_embeddings = source.files.config.tie_word_embeddings
    config.__dict__.pop("quantization_config", None)
    if config.model_type == "mistral":
        config.model_type = "llama"  # its architecture in the file; transformers does not map the names of `mistral`
    options = {"gguf_file": path.name, "dtype": dtype, "use_safetensors": None, "config": config,
               "quantization_config": GgufConfig(dequantize=True)}  # fmt: skip
    model = load_plain(source, str(path.parent), **options).to(device).eval()
    trained = source.tokenizer
    faults = check_shapes(header, config)
    if header.get("tokenizer.chat_template") != (file_template(trained) or None):
        faults.append("the chat template in the file differs from training")
    end = header.get("tokenizer.ggml.eos_token_id")
    if end not in ends:
        faults.append(f"the file's end token is {end}, but completions end at {', '.join(map(str, ends))} in training")
    kind = header.get("tokenizer.ggml.model")
    # llama.cpp crashes on such a file.
    if kind == "llama" and "ByteLevel" in repr(trained.backend_tokenizer.pre_tokenizer):
        faults.append("the file's tokenizer is SentencePiece's, but that of training is byte-level (gpt2)")
    tokens = header.get("tokenizer.ggml.tokens") or []
    vocabulary = trained.get_vocab()
    differing = [  # llama.cpp writes the spaces of special tokens as spaces
        token
        for token, id_ in vocabulary.items()
        if id_ >= len(tokens) or tokens[id_].replace(" ", "\u2581") != token.replace(" ", "\u2581")
    ]
    if differing:
        faults.append(
            f"{len(differing)} of {len(vocabulary)} tokens differ from training, for example {differing[0]!r}"
        )
    model.generation_config.eos_token_id = list(ends)
    return model, trained, faults


def missing_ends(path: Path, tokenizer: Any, ends: Sequence[int]) -> str | None:
    """A note about the tokens that ended completions in training and that the file does not name, or None."""
    file_ends: set[Any] = {tokenizer.eos_token_id}
    if importlib.util.find_spec("gguf") is not None:  # without it there is no verification either
        try:
            header = read_header(path)
        except Exception:  # a damaged file may raise any type; the verification reports it
            return None
        file_ends = {header.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    missing = [tokenizer.decode([end]) for end in ends if end not in file_ends]
    if not missing:
        return None
    return (
        f"completions of the run also end at {', '.join(missing)}, which the GGUF file does not name as an end token: configure "
        "it as a stop sequence in the program that reads the file (an Ollama Modelfile has it)"
    )


def check_shapes(header: Mapping[str, Any], config: Any) -> list[str]:
    """Compare sizes and constants of the file with the model's configuration; return the differences."""
    prefix = f"{header.get('general.architecture')}."
    expected = {key: getattr(config, name, None) for key, name in SHAPES.items()}
    rope = getattr(config, "rope_parameters", None) or {}
    expected["rope.freq_base"] = rope.get("rope_theta")
    if getattr(config, "block_auto_adjust_ff_dim", False):  # LFM2 uses two thirds of it, rounded
        del expected["feed_forward_length"]
    faults = []
    for key, value in expected.items():
        stated = header.get(prefix + key)
        if not (isinstance(stated, (int, float)) and isinstance(value, (int, float))):
            continue  # missing, or one value for each layer
        if not math.isclose(stated, value, rel_tol=1e-5):
            faults.append(f"the file's {key} is {stated:g}, but {value:g} in training")
    return faults


def read_header(path: Path) -> dict[str, Any]:
    """The key-value pairs of a GGUF file."""
    from gguf import GGUFReader

    return {name: entry.contents() for name, entry in GGUFReader(path).fields.items()}


# --- Ollama's Modelfile -----------------------------------------------------------------------------------------------


MARKS = {"system": "\u2402SYSTEM\u2402", "user": "\u2402USER\u2402", "assistant": "\u2402ASSISTANT\u2402"}
Message = dict[str, str]


@dataclass(frozen=True)
class Pieces:
    """The texts that a chat template writes: `start`, then `around` each role's message, then the generation prompt `opening`.

    With `default`, a system message replaces `start`, as in templates with a default system message.
    """

    start: str
    around: dict[str, tuple[str, str]]
    opening: str
    default: bool = False

    def render(self, messages: Sequence[Message]) -> str:
        """Render a conversation as Ollama will."""
        body = "".join(
            self.around[message["role"]][0] + message["content"] + self.around[message["role"]][1]
            for message in messages
        )
        replaced = self.default and messages[0]["role"] == "system"
        return ("" if replaced else self.start) + body + self.opening


def split_template(tokenizer: Any) -> Pieces | None:
    """Split the tokenizer's chat template into its pieces. None if there is no template or it cannot be split."""
    if not tokenizer.chat_template:
        return None
    try:
        first = _render(tokenizer, ["user"], False)
        prompted = _render(tokenizer, ["user"], True)
        turns = _render(tokenizer, ["user", "assistant", "user"], False)
        answered = _render(tokenizer, ["user", "assistant"], False)
    except Exception:  # a template may raise any type for messages that it does not support
        return None
    system = None
    with suppress(Exception):  # some templates raise for a system message, for example Gemma's
        before, mark, rest = _render(tokenizer, ["system", "user"], False).partition(MARKS["system"])
        between, user_mark, _ = rest.partition(MARKS["user"])
        system = (before, between) if mark and user_mark else None
    user, answer = MARKS["user"], MARKS["assistant"]
    if not prompted.startswith(first) or first.count(user) != 1 or turns.count(user) != 2 or turns.count(answer) != 1:
        return None
    after_user, after_answer = turns.rpartition(user)[2], answered.rpartition(answer)[2]
    between, _, later = turns.partition(user)[2].partition(answer)
    # The text before a later user message is the end of the answer and the start of a user message. Before the first user
    # message it is the start of the conversation and the start of a user message.
    before_user = later.partition(user)[0].removeprefix(after_answer)
    start = first.partition(user)[0].removesuffix(before_user)
    around = {"user": (before_user, after_user), "assistant": (between.removeprefix(after_user), after_answer)}
    if system is not None:
        around["system"] = (system[0].removeprefix(start), system[1].removesuffix(before_user))
    default = bool(start) and system is not None and not system[0].startswith(start)
    return Pieces(start, around, prompted[len(first) :], default)


def _render(tokenizer: Any, roles: Sequence[str], opening: bool, **variables: Any) -> str:
    messages = [{"role": role, "content": MARKS[role]} for role in roles]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opening, **variables))


def differences(tokenizer: Any, pieces: Pieces) -> list[str]:
    """Kinds of conversations that the pieces render differently from the template."""

    def message(role: str, text: str) -> Message:
        return {"role": role, "content": text}

    user, follow_up = message("user", "What is 2 + 3?"), message("user", "And 4 more?")
    conversations = {"one question": [user], "several turns": [user, message("assistant", "5"), follow_up]}
    if "system" in pieces.around:
        conversations["a system message"] = [message("system", "Be brief."), user]
    wrong = []
    for name, messages in conversations.items():
        expected = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        if expected != pieces.render(messages):
            wrong.append(name)
    return wrong + ([] if "system" in pieces.around else ["a system message, which the template does not support"])


def go_template(pieces: Pieces) -> str:
    """The pieces in Ollama's template language."""

    def piece(role: str) -> str:
        before, after = (_quoted(part) for part in pieces.around[role])
        return f"{before}{{{{ .Content }}}}{after}"

    system = f'{{{{ if eq .Role "system" }}}}{piece("system")}{{{{ end }}}}' if "system" in pieces.around else ""
    start = _quoted(pieces.start)
    return (
        f"{f'{{{{ if not .System }}}}{start}{{{{ end }}}}' if pieces.default else start}{{{{ range .Messages }}}}{system}"
        f'{{{{ if eq .Role "user" }}}}{piece("user")}{{{{ end }}}}'
        f'{{{{ if eq .Role "assistant" }}}}{piece("assistant")}{{{{ end }}}}'
        f"{{{{ end }}}}{_quoted(pieces.opening)}"
    )


def _quoted(text: str) -> str:
    """The text, quoted as a Go string if the template language or the file's quotes would change it."""
    special = "{{" in text or "}}" in text or '"""' in text or text.endswith('"')
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if special else text


def modelfile(source: Any, ends: Sequence[int], file: str) -> tuple[str, list[str]]:
    """The Modelfile of a run's GGUF file, and notes about what it cannot express."""
    config, tokenizer = source.config, source.tokenizer
    settings, notes = config.generation, []
    pieces = split_template(tokenizer) if config.data.chat else None
    lines = [f"# Run {source.run.id}, step {source.step}.", f"FROM ./{file}"]
    if not config.data.chat:
        lines.append('TEMPLATE """{{ if .System }}{{ .System }}\n\n{{ end }}{{ .Prompt }}"""')
    elif pieces is None:
        notes.append("the chat template cannot be expressed; Ollama guesses one from the file")
    else:
        wrong, bos = differences(tokenizer, pieces), tokenizer.bos_token
        if bos and pieces.start.startswith(bos) and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
            notes.append("Ollama adds the beginning-of-text token")
            around = {role: (before.removeprefix(bos), after) for role, (before, after) in pieces.around.items()}
            pieces = replace(pieces, start=pieces.start.removeprefix(bos), around=around)
        notes += [f"the template differs from training for: {kind}" for kind in wrong]
        lines.append(f'TEMPLATE """{go_template(pieces)}"""')
    if settings.tools or settings.environment:
        notes.append("the template has no tools: describe them in the system message")
    prompt = config.data.system_prompt
    if prompt and ('"""' in prompt or prompt.endswith('"')):
        notes.append(
            "the system prompt is left out, because a Modelfile cannot have three quotes in a row or a quote at the end: send "
            "it with every request"
        )
    elif prompt:
        lines.append(f'SYSTEM """{prompt}"""')
    lines += [f"PARAMETER stop {json.dumps(tokenizer.decode([end]), ensure_ascii=False)}" for end in ends]
    # The run's settings; Ollama's defaults truncate the distribution and penalise repetition.
    lines += [
        f"PARAMETER temperature {settings.temperature:g}",
        f"PARAMETER top_p {settings.top_p:g}",
        f"PARAMETER top_k {settings.top_k}",
        f"PARAMETER min_p {settings.min_p or 0:g}",
        "PARAMETER repeat_penalty 1",
    ]
    lines += [f"# Note: {note}." for note in notes]
    return "\n".join(lines) + "\n", notes
