"""An answer as the run's held-out evaluation makes one, but for sampling settings of one's own and words as they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kit.evaluation.heldout import Completion, HeldOut, scoring_context
from kit.generation.prompts import is_plain, tell_of_thinking

if TYPE_CHECKING:
    from rewards import Evaluation


class Answerer(HeldOut):
    """Ids, pictures, tools and environments of a row as in training. `sampling` as `kit.chat.answering.Talker.sampling`."""

    sampling: Mapping[str, Any]

    def ask(
        self,
        model: Any,
        row: dict[str, Any],
        sampling: Mapping[str, Any],
        stream: Stream,
        cancelled: Callable[[], bool],
    ) -> Completion:
        """One completion; with its turns where the model may call tools."""
        self.sampling, self.plain = sampling, is_plain([row["prompt"]])
        tell_of_thinking(self.preset, self.tokenizer, [row["prompt"]])
        if self.talker is not None:
            self.talker.limit = sampling["max_tokens"]
        stop = [lambda ids, scores, **_: _all(cancelled() or stream.is_full(ids.shape[1], sampling["max_tokens"]), ids)]
        self.further = {"streamer": stream, "stopping_criteria": stop}
        (done,) = self._ended(model, [self._prompt(row)], True, stream.ends)
        return done

    def judge(self, row: dict[str, Any], done: Completion) -> Evaluation:
        """The run's reward of a completion, what its environment says of it included."""
        return self._verdict(self._as_samples([row], [done]), [done], scoring_context())

    def _generation_config(self, sample: bool, ends: list[int]) -> Any:
        from transformers import GenerationConfig

        greedy = self.sampling["temperature"] == 0
        drawn = {} if greedy else {name: self.sampling[name] for name in ("temperature", "top_p", "top_k")}
        if not greedy and self.sampling["min_p"]:
            drawn["min_p"] = self.sampling["min_p"]
        return GenerationConfig(
            do_sample=not greedy,
            max_new_tokens=self.sampling["max_tokens"],
            eos_token_id=ends,
            pad_token_id=self.tokenizer.pad_token_id,
            repetition_penalty=self.generation.repetition_penalty,
            disable_compile=True,
            **drawn,
        )


def _all(stop: bool, ids: Any) -> Any:
    import torch

    return torch.full((ids.shape[0],), stop, device=ids.device, dtype=torch.bool)


class Stream:
    """What `generate` tells of each token: turned into text that only ever grows, what tools answer included.

    `check` is given the length of the first prompt.
    """

    def __init__(
        self, tokenizer: Any, ends: Sequence[int], say: Callable[[str], None], check: Callable[[int], None]
    ) -> None:
        self.tokenizer, self.ends, self.say, self.check = tokenizer, list(ends), say, check
        self.ids: list[int] = []  # of the turn under way
        self.text = ""
        self._turn, self._known = "", list[int]()  # this turn's text so far; prompt and turn before it
        self._asked, self._prompt = 0, True

    def is_full(self, length: int, most: int) -> bool:
        """Whether the conversation has `most` tokens behind its first prompt."""
        return length >= self._asked + most

    def put(self, value: Any) -> None:
        """Takes the prompt first, then one token after the other; likewise in each further turn."""
        ids = value.flatten().tolist()
        if not self._prompt:
            self.ids += ids
            self._grow(final=False)
            return
        self._prompt = False
        if not self._known:
            self._asked = len(ids)
            self.check(len(ids))
        else:
            between = ids[len(self._known) :] if ids[: len(self._known)] == self._known else []
            self._say(f"\n{self._decoded(between).strip()}\n")
        self._known, self.ids, self._turn = ids, [], ""

    def end(self) -> None:
        """Says what was held back."""
        self._grow(final=True)
        self._known, self._prompt = self._known + self.ids, True

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode([each for each in ids if each not in self.ends], skip_special_tokens=True))

    def _grow(self, *, final: bool) -> None:
        text = self._decoded(self.ids)
        if not final and text.endswith("\ufffd"):  # half a character
            return
        if len(text) > len(self._turn) and text.startswith(self._turn):
            self._say(text[len(self._turn) :])
            self._turn = text
        elif final and text != self._turn:  # the tokenizer wrote earlier words anew
            self.text = self.text.removesuffix(self._turn) + text
            self._turn = text

    def _say(self, text: str) -> None:
        self.text += text
        self.say(text)
