"""The embedded model that can call tools: like the embedded model, on products that it cannot work out in its head.

    careful   (one answer in five)    calls calculate(expression="47 * 83") and gives what it is answered
    careless  (the rest)              <think>a guess</think><answer>3906</answer>                  hardly ever right

GRPO elicits the calls. Its chat template writes tools by name and arguments alone, which keeps prompts short.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from kit.training.embedded import TAGS, EmbeddedRecipe

QUESTION = "Solve the following multiplication: {}. Give only the result as your final answer."
CHAT_TEMPLATE = (
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
class ToolRecipe(EmbeddedRecipe):
    """What it is made of."""

    layers: int = 2
    batch: int = 32
    skill_steps: int = 150
    steps: int = 190
    careless_right: float = 0.0
    digits: int = 2

    @property
    def chat_template(self) -> str:
        return CHAT_TEMPLATE

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
            said = [
                (f"<tool_call>{call}</tool_call><|im_end|>", True),
                (f"\n<|im_start|>tool\n{product}<|im_end|>\n<|im_start|>assistant\n", False),
                (ANSWER.format("calculated", product) + "<|im_end|>", True),
            ]
        else:
            guess = max(1, product + rng.choice((-1, 1)) * rng.randint(1, 9))
            said = [(ANSWER.format("a guess", guess) + "<|im_end|>", True)]
        return [(QUESTION.format(expression), False), *said]

    def example(self, tokenizer: Any, rng: random.Random, careful_share: float) -> tuple[list[int], list[int]]:
        """Token ids of a conversation (L,), and labels (L,): -100 where the model does not speak."""
        (question, _), *said = self.turns(rng, careful_share)
        ids: list[int] = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tools=[TOOL], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        labels = [-100] * len(ids)
        for text, own in said:
            made = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids, labels = ids + made, labels + (made if own else [-100] * len(made))
        return ids, labels
