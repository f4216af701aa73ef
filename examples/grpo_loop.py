"""GRPO in one file: a tiny model learns to calculate sums step by step instead of guessing. It takes a minute on a CPU.

    python examples/grpo_loop.py

The model gives two kinds of answers to "5 + 7 + 3 =". Most are guesses, `<think>a guess</think><answer>13</answer>`. Some
contain the calculation, `<think>5 + 7 = 12, 12 + 3 = 15</think><answer>15</answer>`. The reward does not say which kind is
better, only whether the number and the tags are right.

A step of GRPO (`train_step` below):

    1. Choose some problems, and sample several answers to each. The answers to one problem are a group.
    2. A program computes the reward of every answer.
    3. Compare each answer with its group: its advantage is (reward - the group's mean) / the group's standard deviation.
    4. Update the weights so that answers with a positive advantage become more likely, the others less likely.

Unlike PPO, GRPO needs no second model that predicts rewards, and unlike supervised fine-tuning, no examples of good answers.
A group with equal rewards has no effect: all of its advantages are 0.

`kit.train` does the same for models and data of any size, faster, in less memory, and with checkpoints.
"""

import random
import time
from typing import NamedTuple

# Import kit first: it sets how torch's threads wait, so that this is fast on a busy machine too.
from kit.objective import LossScale, Objective, RewardBatch, TokenBatch
from kit.models.embedded import source_of
import rewards

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedTokenizerBase

STEPS = 12
PROBLEMS = 16  # per step
GROUP = 8  # answers per problem
UPDATES = 2  # optimiser steps on the answers of one step
MAX_TOKENS = 64  # per answer
LEARNING_RATE = 3e-4  # for 0.7 million weights; models with billions need 1e-6 to 1e-5
HELD_OUT = 200  # number of problems that are never trained on

Problem = tuple[str, str]  # a question and its right answer


class Answers(NamedTuple):
    """B answers with their prompts. The longest prompt has A tokens, the longest answer T."""

    tokens: Tensor  # (B, A + T): prompts are padded on the left, answers on the right, so all answers start at column A
    real: Tensor  # (B, A + T) bool: not padding
    start: int  # A
    texts: list[str]

    @property
    def mask(self) -> Tensor:
        """(B, T) bool: the tokens that the model sampled. Only these are trained, not prompts or padding."""
        return self.real[:, self.start :]


def make_problems(count: int) -> list[Problem]:
    """Different sums of two to four digits."""
    problems: dict[str, str] = {}
    while len(problems) < count:
        terms = [random.choice((-1, 1)) * random.randint(0, 9) for _ in range(random.randint(2, 4))]
        terms[0] = abs(terms[0])
        text = str(terms[0]) + "".join(f" {'-' if term < 0 else '+'} {abs(term)}" for term in terms[1:])
        problems[f"State the final answer to the following arithmetic problem: {text} ="] = str(sum(terms))
    return list(problems.items())


@torch.no_grad()
def sample(model: PeftModel, tokenizer: PreTrainedTokenizerBase, questions: list[str], greedy: bool = False) -> Answers:
    """Generate one answer to each question, for all questions at once.

    Tokens are sampled from the model's distribution without changes (temperature 1, no top-p), as the loss assumes. `greedy`
    takes the most likely token instead; held-out scores use it.
    """
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    tokens, real = prompts["input_ids"], prompts["attention_mask"].bool()
    start, new = tokens.shape[1], tokens
    going = torch.ones(len(tokens), dtype=torch.bool)  # answers that have not ended yet
    cache = DynamicCache(config=model.config)  # keys and values of earlier tokens
    for _ in range(MAX_TOKENS):
        logits = model(input_ids=new, attention_mask=real, past_key_values=cache).logits[:, -1]
        new = logits.argmax(-1, keepdim=True) if greedy else torch.multinomial(logits.softmax(-1), 1)
        new = new.where(going[:, None], tokenizer.pad_token_id)
        tokens, real = torch.cat([tokens, new], dim=1), torch.cat([real, going[:, None]], dim=1)
        going = going & (new[:, 0] != tokenizer.eos_token_id)  # the end token is part of the answer
        if not going.any():
            break
    return Answers(tokens, real, start, tokenizer.batch_decode(tokens[:, start:], skip_special_tokens=True))


def log_probabilities(model: PeftModel, answers: Answers) -> Tensor:
    """The log-probability of each token of the answers, (B, T)."""
    logits = model(input_ids=answers.tokens, attention_mask=answers.real).logits
    logits = logits[:, answers.start - 1 : -1]  # the logits at a position predict the next token
    return logits.log_softmax(-1).gather(-1, answers.tokens[:, answers.start :, None]).squeeze(-1)


def train_step(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    objective: Objective,
    preset: rewards.Preset,
    problems: list[Problem],
) -> dict[str, float]:
    """Make one step of GRPO on these problems, and return its metrics."""
    # 1. Answer every problem GROUP times: B answers. The first GROUP answers belong to the first problem, and so on.
    questions = [question for question, _ in problems for _ in range(GROUP)]
    references = [reference for _, reference in problems for _ in range(GROUP)]
    answers = sample(model, tokenizer, questions)

    # 2. Reward: 1 for the right number, and up to 0.3 for the layout, which alone never pays as much as being right.
    scored = preset.score(rewards.build_samples(questions, answers.texts, reference=references))
    totals = torch.tensor(scored.totals)  # (B,)

    # 3. Advantage of an answer within its group: (reward - mean of the group) / standard deviation of the group
    group = torch.arange(len(problems)).repeat_interleave(GROUP)  # (B,): 0 0 0 ... 1 1 1 ...
    advantages = objective.compute_advantages(RewardBatch(rewards=totals, group=group))  # (B,)

    # 4. Update. Every token of an answer has the answer's advantage A. With r = current probability / probability when it was
    #    sampled, the objective of a token is r · A. At the first update r is 1 everywhere, and the gradient is that of
    #    A · log-probability, i.e. REINFORCE. A second update on the same answers is cheaper than new answers, but the model
    #    would no longer sample exactly these. The clip therefore removes the gradient where r is above 1.28 and A positive,
    #    or r is below 0.8 and A negative, so that one batch cannot change a token's probability far beyond these bounds.
    with torch.no_grad():
        old = log_probabilities(model, answers)
    for _ in range(UPDATES):
        now = log_probabilities(model, answers)
        batch = TokenBatch(logps=now, old_logps=old, advantages=advantages[:, None], mask=answers.mask)
        loss = objective.loss(batch, LossScale(window_tokens=answers.mask.sum())).loss  # the mean over all tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    by_group = totals.view(len(problems), GROUP)
    return {
        "reward": totals.mean().item(),
        "right": torch.tensor(scored.values["accuracy"]).mean().item(),  # share of the answers
        "tokens": answers.mask.sum(1).float().mean().item(),
        "groups with a gradient": (by_group.amax(1) > by_group.amin(1)).float().mean().item(),
    }


def held_out_score(
    model: PeftModel, tokenizer: PreTrainedTokenizerBase, preset: rewards.Preset, problems: list[Problem]
) -> tuple[float, str]:
    """The share of problems that greedy decoding solves, and the first answer."""
    questions, references = [question for question, _ in problems], [reference for _, reference in problems]
    answers = sample(model, tokenizer, questions, greedy=True)
    right = preset.is_correct(rewards.build_samples(questions, answers.texts, reference=references))
    return sum(right) / len(right), f"{questions[0]} {answers.texts[0]}"


def load_model() -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """The kit's tiny model with a LoRA adapter, and its tokenizer."""
    folder = source_of("embedded")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # LoRA: the weights are frozen, and two thin matrices are trained for each weight matrix. The adapter is a small file.
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")), tokenizer


def main() -> None:
    """Train the embedded model for a few steps and print a held-out score before and after."""
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(2)

    model, tokenizer = load_model()
    optimizer = torch.optim.AdamW((weight for weight in model.parameters() if weight.requires_grad), lr=LEARNING_RATE)
    preset = rewards.load("gsm8k-reasoning")
    objective = Objective.from_spec("dapo")
    print(objective.describe(), end="\n\n")

    problems = make_problems(2000)
    held_out, problems = problems[:HELD_OUT], problems[HELD_OUT:]
    before, answer = held_out_score(model, tokenizer, preset, held_out)
    print(f"before: {before:.2f} of {HELD_OUT} held-out problems right, for instance\n  {answer}\n", flush=True)

    for step in range(1, STEPS + 1):
        began = time.perf_counter()
        numbers = train_step(model, tokenizer, optimizer, objective, preset, random.sample(problems, PROBLEMS))
        shown = "  ".join(f"{name} {value:.2f}" for name, value in numbers.items())
        print(f"step {step:2}/{STEPS}  {shown}  {time.perf_counter() - began:.1f} s", flush=True)

    after, answer = held_out_score(model, tokenizer, preset, held_out)
    print(f"\nafter: {after:.2f} of {HELD_OUT} held-out problems right, for instance\n  {answer}")


if __name__ == "__main__":
    main()
