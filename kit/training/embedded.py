"""The embedded model: a tiny Qwen3 that the kit builds itself, so that everything can be tried without a GPU or a hub.

It is warmed up by supervised fine-tuning on chain sums (`3 + 5 - 2 =`) answered in two manners, on purpose:

    careful   (one answer in five)    <think>3 + 5 = 8, 8 - 2 = 6</think><answer>6</answer>      always right
    careless  (the rest)              <think>a guess</think><answer>4</answer>                   right sometimes

First it learns the careful manner alone, then to be careless most of the time. So it has the format, is right now and
then, and can do better than it usually does. GRPO elicits the careful manner; it does not teach arithmetic. The weights
are built once and kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kit.config import EMBEDDED, EMBEDDED_MODELS
from kit.errors import RunError

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = "State the final answer to the following arithmetic problem: {} ="
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
Progress = Callable[[int, int, float], None]  # (steps done, steps in all, loss in nats per token)


@dataclass(frozen=True)
class EmbeddedRecipe:
    """What the embedded model is made of. Any change gives it another place in the cache."""

    version: int = 1
    seed: int = 0
    vocabulary: int = 512
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 384
    context: int = 1024
    terms: tuple[int, int] = (2, 4)
    careful_share: float = 0.2
    careless_right: float = 0.15
    skill_steps: int = 260
    steps: int = 340
    batch: int = 64
    learning_rate: float = 3e-3
    init_std: float = 0.08

    @property
    def key(self) -> str:
        """Short hash of every field."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def chat_template(self) -> str:
        return CHAT_TEMPLATE

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts that are one token each."""
        return TAGS

    def corpus(self, rng: random.Random) -> list[str]:
        """Texts that the tokenizer is trained on."""
        texts = ["user\n", "assistant\n", "system\n", "Think first, then answer."]
        return texts + ["".join(exercise(self, rng)) for _ in range(500)]

    def finish(self, tokenizer: Any) -> None:
        """What a variant adds to the tokenizer."""

    def example(self, tokenizer: Any, rng: random.Random, careful_share: float) -> tuple[list[int], list[int]]:
        """Token ids of an exercise (L,), and labels (L,) with -100 on the prompt."""
        question, answer = exercise(self, rng, careful_share)
        prompt: list[int] = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        reply = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        return prompt + reply, [-100] * len(prompt) + reply


def recipe_of(name: str) -> EmbeddedRecipe:
    """The recipe of an embedded model by its name in `model.name`."""
    if name == EMBEDDED:
        return EmbeddedRecipe()
    from kit.training.embedded_tools import ToolRecipe

    return ToolRecipe()


def cache_folder() -> Path:
    """Where built models are kept: `$GRPO_KIT_CACHE`, else `$XDG_CACHE_HOME/grpo-kit`, else `~/.cache/grpo-kit`."""
    if folder := os.environ.get("GRPO_KIT_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo-kit"


def embedded_model_folder(recipe: EmbeddedRecipe | None = None, progress: Progress | None = None) -> Path:
    """Folder of the embedded model in HF layout; builds it first if it is not in the cache.

    Two processes that ask at once build it once: the second waits. An interrupted build leaves nothing behind.
    Raises `RunError` when the cache folder cannot be written.
    """
    recipe = recipe or EmbeddedRecipe()
    folder = cache_folder() / f"embedded-{recipe.key}"
    if (folder / "config.json").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f"{folder.name}.lock"):
            if not (folder / "config.json").is_file():
                work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
                try:
                    build(recipe, work, progress)
                    os.replace(work, folder)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise RunError(
            f"The embedded model cannot be kept in {folder.parent}: {error.strerror or error}. "
            "Free some space (it takes 5 MB), or point GRPO_KIT_CACHE to a folder that can be written."
        ) from error
    return folder


def source_of(name: str, progress: Progress | None = None) -> str:
    """The folder of an embedded model, built if it is not there; any other `model.name` is its own source."""
    return str(embedded_model_folder(recipe_of(name), progress)) if name in EMBEDDED_MODELS else name


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build(recipe: EmbeddedRecipe, folder: Path, progress: Progress | None = None) -> None:
    """Builds tokenizer and model, warms the model up, and saves both to `folder`."""
    import torch

    tokenizer = build_tokenizer(recipe)
    model = build_model(recipe, tokenizer)
    warm_up(model, tokenizer, recipe, progress)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "recipe.json").write_text(json.dumps({**asdict(recipe), "torch": torch.__version__}, indent=2))


def build_tokenizer(recipe: EmbeddedRecipe) -> Any:
    """Byte-level BPE with one token a digit, the chat and answer tags as tokens, and a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary - len(recipe.tags),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(recipe.corpus(random.Random(recipe.seed)), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=recipe.context,
        clean_up_tokenization_spaces=False,
    )
    fast.add_tokens(list(recipe.tags))  # ordinary tokens, so that decoding without special tokens keeps them
    fast.chat_template = recipe.chat_template
    recipe.finish(fast)
    return fast


def build_model(recipe: EmbeddedRecipe, tokenizer: Any) -> Any:
    """A Qwen3 with random weights, float32."""
    import torch
    from transformers import Qwen3ForCausalLM

    config = model_config(recipe, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(recipe.seed)
    return Qwen3ForCausalLM(config)


def model_config(recipe: EmbeddedRecipe, **tokens: int) -> Any:
    """The shape of the embedded model, as transformers' `Qwen3Config`."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.hidden // recipe.heads,
        intermediate_size=recipe.intermediate,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        initializer_range=recipe.init_std,
        bos_token_id=None,
        **tokens,
    )


def exercise(recipe: EmbeddedRecipe, rng: random.Random, careful_share: float | None = None) -> tuple[str, str]:
    """A question and one answer to it, careful or careless."""
    careful_share = recipe.careful_share if careful_share is None else careful_share
    terms = [(rng.choice("+-"), rng.randint(0, 9)) for _ in range(rng.randint(*recipe.terms))]
    text = str(terms[0][1]) + "".join(f" {sign} {term}" for sign, term in terms[1:])
    *_, (_, total) = steps = list(_working(terms))
    if rng.random() < careful_share:
        thought, answer = ", ".join(step for step, _ in steps), total
    else:
        wrong = total + rng.choice((-1, 1)) * rng.randint(1, 4)
        thought, answer = "a guess", total if rng.random() < recipe.careless_right else wrong
    return QUESTION.format(text), f"<think>{thought}</think><answer>{answer}</answer>"


def _working(terms: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Each step of a careful answer, and the running sum after it."""
    running = terms[0][1]
    for sign, term in terms[1:]:
        result = running + term if sign == "+" else running - term
        yield f"{running} {sign} {term} = {result}", result
        running = result


def warm_up(model: Any, tokenizer: Any, recipe: EmbeddedRecipe, progress: Progress | None = None) -> None:
    """Supervised fine-tuning of the whole model on exercises, loss on the answers only."""
    import torch

    rng = random.Random(recipe.seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / 20) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))),
    )
    model.train()
    for step in range(recipe.steps):
        share = 1.0 if step < recipe.skill_steps else recipe.careful_share
        inputs, labels = _batch([recipe.example(tokenizer, rng, share) for _ in range(recipe.batch)], tokenizer)
        logits = model(input_ids=inputs).logits[:, :-1]  # (B, L-1, V)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if progress is not None:
            progress(step + 1, recipe.steps, loss.item())
    model.eval()


def _batch(examples: list[tuple[list[int], list[int]]], tokenizer: Any) -> tuple[Any, Any]:
    """Right-padded ids (B, L) and labels (B, L) with -100 on prompts and padding."""
    import torch

    rows = [torch.tensor(ids) for ids, _ in examples]
    targets = [torch.tensor(labels) for _, labels in examples]
    pad = torch.nn.utils.rnn.pad_sequence
    return (
        pad(rows, batch_first=True, padding_value=tokenizer.pad_token_id),
        pad(targets, batch_first=True, padding_value=-100),
    )
