"""GRPO from top to bottom in one file: a tiny model learns to work sums out instead of guessing. No GPU, about a minute.

    python examples/grpo_loop.py

The model gives two kinds of answers to "5 + 7 + 3 =". Most are guesses, `<think>a guess</think><answer>13</answer>`, and
now and then it writes the working out, `<think>5 + 7 = 12, 12 + 3 = 15</think><answer>15</answer>`. Nobody tells it which
kind is better: it only learns whether the number was right, and whether the tags were.

A step of GRPO (`train_step` below):

    1. Draw a few problems, and answer each several times by sampling. The answers to one problem are a group.
    2. Reward every answer by a program.
    3. Compare each answer with its group: its advantage is (reward - the group's mean) / the group's standard deviation.
    4. Move the weights so that answers with a positive advantage become likelier, the others less likely.

There is no second model that predicts rewards, as in PPO, and no example of a good answer, as in supervised fine-tuning.
A group of equal rewards teaches nothing: all of its advantages are 0.

`kit.train` does the same for models and data of any size: faster, in less memory, and without losing anything on the way.
"""

import random
import time
from typing import NamedTuple

# kit comes first: it tells torch's threads to sleep while they wait, so that this also runs where other programs do.
from kit.objective import LossScale, Objective, RewardBatch, TokenBatch
from kit.models.embedded import source_of
import rewards

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedTokenizerBase

STEPS = 12
PROBLEMS = 16  # a step
GROUP = 8  # answers to each of them
UPDATES = 2  # of the weights on the answers of one step
MAX_TOKENS = 64  # of an answer
LEARNING_RATE = 3e-4  # of a model with 0.7 million weights; one of billions takes 1e-6 to 1e-5
HELD_OUT = 200  # problems that are never trained on

Problem = tuple[str, str]  # a question and its right answer


class Answers(NamedTuple):
    """B answers with their prompts. A is the number of tokens of the longest prompt, T that of the longest answer."""

    tokens: Tensor  # (B, A + T): prompts are padded on the left, answers on the right, so that all answers begin at A
    real: Tensor  # (B, A + T) bool: not padding
    start: int  # A
    texts: list[str]

    @property
    def mask(self) -> Tensor:
        """(B, T) bool: the tokens that the model chose. It is trained on these, and not on prompts or padding."""
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
    """One answer to each question, token by token, all of them at once.

    Tokens are drawn from the model's own distribution: temperature 1, nothing cut off. The loss assumes just that.
    `greedy` takes the likeliest token instead, which is how the model is judged.
    """
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    tokens, real = prompts["input_ids"], prompts["attention_mask"].bool()
    start, new = tokens.shape[1], tokens
    going = torch.ones(len(tokens), dtype=torch.bool)  # answers that have not ended yet
    cache = DynamicCache(config=model.config)  # keys and values of all tokens so far: each is forwarded once
    for _ in range(MAX_TOKENS):
        logits = model(input_ids=new, attention_mask=real, past_key_values=cache).logits[:, -1]
        new = logits.argmax(-1, keepdim=True) if greedy else torch.multinomial(logits.softmax(-1), 1)
        new = new.where(going[:, None], tokenizer.pad_token_id)
        tokens, real = torch.cat([tokens, new], dim=1), torch.cat([real, going[:, None]], dim=1)
        going = going & (new[:, 0] != tokenizer.eos_token_id)  # the token that ends an answer belongs to it
        if not going.any():
            break
    return Answers(tokens, real, start, tokenizer.batch_decode(tokens[:, start:], skip_special_tokens=True))


def log_probabilities(model: PeftModel, answers: Answers) -> Tensor:
    """(B, T): what the model gives to each token of the answers, as log-probability."""
    logits = model(input_ids=answers.tokens, attention_mask=answers.real).logits
    logits = logits[:, answers.start - 1 : -1]  # the logits at a token are about the next one
    return logits.log_softmax(-1).gather(-1, answers.tokens[:, answers.start :, None]).squeeze(-1)


def train_step(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    objective: Objective,
    preset: rewards.Preset,
    problems: list[Problem],
) -> dict[str, float]:
    """One step of GRPO on these problems. Gives back what is worth watching."""
    # 1. Answer every problem GROUP times: B answers, of which the first GROUP are to the first problem, and so on.
    questions = [question for question, _ in problems for _ in range(GROUP)]
    references = [reference for _, reference in problems for _ in range(GROUP)]
    answers = sample(model, tokenizer, questions)

    # 2. Reward: 1 for the right number, and up to 0.3 for the layout, which alone never pays as much as being right.
    scored = preset.score(rewards.build_samples(questions, answers.texts, reference=references))
    totals = torch.tensor(scored.totals)  # (B,)

    # 3. Advantage: how much better is an answer than its siblings? (reward - mean of the group) / deviation of the group
    group = torch.arange(len(problems)).repeat_interleave(GROUP)  # (B,): 0 0 0 ... 1 1 1 ...
    advantages = objective.compute_advantages(RewardBatch(rewards=totals, group=group))  # (B,)

    # 4. Update. Every token of an answer gets the answer's advantage A. With r = probability now / probability when it was
    #    drawn, the gain of a token is r · A. At the first update r is 1 everywhere, and the gradient is that of
    #    A · log-probability: plain REINFORCE. Another update on the same answers is cheaper than new answers, but it learns
    #    from what the model would no longer say. So nothing is gained by moving r above 1.28 where A is positive, or below
    #    0.8 where it is negative: no token is pushed far by one batch.
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
        "right": torch.tensor(scored.values["accuracy"]).mean().item(),  # of the answers
        "tokens": answers.mask.sum(1).float().mean().item(),
        "groups that teach": (by_group.amax(1) > by_group.amin(1)).float().mean().item(),
    }


def held_out_score(
    model: PeftModel, tokenizer: PreTrainedTokenizerBase, preset: rewards.Preset, problems: list[Problem]
) -> tuple[float, str]:
    """The share of problems that the model gets right when it takes the likeliest token each time, and its first answer."""
    questions, references = [question for question, _ in problems], [reference for _, reference in problems]
    answers = sample(model, tokenizer, questions, greedy=True)
    right = preset.is_correct(rewards.build_samples(questions, answers.texts, reference=references))
    return sum(right) / len(right), f"{questions[0]} {answers.texts[0]}"


def load_model() -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """The kit's tiny model with a LoRA adapter, and its tokenizer."""
    folder = source_of("embedded")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # LoRA: the weights stay as they are, and beside each matrix two thin ones are trained. What was learned is a small file.
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
