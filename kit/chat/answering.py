"""The two models of a chat and their answers: one model with its adapter off and on, the same seed for both.

An answer is made as the run's held-out evaluation makes one, but for sampling settings of one's own and words as they come.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kit.chat.client import check_sampling
from kit.data.images import IMAGES
from kit.errors import ConfigError, RunError
from kit.evaluation.heldout import Completion, HeldOut, end_tokens, scoring_context
from kit.generation.multi_turn import Conversation, own_tokens
from kit.generation.prompts import has_pictures, is_plain, note_opened_thinking
from kit.models.start import untrained
from kit.runner.trained import open_source
from kit.runs.lock import gpu_holder

if TYPE_CHECKING:
    from kit.runs.store import RunDir
    from rewards import Evaluation


@dataclass(frozen=True)
class Question:
    """What is asked: a row as the run's data has them, with `reference` where it is known."""

    row: dict[str, Any]
    sides: Sequence[str]
    sampling: Mapping[str, Any]


class ChatModels:
    """Both models loaded, the run's data and reward at hand."""

    def __init__(self, run: RunDir, checkpoint: str | None) -> None:
        from kit.runner.prepare import build_reward

        self.source, note = open_source(run, checkpoint)
        # The rows of evaluations, in their order: a number means the same problem there and here.
        try:
            self.rows, no_rows = self.source.heldout_rows(), None
        except RunError as error:
            self.rows, no_rows = [], f"There are no held-out prompts to choose from: {error}"
        self.tuned = self.source.load().eval()
        # With an adapter both are one model; without, the base is a second one.
        self.base = self.tuned if self.source.lora else self.source.load_start()
        self.answerer = self.source.heldout(Answerer, self.rows[:1], build_reward(self.source.config))
        holder = gpu_holder()
        shared = f"This chat shares {holder}; what it takes, that run may lack." if holder else None
        self.note = " ".join(text for text in (note, no_rows, shared) if text)

    def about(self) -> dict[str, Any]:
        """Run, step, model and device, for the session's `ready` event."""
        config = self.source.config
        facts = {"run": self.source.run.id, "step": self.source.step, "model": self.source.run_name,
                 "device": self.source.files.backend.device, "heldout": len(self.rows),
                 "sampling": self.sampling({}), "reward": config.reward.preset}  # fmt: skip
        return facts | ({"note": self.note} if self.note else {})

    def sampling(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The run's own settings with `changes` over them. Raises `ConfigError` for what is out of range."""
        own = self.source.config.generation
        return {"seed": 0, "temperature": own.temperature, "top_p": own.top_p, "top_k": own.top_k,
                "min_p": own.min_p or 0.0, "max_tokens": own.max_completion_tokens} | check_sampling(changes)  # fmt: skip

    def question(self, message: Mapping[str, Any]) -> Question:
        """A checked question. Raises `KitError`."""
        number, reference = message.get("heldout"), message.get("reference")
        if number is not None:
            if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= len(self.rows):
                raise ConfigError(
                    f"There is no held-out prompt {number!r}; this run has {len(self.rows)}, counted from 1."
                )
            row = dict(self.rows[number - 1])
        else:
            row = self._own(message.get("prompt"))
        if reference is not None:
            row["reference"] = str(reference)
        return Question(row, message.get("sides") or ("base", "tuned"), self.sampling(message.get("sampling") or {}))

    def _own(self, text: Any) -> dict[str, Any]:
        """The row of a question of one's own. One of the held-out problems, typed by hand, is that problem.

        Rewards may need more of a problem than its text. Of rows with pictures the text says too little.
        """
        from kit.data.rows import dress, read_prompt

        config, environments = self.source.config.data, self.source.interaction.environments
        try:
            prompt, _ = read_prompt(text, "prompt")
            dressed = dress(prompt, chat=config.chat, system_prompt=config.system_prompt)
        except ValueError as error:
            raise ConfigError(f"This cannot be asked: {error}.") from None
        for row in self.rows:
            if row["prompt"] == dressed and not has_pictures(row):
                return dict(row)
        if environments is not None and None not in environments:
            raise ConfigError(
                f"A question of one's own says none of the run's environments ({', '.join(map(str, environments))}), which its "
                "rows name. Ask a held-out prompt by its number."
            )
        return {"prompt": dressed}

    def answer(
        self, question: Question, side: str, say: Callable[[str], None], cancelled: Callable[[], bool]
    ) -> dict[str, Any]:
        """One side's answer; `say` gets its text piece by piece, `cancelled` ends it."""
        import torch

        started, most = time.perf_counter(), question.sampling["max_tokens"]
        model = self.tuned if side == "tuned" else self.base
        limit = getattr(self.source.files.config, "max_position_embeddings", None)

        def check_length(prompt: int) -> None:
            if limit is not None and prompt + most > limit:
                raise ConfigError(
                    f"Prompt and answer may take {prompt + most} tokens together, and the model reads {limit}. Ask less, or "
                    "lower max_tokens."
                )

        stream = Stream(self.source.tokenizer, say, check_length)
        without_adapter = side == "base" and self.source.lora
        with (
            untrained(self.tuned) if without_adapter else contextlib.nullcontext(),
            torch.random.fork_rng(),
            torch.inference_mode(),
        ):
            torch.manual_seed(question.sampling["seed"])
            done = self.answerer.ask(model, question.row, question.sampling, stream, cancelled)
        finish = done.reason if isinstance(done, Conversation) else "length" if done[1] else "stop"
        finish = "cancelled" if finish != "stop" and cancelled() else finish
        return {
            "text": stream.text, "tokens": own_tokens(done), "finish": finish, "seconds": time.perf_counter() - started,
            "reward": None if finish == "cancelled" else self.reward(question.row, done),
        }  # fmt: skip

    def reward(self, row: dict[str, Any], done: Completion) -> dict[str, Any] | None:
        """The run's reward of an answer with its components; None where no reference is known and none can be scored."""
        if "reference" not in row:
            return None
        verdict = self.answerer.judge(row, done)
        parts = {
            name: {
                "value": verdict.values[name][0],
                "weight": verdict.weights[name],
                "status": verdict.statuses[name][0],
            }
            for name in verdict.values
        }
        # A question of one's own lacks columns of the data; a reward that needs them has no say then.
        foreign = bool(self.rows) and not self.rows[0].keys() - {IMAGES} <= row.keys()
        unknown = foreign and any(part["status"] == "error" for part in parts.values())
        return {"total": None if unknown else verdict.totals[0], "components": parts}

    def pick(self, start: int, count: int) -> dict[str, Any]:
        """Held-out prompts from number `start` on."""
        from kit.generation.prompts import question

        shown = list(enumerate(self.rows, start=1))[max(0, start - 1) :][: max(0, min(count, 200))]
        rows = [{"number": n, "prompt": question(row["prompt"]), "reference": row.get("reference")} for n, row in shown]
        return {"rows": rows, "total": len(self.rows)}


# --- one completion, word by word -------------------------------------------------------------------------------------


class Answerer(HeldOut):
    """Ids, pictures, tools and environments of a row as in training, with `sampling` of `ChatModels.sampling`."""

    def ask(
        self,
        model: Any,
        row: dict[str, Any],
        sampling: Mapping[str, Any],
        stream: Stream,
        cancelled: Callable[[], bool],
    ) -> Completion:
        """One completion; with its turns where the model may call tools."""
        import torch

        self.plain = is_plain([row["prompt"]])
        greedy = sampling["temperature"] == 0
        self.config = self.config if greedy else self.config.model_copy(update={"temperature": sampling["temperature"]})
        drawn = {"top_p": sampling["top_p"], "top_k": sampling["top_k"], "min_p": sampling["min_p"] or None}
        self.generation = self.generation.model_copy(update=drawn | {"max_completion_tokens": sampling["max_tokens"]})
        note_opened_thinking(self.preset, self.tokenizer, [row["prompt"]])
        if self.sampler is not None:
            self.sampler.limit = sampling["max_tokens"]

        def ends(ids: Any, scores: Any, **_: Any) -> Any:
            over = cancelled() or stream.is_full(ids.shape[1], sampling["max_tokens"])
            return torch.full((ids.shape[0],), over, device=ids.device, dtype=torch.bool)

        self.further = {"streamer": stream, "stopping_criteria": [ends]}
        (done,) = self._ended(model, [self._prompt(row)], not greedy, end_tokens(model, self.tokenizer))
        return done

    def judge(self, row: dict[str, Any], done: Completion) -> Evaluation:
        """The run's reward of a completion, what its environment says of it included."""
        return self._verdict(self._as_samples([row], [done]), [done], scoring_context())


class Stream:
    """A streamer for `generate`: passes words on as they are finished, with the answers of tools between the turns.

    `check` is given the length of the first prompt.
    """

    def __init__(self, tokenizer: Any, say: Callable[[str], None], check: Callable[[int], None]) -> None:
        from transformers import TextStreamer

        self.tokenizer, self.say, self.check = tokenizer, say, check
        self.text = ""
        self._words: Any = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._words.on_finalized_text = self._say
        self._conversation: list[int] = []  # prompt and turns so far
        self._asked = 0

    def is_full(self, length: int, most: int) -> bool:
        """Whether the conversation has `most` tokens behind its first prompt."""
        return length >= self._asked + most

    def put(self, value: Any) -> None:
        """Takes the prompt first, then one token after the other; likewise in each further turn."""
        ids, known = value.flatten().tolist(), self._conversation
        if not self._words.next_tokens_are_prompt:
            known += ids
        elif not known:
            self._conversation, self._asked = ids, len(ids)
            self.check(len(ids))
        else:
            self._conversation = ids
            between = ids[len(known) :] if ids[: len(known)] == known else []
            self._say(f"\n{self.tokenizer.decode(between, skip_special_tokens=True).strip()}\n")
        self._words.put(value)

    def end(self) -> None:
        """Emits the text that was held back."""
        self._words.end()

    def _say(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.text += text
            self.say(text)
