"""A teacher: whoever knows more than the policy, and scores what the policy wrote.

Another model, or the policy itself that is shown more than its prompt: the reference answer, what the verifier said of this
completion, a better completion of the same prompt. At every rollout it reads each completion once, without a graph, in the
same layouts as the policy (`kit.scoring.scorer`). What it gives:

    teacher_logps    (B, T) nats, of the tokens that were written           for advantages, and `distill` of sampled tokens
    teacher_hidden   (B, T, H), and its head                                for divergences over the vocabulary

A completion for which the teacher's prompt cannot be made, or is too long, has no teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

import torch
from torch import Tensor

from kit.config.sections import TeacherConfig
from kit.errors import ConfigError, ModelError, ObjectiveError
from kit.objective.hook import REMEDIES
from kit.registry import did_you_mean, import_object
from kit.scoring.head import Projection
from kit.scoring.layouts import Rows, Scores, Wanted, scatter_to_tokens
from kit.trainer.micro_batch import MicroBatch
from kit.trainer.rollout import RolloutState

SELF = "self"
DEMONSTRATION_REWARD = 1.0
"""The least reward of a completion that is shown to the teacher as a demonstration."""
TEACHER_NEEDS = frozenset({"teacher_logps", "teacher_kl"})
OF_THE_COMPLETION = ("prompt", "completion", "reward", "feedback", "demonstration")
"""What a template may name beside the columns of the data."""
AVERAGE_FILE = "teacher_average.safetensors"
Prompt = str | list[dict[str, Any]]

# --- what the teacher reads -------------------------------------------------------------------------------------------


def prompt_maker(spec: str | None) -> Callable[..., Prompt | None]:
    """What makes a teacher's prompt of `row`, the columns in it, and `OF_THE_COMPLETION`, given as keywords.

    spec: as `teacher.prompt`. Raises `ConfigError` for a function that is not there, and a template that is malformed.
    """
    if spec is None:
        return lambda row, **_: row["prompt"]
    if is_function(spec):
        function: Callable[..., Prompt | None] = import_object(spec)
        return function
    names = template_fields(spec)

    def fill(row: Mapping[str, Any], **given: Any) -> Prompt | None:
        values = {**row, **given}
        if any(values.get(name) in (None, "") for name in names):
            return None
        text = spec.format_map(values)
        prompt = row["prompt"]
        if isinstance(prompt, str):
            return text
        last = max(
            (number for number, message in enumerate(prompt) if message["role"] == "user"), default=len(prompt) - 1
        )
        return [*prompt[:last], {**prompt[last], "content": text}, *prompt[last + 1 :]]

    return fill


def is_function(spec: str) -> bool:
    """Whether `teacher.prompt` names a function, and is no template."""
    return "{" not in spec and ".py:" in spec


def trial_prompts(spec: str | None, rows: Iterable[Mapping[str, Any]]) -> list[Prompt]:
    """What the teacher reads of `rows` before a rollout, by a template: what is not there yet is a dash; [] without one."""
    if spec is None or is_function(spec):
        return []
    make, nothing = prompt_maker(spec), dict.fromkeys(OF_THE_COMPLETION, "-")
    made = [make(row=row, **(nothing | {"prompt": user_text(row["prompt"])})) for row in rows]
    return [prompt for prompt in made if prompt is not None]


def template_fields(template: str) -> set[str]:
    """The names in braces. Raises `ConfigError` for a template that is malformed, or has a place without a name."""
    try:
        names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ConfigError(f"teacher.prompt: {error}. Write {{{{ and }}}} for braces of the text.") from None
    if any(not name.isidentifier() for name in names):
        raise ConfigError(
            f"teacher.prompt: a place needs the plain name of a column, got {sorted(names)}. Write {{{{ and }}}} for braces."
        )
    return names


def check_teacher(config: TeacherConfig, needs: Iterable[str], columns: Sequence[str]) -> None:
    """Refuses a teacher that nobody asks, hooks without a teacher, and a template without its columns.

    Raises `ObjectiveError` and `ConfigError`. columns: of the data.
    """
    wanted = sorted(TEACHER_NEEDS & set(needs))
    if wanted and config.model is None:
        raise ObjectiveError(
            f"The objective needs {wanted[0]}, but the run has no teacher. Set teacher.model: self and teacher.prompt, e.g. "
            "'{prompt} The answer is {reference}.', or teacher.model to the folder or hub id of another model."
        )
    if config.model is not None and not wanted:
        raise ConfigError(
            f"teacher.model: {config.model} would be ignored: no part of the objective learns from a teacher. Choose "
            "objective.recipe opd, sdpo or grpo_sdpo, or one of the hooks sdpo, teacher_reweight and distill."
        )
    if config.model is None or config.prompt is None:
        return
    prompt_maker(config.prompt)
    if is_function(config.prompt):
        return
    known = [*OF_THE_COMPLETION, *columns]
    for name in sorted(template_fields(config.prompt)):
        if name not in known:
            raise ConfigError(
                f"teacher.prompt names {{{name}}}, which the data does not have.{did_you_mean(name, known)} "
                f"It has: {', '.join(known)}."
            )


def check_vocabulary(ours: Any, theirs: Any, source: str) -> None:
    """Refuses another model whose tokens are not the policy's. Raises `ModelError`."""
    mine, other = ours.get_vocab(), theirs.get_vocab()
    if mine == other:
        return
    differing = sum(mine.get(token) != number for token, number in other.items()) + len(mine.keys() - other.keys())
    raise ModelError(
        f"teacher.model: {source} has another tokenizer than the policy ({differing} of {len(other)} tokens differ): its "
        "probabilities are of other tokens. Choose a model of the same family, or teacher.model: self."
    )


# --- the teacher ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pupil:
    """What a teacher takes from the trainer of the policy.

    score: rows by a model. tokenize: the ids of prompts. pad: a token that fills. context: tokens that are read at most.
    first: number of this process' first completion among those of all.
    """

    policy: Any
    score: Callable[[Any, Rows, Wanted], Scores]
    tokenize: Callable[[list[Prompt]], list[list[int]]]
    pad: int
    context: int | None = None
    first: Callable[[int], int] = lambda size: 0


class Teacher:
    """The teacher of one run. model: the other model, where it is not the policy itself."""

    def __init__(self, settings: TeacherConfig, model: Any = None) -> None:
        if (model is None) != (settings.model == SELF):
            raise ModelError(
                f"teacher.model: {settings.model} needs {'no' if model else 'its'} model beside the policy."
            )
        self.settings, self.model = settings, model
        self.make = prompt_maker(settings.prompt)
        self.average: dict[str, Tensor] = {}
        """By name: the moving average of every weight that trains (`weights: ema`)."""
        self.head: Projection | None = None
        """The head of its last pass, without hidden states."""
        self._pupil: Pupil | None = None

    def join(self, pupil: Pupil) -> None:
        """Before the first rollout. Raises `ObjectiveError` where the policy has no base to go back to."""
        if self.settings.weights == "base" and not hasattr(pupil.policy, "disable_adapter"):
            raise ObjectiveError(
                "teacher.weights: base is the policy without its adapters, but all weights train. Set model.lora, or set "
                "teacher.model to the model that the run starts from."
            )
        self._pupil = pupil
        if self.settings.weights == "ema":
            self.average = {name: weight.detach().clone() for name, weight in self._trained()}

    @property
    def pupil(self) -> Pupil:
        assert self._pupil is not None, "a teacher joins a trainer before it scores"
        return self._pupil

    def teach(self, batch: MicroBatch, state: RolloutState, group_size: int, *, hidden: bool) -> dict[str, Any]:
        """What it says of a rollout: `teacher_logps` (B, T), NaN without a teacher, and with `hidden` also
        `teacher_hidden` (B, T, H), 0 without one, and `teacher_known` (B,) bool."""
        prompts = self._prompts(state, group_size)
        read = [row for row, ids in enumerate(prompts) if ids is not None]
        ids, mask = batch.completion_ids, batch.completion_mask
        logps = torch.full(ids.shape, torch.nan, device=ids.device)
        known = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        found: dict[str, Any] = {"teacher_logps": logps}
        scores = (
            self._scores([prompts[row] or [] for row in read], ids[read], mask[read], hidden=hidden) if read else None
        )
        if scores is not None:
            logps[read] = scores.logps.float()
            known[read] = True
        if hidden:
            found["teacher_known"] = known
            if scores is not None:
                self.head = scores.projection.bare()
                values = scatter_to_tokens(scores.projection.hidden, mask[read])
                whole = values.new_zeros(len(ids), *values.shape[1:])
                whole[read] = values
            else:
                whole = torch.zeros(*ids.shape, 1, device=ids.device)
            found["teacher_hidden"] = whole
        return found

    def see_head(self, batch: MicroBatch) -> None:
        """Scores one completion of a restored rollout: its head is in no checkpoint."""
        rows = batch.select([0]).rows
        with torch.no_grad(), self._weights() as model:
            self.head = self.pupil.score(model, rows, Wanted(hidden=True)).projection.bare()

    def _scores(self, prompts: list[list[int]], ids: Tensor, mask: Tensor, *, hidden: bool) -> Scores:
        width = max(map(len, prompts))
        padded = [[self.pupil.pad] * (width - len(prompt)) + prompt for prompt in prompts]
        live = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        rows = Rows(
            torch.cat([torch.tensor(padded, device=ids.device, dtype=ids.dtype), ids], dim=1),
            torch.cat([torch.tensor(live, device=ids.device, dtype=mask.dtype), mask], dim=1),
            ids.shape[1],
        )
        with torch.no_grad(), self._weights() as model:
            return self.pupil.score(model, rows, Wanted(hidden=hidden))

    # --- what it reads --------------------------------------------------------------------------------------------------

    def _prompts(self, state: RolloutState, group_size: int) -> list[list[int] | None]:
        """The ids of each completion's prompt for the teacher, or None."""
        texts = [completion_text(completion) for completion in state.rewards.completions]
        first = self.pupil.first(len(texts))
        rewards = state.rewards.total[first : first + len(texts)].tolist()
        groups = [(first + row) // group_size for row in range(len(texts))]
        feedback = feedback_of(state.rewards.extra, len(texts))
        best = demonstrations(rewards, groups, DEMONSTRATION_REWARD)
        made: list[Prompt | None] = []
        for row, text in enumerate(texts):
            columns = dict(state.rows[row])
            shown = best[row]
            made.append(
                self.make(
                    row=columns,
                    prompt=user_text(columns["prompt"]),
                    completion=text,
                    reward=None if rewards[row] != rewards[row] else rewards[row],
                    feedback=feedback[row],
                    demonstration=None if shown is None else texts[shown],
                )
            )
        ids = iter(self.pupil.tokenize([prompt for prompt in made if prompt is not None]))
        room = self.pupil.context
        found: list[list[int] | None] = []
        for row, prompt in enumerate(made):
            tokens = None if prompt is None else next(ids)
            long = (
                tokens is not None and room is not None and len(tokens) + len(state.rewards.completion_ids[row]) > room
            )
            found.append(None if long or not tokens else tokens)
        return found

    # --- whose weights --------------------------------------------------------------------------------------------------

    def _weights(self) -> AbstractContextManager[Any]:
        """The model that scores, inside."""
        if self.model is not None:
            return nullcontext(self.model)
        if self.settings.weights == "ema":
            return self._averaged()
        if self.settings.weights == "base":
            return self._base()
        return nullcontext(self.pupil.policy)

    @contextmanager
    def _base(self) -> Iterator[Any]:
        with self.pupil.policy.disable_adapter():
            yield self.pupil.policy

    @contextmanager
    def _averaged(self) -> Iterator[Any]:
        self._exchange()
        try:
            yield self.pupil.policy
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for name, weight in self._trained():
            weight.data, self.average[name] = self.average[name], weight.data

    def _trained(self) -> Iterator[tuple[str, Any]]:
        return ((name, weight) for name, weight in self.pupil.policy.named_parameters() if weight.requires_grad)

    def step_made(self) -> None:
        """After every optimiser step: the moving average takes in a share of the weights as they are."""
        if not self.average:
            return
        for name, weight in self._trained():
            self.average[name].lerp_(weight.detach(), self.settings.ema_rate)

    def save(self, checkpoint: Path) -> None:
        """Into a checkpoint, where there is something to keep."""
        if self.average:
            from safetensors.torch import save_file

            save_file({name: value.contiguous() for name, value in self.average.items()}, checkpoint / AVERAGE_FILE)

    def load(self, checkpoint: Path) -> None:
        """From a checkpoint. Raises `ModelError` where it has no average."""
        if not self.average:
            return
        from safetensors.torch import load_file

        path = checkpoint / AVERAGE_FILE
        if not path.is_file():
            raise ModelError(
                f"{checkpoint} has no {AVERAGE_FILE}: it was written by a run without teacher.weights: ema. Resume with the "
                "teacher of the run, or start a new one."
            )
        for name, value in load_file(path).items():
            self.average[name].copy_(value)


# --- what templates are filled with ------------------------------------------------------------------------------------


def completion_text(completion: Any) -> str:
    """A completion as text: what the assistant wrote, turn by turn."""
    if isinstance(completion, str):
        return completion
    return "\n".join(user_text([message]) for message in completion if message.get("role") == "assistant").strip()


def user_text(prompt: Any) -> str:
    """The text of a prompt, or of its last message."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[-1].get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text") or "") for part in content)


def feedback_of(extra: Mapping[str, Sequence[Any]], count: int) -> list[str]:
    """What the verifier says of each completion: the column `feedback` of a reward function, else all reasons given."""
    columns = [extra["feedback"]] if "feedback" in extra else [v for k, v in extra.items() if k.endswith("/reason")]
    return ["; ".join(str(column[row]) for column in columns if column[row]) for row in range(count)]


def demonstrations(rewards: Sequence[float], groups: Sequence[int], least: float) -> list[int | None]:
    """For each completion the best other one of its group, the first of equals, that has `least` and is not worse; or None."""
    found: list[int | None] = []
    for row, reward in enumerate(rewards):
        others = [
            other
            for other, group in enumerate(groups)
            if group == groups[row] and other != row and rewards[other] >= least and not rewards[other] < reward
        ]
        found.append(max(others, key=lambda other: (rewards[other], -other)) if others else None)
    return found


def join_teacher(trainer: Any, policy: Any) -> Teacher | None:
    """The teacher that a trainer was given, ready to score. Raises `ObjectiveError` where the objective needs one in vain."""
    teacher: Teacher | None = trainer.teacher
    if teacher is None:
        if found := sorted(trainer.needs & TEACHER_NEEDS):
            raise ObjectiveError(
                f"A hook needs {found[0]}, but {REMEDIES[found[0]]} (from Python: teacher=Teacher(...))."
            )
        return None
    if teacher.model is not None:
        from trl.trainer.utils import add_fused_lm_head

        teacher.model.eval().requires_grad_(False)
        add_fused_lm_head(teacher.model, temperature=trainer.temperature, outputs=("log_probs", "entropy"))
    config = (policy if teacher.model is None else teacher.model).config
    size = trainer.args.per_device_train_batch_size

    def tokenize(prompts: list[Prompt]) -> list[list[int]]:
        with trainer.rolling_out(()):  # ids that rows bring along are those of the policy's prompt
            ids: list[list[int]] = trainer._tokenize_prompts(prompts)[0] if prompts else []
        return ids

    teacher.join(
        Pupil(
            policy,
            score=lambda model, rows, wanted: trainer._score(model, rows, wanted, size),
            tokenize=tokenize,
            pad=trainer._tokenizer.pad_token_id,
            context=getattr(config.get_text_config(), "max_position_embeddings", None),
            first=lambda count: trainer.accelerator.process_index * count,
        )
    )
    return teacher
