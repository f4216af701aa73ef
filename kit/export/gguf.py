"""What llama.cpp and Ollama read: a GGUF file, and a Modelfile for it.

GGUF is written by llama.cpp's converter and quantiser.

Jinja cannot be run in Ollama, so the chat template is taken apart and put together again. Rendered with placeholders, a
template shows what it writes before and after each role's text. What is made of those pieces is held against the true
template on whole conversations, and the Modelfile says where the two differ.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
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
PLACES = ("~/.unsloth/llama.cpp", "~/llama.cpp", "llama.cpp")
"""Where people and Unsloth have llama.cpp."""
INSTALL = (
    "Get llama.cpp (git clone https://github.com/ggml-org/llama.cpp, then cmake -B build && cmake --build build -t "
    "llama-quantize) and name its folder with --llama-cpp FOLDER or GRPO_KIT_LLAMA_CPP=FOLDER"
)
SHAPES = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip
"""Header keys of a GGUF file, after its architecture's name, and what transformers calls them."""
BINARIES = ("", "build/bin", "build/bin/Release", "bin")


@dataclass(frozen=True)
class Tools:
    """llama.cpp's converter (a Python file) and quantiser (a program; None where it is not needed)."""

    converter: Path
    quantizer: Path | None


def find_tools(quantization: str, folder: str | None = None) -> Tools:
    """What a conversion to `quantization` takes: from `folder`, else the environment, the path, the usual places.

    Raises `EnvironmentUnsupported` that names what is missing and how to get it.
    """
    named = folder or next((os.environ[name] for name in VARIABLES if os.environ.get(name)), None)
    if named is not None and not Path(named).expanduser().is_dir():
        raise EnvironmentUnsupported(f"{named}: there is no such folder. {INSTALL}.")
    folders = [Path(named).expanduser()] if named else [Path(place).expanduser() for place in PLACES]
    path = [Path(place) for place in os.get_exec_path()]
    converters = (place / CONVERTER for place in [*folders, *(() if named else path)])
    quantizers = (place / QUANTIZER for place in [*(f / part for f in folders for part in BINARIES), *path])
    converter, quantizer = (
        next((file.resolve() for file in files if file.is_file()), None) for files in (converters, quantizers)
    )
    if converter is None:
        where = f"in {named}" if named else "in the usual places or on the path"
        raise EnvironmentUnsupported(f"GGUF needs llama.cpp's {CONVERTER}, and there is none {where}. {INSTALL}.")
    if quantization not in CONVERTED and quantizer is None:
        raise EnvironmentUnsupported(
            f"The quantisation {quantization} needs llama.cpp's {QUANTIZER}, and there is none beside {converter} or on the "
            f"path. {INSTALL}; or take --quantization q8_0, which the converter writes by itself."
        )
    return Tools(converter, quantizer)


def check_reader() -> None:
    """Raises `EnvironmentUnsupported` without the package that reads GGUF files back for the verification."""
    if importlib.util.find_spec("gguf") is None:
        raise EnvironmentUnsupported(
            "A GGUF file is verified by reading it back, which needs the package gguf. Install it with: pip install gguf "
            "(or: uv sync --inexact --extra gguf), or leave the verification out with --no-verify."
        )


def convert(tools: Tools, model: Path, target: Path, quantization: str, dtype: str, name: str) -> None:
    """Writes `target` from a merged 16-bit model folder. Raises `RunError` with what the tool said last."""
    direct = quantization in CONVERTED
    half = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[dtype]
    first = target if direct else target.with_name("unquantised.gguf")
    command = [sys.executable, str(tools.converter), str(model), "--outfile", str(first), "--model-name", name,
               "--outtype", quantization if direct else half]  # fmt: skip
    _run(command, "The conversion to GGUF", first)
    if not direct:
        _run([str(tools.quantizer), str(first), str(target), quantization.upper()], "The quantisation", target)
        first.unlink()


def _run(command: list[str], what: str, written: Path) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    output = (done.stdout + done.stderr).strip()
    if done.returncode == 0 and written.is_file() and written.stat().st_size:
        return
    if "pre-tokenizer was not recognized" in output:
        raise ModelError(
            "llama.cpp does not know how this model's tokenizer splits text (its converter says: BPE pre-tokenizer was not "
            "recognized), so no GGUF file of it would read prompts as the model was trained to. Models whose tokenizer llama.cpp "
            "knows can be exported; this one can be as adapter or merged-16bit."
        )
    last = "\n".join(output.splitlines()[-6:])
    raise RunError(f"{what} failed with exit code {done.returncode} ({' '.join(command[:3])} ...):\n{last}")


def open_gguf(source: Source, path: Path, device: str, ends: Sequence[int]) -> tuple[Any, Any, list[str]]:
    """Model and tokenizer as a GGUF file has them, its numbers multiplied out, and what is wrong with its header.

    The model ends at all of `ends`, though the file holds few of them: see `ends_left_out`.
    """
    import torch

    from kit.export.source import load_plain

    header = read_header(path)
    # transformers reads some shapes wrongly from the file (Qwen3's head_dim, for one): they are held against it below.
    config = copy.deepcopy(source.files.config)
    how = {"gguf_file": path.name, "dtype": torch.float32, "use_safetensors": None, "config": config}
    model = load_plain(source, str(path.parent), **how).to(device).eval()
    trained = source.tokenizer
    faults = check_shapes(header, config.get_text_config())
    if header.get("tokenizer.chat_template") != (trained.chat_template or None):
        faults.append("the chat template in the file is not the one of training")
    end = header.get("tokenizer.ggml.eos_token_id")
    if end not in ends:
        faults.append(f"the file's end token is {end}, and completions end at {', '.join(map(str, ends))} in training")
    kind = header.get("tokenizer.ggml.model")
    # llama.cpp crashes on such a file.
    if kind == "llama" and "ByteLevel" in repr(trained.backend_tokenizer.pre_tokenizer):
        faults.append("the file's tokenizer is SentencePiece's, and that of training works on bytes (gpt2)")
    words = header.get("tokenizer.ggml.tokens") or []
    vocabulary = trained.get_vocab()
    other = [word for word, place in vocabulary.items() if place >= len(words) or words[place] != word]
    if other:
        faults.append(f"{len(other)} of {len(vocabulary)} tokens differ from training, {other[0]!r} for one")
    model.generation_config.eos_token_id = list(ends)
    return model, trained, faults


def ends_left_out(path: Path, tokenizer: Any, ends: Sequence[int]) -> str | None:
    """What to say where training ended completions at more tokens than the file names."""
    held: set[Any] = {tokenizer.eos_token_id}
    if importlib.util.find_spec("gguf") is not None:  # without it there is no verification either
        try:
            header = read_header(path)
        except Exception:  # whatever a reader of a damaged file raises: the verification will tell of it
            return None
        held = {header.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    left = [tokenizer.decode([end]) for end in ends if end not in held]
    if not left:
        return None
    return (
        f"completions of the run end at {', '.join(left)}, too, which the GGUF file does not name as an end: give that as a stop "
        "sequence to what reads the file (an Ollama Modelfile has it); the verification ends there as training does"
    )


def check_shapes(header: Mapping[str, Any], config: Any) -> list[str]:
    """Sizes and constants that the file states otherwise than the model's configuration."""
    begin = f"{header.get('general.architecture')}."
    expected = {key: getattr(config, name, None) for key, name in SHAPES.items()}
    rope = getattr(config, "rope_parameters", None) or {}
    expected["rope.freq_base"] = rope.get("rope_theta")
    faults = []
    for key, value in expected.items():
        stated = header.get(begin + key)
        if not (isinstance(stated, (int, float)) and isinstance(value, (int, float))):
            continue  # not stated, or one value a layer
        if not math.isclose(stated, value, rel_tol=1e-5):
            faults.append(f"the file's {key} is {stated:g}, and {value:g} in training")
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
    """What a chat template writes around the text of each role: `start` before all, `opening` to let the model speak.

    `default`: a system message stands in place of `start`, as where a template has one of its own.
    """

    start: str
    around: dict[str, tuple[str, str]]
    opening: str
    default: bool = False

    def render(self, messages: Sequence[Message]) -> str:
        """What Ollama will make of a conversation."""
        body = "".join(
            self.around[each["role"]][0] + each["content"] + self.around[each["role"]][1] for each in messages
        )
        own = self.default and messages[0]["role"] == "system"
        return ("" if own else self.start) + body + self.opening


def take_apart(tokenizer: Any) -> Pieces | None:
    """The pieces of the tokenizer's chat template; None where it has none, or cannot be taken apart."""
    if not tokenizer.chat_template:
        return None
    try:
        first = _render(tokenizer, ["user"], False)
        spoken = _render(tokenizer, ["user"], True)
        talk = _render(tokenizer, ["user", "assistant", "user"], False)
        answered = _render(tokenizer, ["user", "assistant"], False)
    except Exception:  # a template raises what it likes for what it does not take
        return None
    system = None
    with suppress(Exception):  # Gemma's template, for one, raises for a system message
        before, mark, rest = _render(tokenizer, ["system", "user"], False).partition(MARKS["system"])
        between, asked, _ = rest.partition(MARKS["user"])
        system = (before, between) if mark and asked else None
    user, answer = MARKS["user"], MARKS["assistant"]
    if not spoken.startswith(first) or first.count(user) != 1 or talk.count(user) != 2 or talk.count(answer) != 1:
        return None
    after_user, after_answer = talk.rpartition(user)[2], answered.rpartition(answer)[2]
    between, _, later = talk.partition(user)[2].partition(answer)
    # A later user message has before it what ends the answer, and then what begins a user's; the first one has what
    # begins the conversation in place of the former.
    before_user = later.partition(user)[0].removeprefix(after_answer)
    start = first.partition(user)[0].removesuffix(before_user)
    around = {"user": (before_user, after_user), "assistant": (between.removeprefix(after_user), after_answer)}
    if system is not None:
        around["system"] = (system[0].removeprefix(start), system[1].removesuffix(before_user))
    default = bool(start) and system is not None and not system[0].startswith(start)
    return Pieces(start, around, spoken[len(first) :], default)


def _render(tokenizer: Any, roles: Sequence[str], opening: bool) -> str:
    messages = [{"role": role, "content": MARKS[role]} for role in roles]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opening))


def differences(tokenizer: Any, pieces: Pieces) -> list[str]:
    """Kinds of conversations that come out otherwise than in training."""

    def said(role: str, text: str) -> Message:
        return {"role": role, "content": text}

    user, more = said("user", "What is 2 + 3?"), said("user", "And 4 more?")
    tried = {"one question": [user], "several turns": [user, said("assistant", "5"), more]}
    if "system" in pieces.around:
        tried["a system message"] = [said("system", "Be brief."), user]
    wrong = []
    for name, messages in tried.items():
        truth = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        if truth != pieces.render(messages):
            wrong.append(name)
    return wrong + ([] if "system" in pieces.around else ["a system message, which the template does not take"])


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
    """Text as it is, where the template language or the file's quotes would read it otherwise as a Go string."""
    unclear = "{{" in text or "}}" in text or '"""' in text or text.endswith('"')
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if unclear else text


def modelfile(source: Any, ends: Sequence[int], file: str) -> tuple[str, list[str]]:
    """The Modelfile of a run's GGUF file, and what it cannot express."""
    config, tokenizer = source.config, source.tokenizer
    settings, notes = config.generation, []
    pieces = take_apart(tokenizer) if config.data.chat else None
    lines = [f"# Run {source.run.id}, step {source.step}.", f"FROM ./{file}"]
    if not config.data.chat:
        lines.append('TEMPLATE """{{ if .System }}{{ .System }}\n\n{{ end }}{{ .Prompt }}"""')
    elif pieces is None:
        notes.append("the chat template cannot be expressed; Ollama uses the one that it guesses from the file")
    else:
        wrong, begin = differences(tokenizer, pieces), tokenizer.bos_token
        if begin and pieces.start.startswith(begin) and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
            notes.append("the beginning-of-text token is left to Ollama, which adds it")
            pieces = replace(pieces, start=pieces.start.removeprefix(begin))
        notes += [f"the template differs from training for: {each}" for each in wrong]
        lines.append(f'TEMPLATE """{go_template(pieces)}"""')
    prompt = config.data.system_prompt
    if prompt and ('"""' in prompt or prompt.endswith('"')):
        notes.append(
            "the system prompt of training is left out, as a Modelfile cannot hold one with three quotes in a row or with one at "
            "its end: give it with every request"
        )
    elif prompt:
        lines.append(f'SYSTEM """{prompt}"""')
    lines += [f"PARAMETER stop {json.dumps(tokenizer.decode([end]), ensure_ascii=False)}" for end in ends]
    # Ollama's own defaults cut the distribution and punish repetition; these are the run's.
    lines += [
        f"PARAMETER temperature {settings.temperature:g}",
        f"PARAMETER top_p {settings.top_p:g}",
        f"PARAMETER top_k {settings.top_k}",
        f"PARAMETER min_p {settings.min_p or 0:g}",
        "PARAMETER repeat_penalty 1",
    ]
    lines += [f"# Note: {note}." for note in notes]
    return "\n".join(lines) + "\n", notes
