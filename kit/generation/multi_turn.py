"""Completions of several turns: their end, their text, and sampling them without a trainer.

Held-out evaluation and the signal check use the same loop of tool calls as training: TRL's `GRPOTrainer._tool_call_loop`, on an
object with the attributes that the loop reads. `kit.models.libraries.check_trl` requires a version for which these are known.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.generation.tools import ToolSetup


def finish_reason(ids: Sequence[int], ends: Collection[int], completion: Any = None) -> str:
    """`stop`: the model ended the completion; `length`: it was cut; `tool_calls`: its last call has no answer.

    A call has no answer if generation.max_tool_calling_iterations is reached or the answer does not fit into the completion.
    """
    if unanswered(completion):
        return "tool_calls"
    return "stop" if ids and ids[-1] in ends else "length"


def unanswered(completion: Any) -> bool:
    """Whether a completion ends with a call without an answer."""
    last = completion[-1] if isinstance(completion, list) and completion else {}
    return isinstance(last, Mapping) and bool(last.get("tool_calls"))


def readable(completion: Any) -> str:
    """A completion as readable text: contents of messages, tool calls, and answers of tools."""
    if isinstance(completion, str):
        return completion
    if len(completion) == 1 and not completion[0].get("tool_calls"):
        return str(completion[0].get("content") or "")
    return "\n".join(line for message in completion for line in _lines(message))


def _lines(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content") or ""
    content = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
    if message.get("role") == "tool":
        return [f"[{message.get('name', 'tool')}] {content}"]
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    spoken = [content] if content else []
    return spoken + [
        f"{call.get('name')}({', '.join(f'{key}={value!r}' for key, value in (call.get('arguments') or {}).items())})"
        for call in calls
    ]


# --- several turns without a trainer ----------------------------------------------------------------------------------


Generate = Callable[[list[list[int]]], list[list[int]]]  # ids of prompts -> ids of completions, each up to its end
UNLIMITED = 10**9


class Conversation(tuple[list[int], bool]):
    """(token ids, whether it was cut), like any completion, with its mask of tool tokens, messages and environment."""

    prompt_ids: list[int]
    tool_mask: list[int]  # 1 for the model's tokens, 0 for those of a tool
    messages: list[dict[str, Any]]
    environment: Any
    prompt: Any
    reason: str


class MultiTurnSampler:
    """Samples conversations for rows of a dataset. `limit`: maximum tokens of a completion, all turns and answers included."""

    def __init__(self, interaction: ToolSetup, tokenizer: Any, limit: int) -> None:
        from kit.generation.tools import training_template

        self.interaction, self.tokenizer, self.limit = interaction, tokenizer, limit
        self.chat_template = training_template(tokenizer, "this model")

    def ids_of(self, prompt: Any, tools: Sequence[Any]) -> list[int]:
        """Token ids of the prompt with the tools' descriptions."""
        ids: list[int] = self.tokenizer.apply_chat_template(
            prompt,
            tools=list(tools) or None,
            chat_template=self.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
        )["input_ids"]
        return ids

    def converse(
        self, rows: Sequence[dict[str, Any]], generate: Generate, ends: Sequence[int], model: Any
    ) -> list[Conversation]:
        """Samples one conversation per row, each with its own tools and environment."""
        from trl import GRPOTrainer
        from trl.chat_template_utils import parse_response

        from kit.generation.tools import open_row

        opened = [open_row(self.interaction, row) for row in rows]
        prompts = [prompt for prompt, _, _ in opened]
        prompt_ids = [self.ids_of(prompt, tools) for prompt, _, tools in opened]
        ids = generate(prompt_ids)
        messages = [
            [parse_response(self.tokenizer, own, prefix=prompt_part)]
            for own, prompt_part in zip(ids, prompt_ids, strict=True)
        ]
        loop = self._stand_in(opened, generate, model)
        mask, messages, ids, *_ = GRPOTrainer._tool_call_loop(
            loop, copy.deepcopy(prompts), prompt_ids, ids, messages, None, None, {}
        )
        return [
            _conversation(prompt_part, own, marks, turns, place, ends)
            for prompt_part, own, marks, turns, place in zip(prompt_ids, ids, mask, messages, opened, strict=True)
        ]

    def _stand_in(self, opened: Sequence[tuple[Any, Any, list[Any]]], generate: Generate, model: Any) -> Any:
        """An object with the attributes that TRL's loop reads from a trainer that generates with transformers."""
        from trl import GRPOTrainer

        most = self.interaction.max_iterations
        loop = SimpleNamespace(
            use_vllm=False,
            _is_vlm=False,
            model=SimpleNamespace(config=model.config),
            tools=self.interaction.tools,
            processing_class=self.tokenizer,
            _tokenizer=self.tokenizer,
            chat_template=self.chat_template,
            chat_template_kwargs={},
            max_completion_length=self.limit,
            max_tool_calling_iterations=UNLIMITED if most is None else most,
            _sync_tool_dicts=[{tool.__name__: _synchronous(tool) for tool in tools} for _, _, tools in opened],
            _async_tool_dicts=[{} for _ in opened],
            _generate_single_turn=lambda ids, *_, **__: (generate(ids), None),
        )
        loop._get_tool_suffix_ids = functools.partial(GRPOTrainer._get_tool_suffix_ids, loop)
        return loop


def _conversation(
    prompt_ids: list[int], ids: list[int], mask: list[int], messages: Any, row: Any, ends: Sequence[int]
) -> Conversation:
    reason = finish_reason(ids, ends, messages)
    made = Conversation((ids, reason != "stop"))
    made.prompt_ids, made.tool_mask, made.messages, made.reason = prompt_ids, mask, messages, reason
    made.prompt, made.environment, _ = row
    return made


def _synchronous(tool: Callable[..., Any]) -> Callable[..., Any]:
    if not inspect.iscoroutinefunction(tool):
        return tool
    return lambda **arguments: asyncio.run(tool(**arguments))


def own_tokens(completion: Any) -> int:
    """Number of tokens that the model wrote, without those of tools."""
    return sum(completion.tool_mask) if isinstance(completion, Conversation) else len(completion[0])


def environment_rewards(completions: Sequence[Any]) -> list[float | None]:
    """The reward of each completion's environment (`get_reward`); None if it has no such method."""
    return [_reward(getattr(completion, "environment", None)) for completion in completions]


def _reward(environment: Any) -> float | None:
    method = getattr(environment, "get_reward", None)
    if method is None:
        return None
    value = asyncio.run(method()) if inspect.iscoroutinefunction(method) else method()
    return None if value is None else float(value)
