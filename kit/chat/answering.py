"""The two models of a chat and their answers: one model with its adapter off and on, the same seed for both.

An answer is made as the run's held-out evaluation makes one, but for sampling settings of one's own and words as they come.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kit.chat.client import check_sampling
from kit.data.images import IMAGES
from kit.errors import ConfigError, DataError, RunError
from kit.evaluation.heldout import Completion, HeldOut, scoring_context
from kit.generation.multi_turn import Conversation, own_tokens
from kit.generation.prompts import has_pictures, is_plain, note_opened_thinking
from kit.models.start import untrained
from kit.runner.trained import end_ids, open_source
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
        from kit.generation.tools import check_turns, load_tools
        from kit.models.backend import use_threads
        from kit.runner.evaluate import heldout_rows
        from kit.runner.prepare import build_reward

        self.source, note = open_source(run, checkpoint, None)
        config, files = self.source.config, self.source.files
        use_threads(config.run.threads, config.model.name)
        self.interaction = load_tools(config.generation)
        check_turns(self.interaction, files.tokenizer, chat=config.data.chat, source=config.model.name)
        # The rows of evaluations, in their order: a number means the same problem there and here.
        try:
            self.rows, no_rows = heldout_rows(run, config, files, self.interaction), None
        except (DataError, RunError) as error:
            self.rows, no_rows = [], f"There are no held-out prompts to choose from: {error}"
        self.tuned = self.source.load().eval()
        # With an adapter both are one model; without, the base is a second one.
        self.base = self.tuned if self.source.lora else self.source.load_start()
        self.ends = end_ids(self.tuned, files.tokenizer)
        settings = (config.evaluation, config.generation, None, None, self.interaction, files.processor)
        self.answerer = Answerer(self.rows[:1], build_reward(config), files.tokenizer, *settings)
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
        from kit.data.prompts import dress, read_prompt

        config, environments = self.source.config.data, self.interaction.environments
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
        stream = Stream(self.source.tokenizer, self.ends, say, lambda length: self._check_length(length + most))
        with self._side(side), torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(question.sampling["seed"])
            done = self.answerer.ask(model, question.row, question.sampling, stream, cancelled)
        finish = done.reason if isinstance(done, Conversation) else "length" if done[1] else "stop"
        finish = "cancelled" if finish != "stop" and cancelled() else finish
        return {
            "text": stream.text, "tokens": own_tokens(done), "finish": finish, "seconds": time.perf_counter() - started,
            "reward": None if finish == "cancelled" else self.reward(question.row, done),
        }  # fmt: skip

    def _check_length(self, tokens: int) -> None:
        limit = getattr(self.source.files.config, "max_position_embeddings", None)
        if limit is not None and tokens > limit:
            raise ConfigError(
                f"Prompt and answer may take {tokens} tokens together, and the model reads {limit}. Ask less, or lower "
                "max_tokens."
            )

    @contextlib.contextmanager
    def _side(self, side: str) -> Iterator[None]:
        if side == "base" and self.source.lora:
            with untrained(self.tuned):
                yield
        else:
            yield

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

    def pick(self, start: int, count: int, search: str | None) -> dict[str, Any]:
        """Held-out prompts from number `start` on, those with `search` in them."""
        from kit.generation.prompts import question

        numbered = [(number, row) for number, row in enumerate(self.rows, start=1)
                    if not search or search.casefold() in str(question(row["prompt"])).casefold()]  # fmt: skip
        shown = [pair for pair in numbered if pair[0] >= start][: max(0, min(count, 200))]
        return {
            "rows": [
                {"number": n, "prompt": question(row["prompt"]), "reference": row.get("reference")} for n, row in shown
            ],
            "total": len(numbered),
        }


# --- one completion, word by word -------------------------------------------------------------------------------------


class Answerer(HeldOut):
    """Ids, pictures, tools and environments of a row as in training. `sampling` as `kit.chat.answering.ChatModels.sampling`."""

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
        note_opened_thinking(self.preset, self.tokenizer, [row["prompt"]])
        if self.sampler is not None:
            self.sampler.limit = sampling["max_tokens"]
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
            disable_compile=True,
            **drawn,
        )


def _all(stop: bool, ids: Any) -> Any:
    import torch

    return torch.full((ids.shape[0],), stop, device=ids.device, dtype=torch.bool)


class Stream:
    """A streamer for `generate`: decodes tokens to text that is only ever appended to, with the answers of tools.

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
        """Emits the text that was held back."""
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
