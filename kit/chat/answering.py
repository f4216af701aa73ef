"""The two models of a chat and their answers: the model with its adapter off and on, with the same seed.

An answer is generated as in the run's held-out evaluation, but with the user's sampling settings, and streamed.
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
    """A row as in the run's data, with `reference` if it is known, the sides to ask, and sampling settings."""

    row: dict[str, Any]
    sides: Sequence[str]
    sampling: Mapping[str, Any]


class ChatModels:
    """Both models of a run, its held-out rows and its reward."""

    def __init__(self, run: RunDir, checkpoint: str | None) -> None:
        from kit.runner.prepare import build_reward

        self.source, note = open_source(run, checkpoint)
        # In the order of evaluations, so that a number means the same problem in both.
        try:
            self.rows, no_rows = self.source.heldout_rows(), None
        except RunError as error:
            self.rows, no_rows = [], f"There are no held-out prompts to choose from: {error}"
        self.tuned = self.source.load().eval()
        # With an adapter one model is both; without, the base is a second model.
        self.base = self.tuned if self.source.lora else self.source.load_start()
        self.answerer = self.source.heldout(Answerer, self.rows[:1], build_reward(self.source.config))
        holder = gpu_holder()
        shared = f"This chat shares {holder} and reduces the memory of that run." if holder else None
        self.note = " ".join(text for text in (note, no_rows, shared) if text)

    def about(self) -> dict[str, Any]:
        """Return run, step, model and device, for the session's `ready` event."""
        config = self.source.config
        facts = {"run": self.source.run.id, "step": self.source.step, "model": self.source.run_name,
                 "device": self.source.files.backend.device, "heldout": len(self.rows),
                 "sampling": self.sampling({}), "reward": config.reward.preset}  # fmt: skip
        return facts | ({"note": self.note} if self.note else {})

    def sampling(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the run's settings with `changes`. Raises `ConfigError` for values out of range."""
        run = self.source.config.generation
        return {"seed": 0, "temperature": run.temperature, "top_p": run.top_p, "top_k": run.top_k,
                "min_p": run.min_p or 0.0, "max_tokens": run.max_completion_tokens} | check_sampling(changes)  # fmt: skip

    def question(self, message: Mapping[str, Any]) -> Question:
        """Return a checked question. Raises `KitError`."""
        number, reference = message.get("heldout"), message.get("reference")
        if number is not None:
            if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= len(self.rows):
                raise ConfigError(
                    f"There is no held-out prompt {number!r}; this run has {len(self.rows)}, counted from 1."
                )
            row = dict(self.rows[number - 1])
        else:
            row = self._row(message.get("prompt"))
        if reference is not None:
            row["reference"] = str(reference)
        return Question(row, message.get("sides") or ("base", "tuned"), self.sampling(message.get("sampling") or {}))

    def _row(self, text: Any) -> dict[str, Any]:
        """Return the row of a typed question: a held-out row if it has the same prompt and no pictures, else a new row.

        The reward may need further columns of a held-out row.
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
                f"A typed question names no environment, which this run needs ({', '.join(map(str, environments))}). Ask a "
                "held-out prompt by its number."
            )
        return {"prompt": dressed}

    def answer(
        self, question: Question, side: str, say: Callable[[str], None], cancelled: Callable[[], bool]
    ) -> dict[str, Any]:
        """Return the answer of one side. `say` gets its text piece by piece; `cancelled` ends it."""
        import torch

        started, most = time.perf_counter(), question.sampling["max_tokens"]
        model = self.tuned if side == "tuned" else self.base
        limit = self.source.files.context

        def check_length(prompt: int) -> None:
            if limit is not None and prompt + most > limit:
                raise ConfigError(
                    f"Prompt and answer may have {prompt + most} tokens, but the model's limit is {limit}. Shorten the prompt "
                    "or lower max_tokens."
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
        """Return the run's reward of an answer with its components; None if the row has no reference."""
        if "reference" not in row:
            return None
        verdict = self.answerer.judge(row, done)
        parts = {
            name: {"value": values[0], "weight": verdict.weights[name], "status": verdict.statuses[name][0]}
            for name, values in verdict.values.items()
        }
        # A typed question lacks columns of the data, so a reward that needs them fails and is not shown.
        is_typed = bool(self.rows) and not self.rows[0].keys() - {IMAGES} <= row.keys()
        unknown = is_typed and any(part["status"] == "error" for part in parts.values())
        return {"total": None if unknown else verdict.totals[0], "components": parts}

    def pick(self, start: int, count: int) -> dict[str, Any]:
        """Return held-out prompts from number `start` on."""
        from kit.generation.prompts import question

        shown = list(enumerate(self.rows, start=1))[max(0, start - 1) :][: max(0, min(count, 200))]
        rows = [{"number": n, "prompt": question(row["prompt"]), "reference": row.get("reference")} for n, row in shown]
        return {"rows": rows, "total": len(self.rows)}


# --- one completion, word by word -------------------------------------------------------------------------------------


class Answerer(HeldOut):
    """Generates answers with ids, pictures, tools and environments as in training, and the user's sampling settings."""

    def ask(
        self,
        model: Any,
        row: dict[str, Any],
        sampling: Mapping[str, Any],
        stream: Stream,
        cancelled: Callable[[], bool],
    ) -> Completion:
        """Generate one completion, with its turns if the model has tools."""
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
            is_over = cancelled() or ids.shape[1] >= stream.prompt_length + sampling["max_tokens"]
            return torch.full((ids.shape[0],), is_over, device=ids.device, dtype=torch.bool)

        self.further = {"streamer": stream, "stopping_criteria": [ends]}
        (done,) = self._ended(model, [self._prompt(row)], not greedy, end_tokens(model, self.tokenizer))
        return done

    def judge(self, row: dict[str, Any], done: Completion) -> Evaluation:
        """Return the run's reward of a completion, including the result of its environment."""
        return self._verdict(self._as_samples([row], [done]), [done], scoring_context())


class Stream:
    """A streamer for `generate`: passes on complete words, and the answers of tools between the turns.

    `check` gets the length of the first prompt.
    """

    def __init__(self, tokenizer: Any, say: Callable[[str], None], check: Callable[[int], None]) -> None:
        from transformers import TextStreamer

        self.tokenizer, self.say, self.check = tokenizer, say, check
        self.text = ""
        self._words: Any = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._words.on_finalized_text = self._say
        self._conversation: list[int] = []  # prompt and turns so far
        self.prompt_length = 0

    def put(self, value: Any) -> None:
        """Take the prompt first, then one token at a time; likewise in each further turn."""
        ids, known = value.flatten().tolist(), self._conversation
        if not self._words.next_tokens_are_prompt:
            known += ids
        elif not known:
            self._conversation, self.prompt_length = ids, len(ids)
            self.check(len(ids))
        else:
            self._conversation = ids
            between = ids[len(known) :] if ids[: len(known)] == known else []
            self._say(f"\n{self.tokenizer.decode(between, skip_special_tokens=True).strip()}\n")
        self._words.put(value)

    def end(self) -> None:
        """Emit the remaining text."""
        self._words.end()

    def _say(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.text += text
            self.say(text)
