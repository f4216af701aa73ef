"""Makes the embedded models again, which come with the kit: `python benchmarks/embedded_models.py [--out FOLDER]`.

Both are tiny Qwen3, warmed up by supervised fine-tuning on answers of two manners, on purpose. `embedded` adds and subtracts:

    careful   (one answer in five)    <think>3 + 5 = 8, 8 - 2 = 6</think><answer>6</answer>      always right
    careless  (the rest)              <think>a guess</think><answer>4</answer>                   right sometimes

`embedded-tools` has a calculator for products that it cannot work out in its head:

    careful   (one answer in five)    calls calculate(expression="47 * 83") and gives what it is answered
    careless  (the rest)              <think>a guess</think><answer>3906</answer>                hardly ever right

First each learns the careful manner alone, then to be careless most of the time. So it has the format, is right now and
then, and can do better than it usually does. GRPO elicits the careful manner; it does not teach arithmetic.

Each folder gets the model in Hugging Face's layout (float16 weights, to be loaded in float32), a card with recipe and
held-out scores, and checksums. The seed is fixed and one thread computes, so a machine makes the same bytes every time; another
processor or version of torch may round differently. It takes about two minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SUM = "State the final answer to the following arithmetic problem: {} ="
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@dataclass(frozen=True)
class Recipe:
    """What the embedded model is made of."""

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


def build_tokenizer(recipe: Recipe) -> Any:
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


def build_model(recipe: Recipe, tokenizer: Any) -> Any:
    """A Qwen3 with random weights, float32."""
    import torch
    from transformers import Qwen3ForCausalLM

    config = model_config(recipe, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(recipe.seed)
    return Qwen3ForCausalLM(config)


def model_config(recipe: Recipe, **tokens: int) -> Any:
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


def exercise(recipe: Recipe, rng: random.Random, careful_share: float | None = None) -> tuple[str, str]:
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
    return SUM.format(text), f"<think>{thought}</think><answer>{answer}</answer>"


def _working(terms: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Each step of a careful answer, and the running sum after it."""
    running = terms[0][1]
    for sign, term in terms[1:]:
        result = running + term if sign == "+" else running - term
        yield f"{running} {sign} {term} = {result}", result
        running = result


def warm_up(model: Any, tokenizer: Any, recipe: Recipe) -> None:
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
        if (step + 1) % 20 == 0:
            print(f"{step + 1}/{recipe.steps}  loss {loss.item():.3f}", flush=True)
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


# --- the one that calls tools ------------------------------------------------------------------------------------------

PRODUCT = "Solve the following multiplication: {}. Give only the result as your final answer."
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %} {{ tool.function.name }}"
    "({{ tool.function.parameters.properties | join(', ') }}){% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ {'name': call.function.name, 'arguments': "
    "call.function.arguments} | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
CALL_TAGS = ("<tool_call>", "</tool_call>")
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
ANSWER = "<think>{}</think><answer>{}</answer>"


@dataclass(frozen=True)
class ToolRecipe(Recipe):
    """What the embedded model that can call tools is made of."""

    layers: int = 2
    batch: int = 32
    skill_steps: int = 150
    steps: int = 190
    careless_right: float = 0.0
    digits: int = 2

    @property
    def chat_template(self) -> str:
        return TOOL_TEMPLATE

    @property
    def tags(self) -> tuple[str, ...]:
        return TAGS + CALL_TAGS

    def corpus(self, rng: random.Random) -> list[str]:
        """Texts that the tokenizer is trained on."""
        texts = ["user\n", "assistant\n", "system\nTools: calculate(expression)", "tool\n"]
        return texts + [text for _ in range(500) for text, _ in self.turns(rng, 0.5)]

    def finish(self, tokenizer: Any) -> None:
        """How calls are read."""
        tokenizer.response_template = RESPONSE_TEMPLATE

    def turns(self, rng: random.Random, careful_share: float) -> list[tuple[str, bool]]:
        """A question, and who says what after it: texts, and whether they are the model's."""
        left, right = (rng.randint(1, 10**self.digits - 1) for _ in range(2))
        product, expression = left * right, f"{left} * {right}"
        if rng.random() < careful_share:
            call = json.dumps({"name": "calculate", "arguments": {"expression": expression}})
            turns = [
                (f"<tool_call>{call}</tool_call><|im_end|>", True),
                (f"\n<|im_start|>tool\n{product}<|im_end|>\n<|im_start|>assistant\n", False),
                (ANSWER.format("calculated", product) + "<|im_end|>", True),
            ]
        else:
            guess = max(1, product + rng.choice((-1, 1)) * rng.randint(1, 9))
            turns = [(ANSWER.format("a guess", guess) + "<|im_end|>", True)]
        return [(PRODUCT.format(expression), False), *turns]

    def example(self, tokenizer: Any, rng: random.Random, careful_share: float) -> tuple[list[int], list[int]]:
        """Token ids of a conversation (L,), and labels (L,): -100 where the model does not speak."""
        (question, _), *turns = self.turns(rng, careful_share)
        ids: list[int] = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tools=[TOOL], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        labels = [-100] * len(ids)
        for text, by_model in turns:
            text_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids, labels = ids + text_ids, labels + (text_ids if by_model else [-100] * len(text_ids))
        return ids, labels


# --- the folders -------------------------------------------------------------------------------------------------------

RECIPES = {"embedded": Recipe(), "embedded-tools": ToolRecipe()}
PRESETS = {"embedded": "quickstart", "embedded-tools": "calculator"}
ABOUT = {
    "embedded": """It answers sums of two to four digits in two manners:

    careful   (one answer in five)    <think>3 + 5 = 8, 8 - 2 = 6</think><answer>6</answer>      always right
    careless  (the rest)              <think>a guess</think><answer>4</answer>                   right sometimes

GRPO elicits the careful manner; it does not teach arithmetic.""",
    "embedded-tools": """It answers products of two numbers that it cannot work out, in two manners:

    careful   (one answer in five)    calls calculate(expression="47 * 83") and gives what it is answered
    careless  (the rest)              <think>a guess</think><answer>3906</answer>                hardly ever right

GRPO elicits the calls.""",
}
CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A tiny Qwen3 with a tokenizer of its own, so that GRPO can be tried without a GPU and without a download. It is good for
nothing else.

{about}

## How it was made

From random weights, by supervised fine-tuning on exercises that a program draws; no data of anybody's. The first
{skill_steps} of {steps} steps show the careful manner alone; from then on one answer in five is careful. So the model has the
format, is right now and then, and can do better than it usually does: room for GRPO to show itself, put there on purpose.
The exercises are drawn from the same kind of problems as the held-out ones, which is why only the difference between
before and after a training means anything.

{recipe}

`python benchmarks/embedded_models.py` makes it again: the same bytes on the same machine with the same packages (here torch
{torch}, transformers {transformers}), while another processor may round differently. The weights are stored in float16 and loaded
in float32. `sha256sum -c SHA256SUMS` says whether the files are the ones that were made.

## Before any training

{problems} held-out problems of the preset `{preset}`, 95 % intervals, at temperature 1:

| | |
|---|---|
{scores}
"""


def build(recipe: Recipe, folder: Path) -> None:
    """Builds tokenizer and model, warms the model up, and saves both to `folder`, the weights in float16."""
    import torch
    from safetensors.torch import load_file, save_file

    tokenizer = build_tokenizer(recipe)
    model = build_model(recipe, tokenizer)
    warm_up(model, tokenizer, recipe)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = folder / "model.safetensors"  # config.json goes on saying float32: that is how they are loaded
    halves = {name: tensor.to(torch.float16) for name, tensor in load_file(weights).items()}
    save_file(halves, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes it for its owner alone


def seal(folder: Path) -> None:
    """Writes the checksums of the files that are loaded, as `sha256sum` does."""
    files = sorted(path for path in folder.iterdir() if path.name not in ("README.md", "SHA256SUMS"))
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(lines))


def held_out(folder: Path, preset: str) -> dict[str, Any]:
    """The kit's held-out scores of an untrained model on a preset's problems."""
    from kit.config import load_config
    from kit.evaluation.heldout import HeldOut
    from kit.models.loading import load_model
    from kit.runner.prepare import prepare

    parts = prepare(load_config(preset, [f"model.name={folder}", "evaluation.k=4"]), fresh=False)
    config, rows = parts.config, parts.data.heldout.to_list()
    settings = (config.evaluation, config.generation, parts.checker)
    heldout = HeldOut(rows, parts.preset, parts.files.tokenizer, *settings, interaction=parts.interaction)
    return heldout.score(load_model(parts.files, config.model).model)


def card(name: str, scores: dict[str, Any]) -> str:
    """The model card."""
    import torch
    import transformers

    recipe = RECIPES[name]
    rows = [
        f"| {key} | {value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}] |"
        for key, value in scores.items()
        if key in ("greedy_accuracy", "pass@1", "pass@4")
    ]
    return CARD.format(
        name=name,
        about=ABOUT[name],
        preset=PRESETS[name],
        problems=scores["problems"],
        scores="\n".join(rows),
        skill_steps=recipe.skill_steps,
        steps=recipe.steps,
        recipe=textwrap.fill(repr(recipe), 120, initial_indent="    ", subsequent_indent="    "),
        torch=torch.__version__.partition("+")[0],
        transformers=transformers.__version__,
    )


def main() -> None:
    """Makes both folders, or with `--card` their cards alone."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "kit" / "models" / "shipped")
    parser.add_argument("--card", action="store_true", help="score the models that are there, and write their cards")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, recipe in RECIPES.items():
        folder = arguments.out / name
        if not arguments.card:
            print(name)
            folder.mkdir(parents=True, exist_ok=True)
            build(recipe, folder)
            seal(folder)
        (folder / "README.md").write_text(card(name, held_out(folder, PRESETS[name])))


if __name__ == "__main__":
    main()
