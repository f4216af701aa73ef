"""The two models of a chat and what they say: the adapter off and on in one model, the same seed for both."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kit.errors import ConfigError
from kit.exporting.source import Source, end_ids, open_source, prompt_ids

if TYPE_CHECKING:
    from kit.runs.store import RunDir

SAMPLING = {"seed": int, "temperature": float, "top_p": float, "top_k": int, "min_p": float, "max_tokens": int}
LEAST = {"seed": 0, "temperature": 0.0, "top_p": 1e-6, "top_k": 0, "min_p": 0.0, "max_tokens": 1}
MOST = {"temperature": 100.0, "top_p": 1.0, "min_p": 1.0, "max_tokens": 65536}


@dataclass(frozen=True)
class Question:
    """What is asked: a row as the run's data has them, with `reference` where it is known."""

    row: dict[str, Any]
    sides: Sequence[str]
    sampling: Mapping[str, Any]


class Talker:
    """Both models loaded, the run's data and reward at hand."""

    def __init__(self, run: RunDir, checkpoint: str | None) -> None:
        from kit.training.backend import use_threads
        from kit.training.preparation import build_reward

        self.source, self.note = open_source(run, checkpoint, None)
        config = self.source.config
        use_threads(config.run.threads)
        self.preset = build_reward(config)
        self.tuned = self.source.load().eval()
        # With an adapter both are one model; without, the base is a second one.
        self.base = self.tuned if self.source.lora else _base_of(self.source)
        self.ends = end_ids(self.tuned, self.source.tokenizer)
        self._rows: list[dict[str, Any]] | None = None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The run's held-out rows."""
        if self._rows is None:
            from kit.data import load_data

            self._rows = load_data(self.source.config.data).heldout.to_list()
        return self._rows

    def about(self) -> dict[str, Any]:
        """What there is to say of them."""
        config = self.source.config
        found = {"run": self.source.run.id, "step": self.source.step, "model": self.source.run_name,
                 "device": self.source.files.backend.device, "heldout": len(self.rows),
                 "sampling": self.sampling({}), "reward": config.reward.preset}  # fmt: skip
        return found | ({"note": self.note} if self.note else {})

    def sampling(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The run's own settings with `given` over them. Raises `ConfigError` for what is out of range."""
        own = self.source.config.generation
        found: dict[str, Any] = {"seed": 0, "temperature": own.temperature, "top_p": own.top_p, "top_k": own.top_k,
                                 "min_p": own.min_p or 0.0, "max_tokens": own.max_completion_tokens}  # fmt: skip
        for name, value in given.items():
            if name not in SAMPLING or isinstance(value, bool):
                raise ConfigError(f"There is no sampling option '{name}'. Known: {', '.join(SAMPLING)}.")
            if value is None:
                continue
            try:
                found[name] = SAMPLING[name](value)
            except (TypeError, ValueError, OverflowError):
                raise ConfigError(f"{name}: {value!r} is no number.") from None
            if not LEAST[name] <= found[name] <= MOST.get(name, 2**63 - 1):
                raise ConfigError(f"{name}: {value} is out of range, {LEAST[name]} to {MOST.get(name, 2**63 - 1)}.")
        return found

    def question(self, message: Mapping[str, Any]) -> Question:
        """A checked question. Raises `KitError`."""
        from kit.data.prompts import dress, read_prompt

        number, reference = message.get("heldout"), message.get("reference")
        if number is not None:
            if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= len(self.rows):
                raise ConfigError(
                    f"There is no held-out prompt {number!r}; this run has {len(self.rows)}, counted from 1."
                )
            row = dict(self.rows[number - 1])
        else:
            config = self.source.config.data
            try:
                prompt, _ = read_prompt(message.get("prompt"), "prompt")
                dressed = dress(prompt, chat=config.chat, system_prompt=config.system_prompt)
            except ValueError as error:
                raise ConfigError(f"This cannot be asked: {error}.") from None
            # A held-out problem typed by hand is that problem: rewards may need more of it than its text.
            row = dict(next((row for row in self.rows if row["prompt"] == dressed), {"prompt": dressed}))
        if reference is not None:
            row["reference"] = str(reference)
        return Question(row, message.get("sides") or ("base", "tuned"), self.sampling(message.get("sampling") or {}))

    def answer(
        self, asked: Question, side: str, say: Callable[[str], None], cancelled: Callable[[], bool]
    ) -> dict[str, Any]:
        """One side's answer; `say` gets its text piece by piece, `cancelled` ends it."""
        import torch

        tokenizer, started = self.source.tokenizer, time.perf_counter()
        (ids,) = prompt_ids(tokenizer, [asked.row])
        self._check_length(len(ids) + asked.sampling["max_tokens"])
        model = self.tuned if side == "tuned" else self.base
        stream = _Stream(tokenizer, self.ends, say)
        with self._side(side), torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(asked.sampling["seed"])
            inputs = torch.tensor([ids], device=model.device)
            model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                generation_config=self._how(asked.sampling),
                streamer=stream,
                stopping_criteria=[lambda ids, scores, **_: _all(cancelled(), ids)],
            )
        ended = bool(stream.ids) and stream.ids[-1] in self.ends
        finish = "stop" if ended else "cancelled" if cancelled() else "length"
        return {
            "text": stream.text, "tokens": len(stream.ids), "finish": finish, "seconds": time.perf_counter() - started,
            "reward": None if finish == "cancelled" else self.reward(asked.row, stream.ids, finish),
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
            with self.tuned.disable_adapter():
                yield
        else:
            yield

    def _how(self, sampling: Mapping[str, Any]) -> Any:
        from transformers import GenerationConfig

        greedy = sampling["temperature"] == 0
        drawn = {} if greedy else {name: sampling[name] for name in ("temperature", "top_p", "top_k")}
        if not greedy and sampling["min_p"]:
            drawn["min_p"] = sampling["min_p"]
        return GenerationConfig(
            do_sample=not greedy,
            max_new_tokens=sampling["max_tokens"],
            eos_token_id=self.ends,
            pad_token_id=self.source.tokenizer.pad_token_id,
            repetition_penalty=self.source.config.generation.repetition_penalty,
            disable_compile=True,
            **drawn,
        )

    def reward(self, row: Mapping[str, Any], ids: list[int], finish: str) -> dict[str, Any] | None:
        """The run's reward of an answer with its components; None where no reference is known and none can be scored."""
        from kit.evaluation.heldout import scoring_context
        from rewards import build_samples

        text = str(self.source.tokenizer.decode(ids, skip_special_tokens=True))
        completion = text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
        columns: dict[str, Any] = {name: [value] for name, value in row.items() if name not in ("prompt", "prompt_ids")}
        if "reference" not in columns:
            return None
        samples = build_samples([row["prompt"]], [completion], [ids], finish_reason=[finish], **columns)
        verdict = self.preset.score(samples, scoring_context())
        parts = {
            name: {
                "value": verdict.values[name][0],
                "weight": verdict.weights[name],
                "status": verdict.statuses[name][0],
            }
            for name in verdict.values
        }
        # A question of one's own lacks columns of the data; a reward that needs them has no say then.
        foreign = bool(self.rows) and not self.rows[0].keys() <= row.keys()
        unknown = foreign and any(part["status"] == "error" for part in parts.values())
        return {"total": None if unknown else verdict.totals[0], "components": parts}

    def pick(self, start: int, count: int, search: str | None) -> dict[str, Any]:
        """Held-out prompts from number `start` on, those with `search` in them."""
        from kit.evaluation.asking import question

        numbered = [(number, row) for number, row in enumerate(self.rows, start=1)
                    if not search or search.casefold() in str(question(row["prompt"])).casefold()]  # fmt: skip
        shown = [pair for pair in numbered if pair[0] >= start][: max(0, min(count, 200))]
        return {
            "rows": [
                {"number": n, "prompt": question(row["prompt"]), "reference": row.get("reference")} for n, row in shown
            ],
            "total": len(numbered),
        }


def _base_of(source: Source) -> Any:
    """The model that was trained, as it was before. Raises `ModelError`."""
    from kit.training.models import find_model, load_model

    config = source.config.model.model_copy(update={"name": source.run_name})
    return load_model(find_model(config, chat=source.config.data.chat), config).model.eval()


def _all(stop: bool, ids: Any) -> Any:
    import torch

    return torch.full((ids.shape[0],), stop, device=ids.device, dtype=torch.bool)


class _Stream:
    """What `generate` tells of each token: turned into text that only ever grows."""

    def __init__(self, tokenizer: Any, ends: Sequence[int], say: Callable[[str], None]) -> None:
        self.tokenizer, self.ends, self.say = tokenizer, ends, say
        self.ids: list[int] = []
        self.text, self._prompt = "", True

    def put(self, value: Any) -> None:
        """Takes the prompt first, then one token after the other."""
        if self._prompt:
            self._prompt = False
            return
        self.ids += value.flatten().tolist()
        self._grow(final=False)

    def end(self) -> None:
        """Says what was held back."""
        self._grow(final=True)

    def _grow(self, *, final: bool) -> None:
        text = str(
            self.tokenizer.decode([each for each in self.ids if each not in self.ends], skip_special_tokens=True)
        )
        if not final and text.endswith("\ufffd"):  # half a character
            return
        if len(text) > len(self.text) and text.startswith(self.text):
            self.say(text[len(self.text) :])
            self.text = text
        elif final:
            self.text = text
