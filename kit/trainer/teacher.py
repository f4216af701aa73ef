"""A teacher: whoever knows more than the policy, and scores what the policy wrote.

Another model, or the policy itself that is shown more than its prompt: the reference answer, what the verifier said of this
completion, a better completion of the same prompt. At every rollout it reads each completion once, without a graph, in the
same layouts as the policy (`kit.scoring.scorer`). What it gives:

    teacher_logps    (B, T) nats, of the tokens that were written           for advantages, and `distill` of sampled tokens
    teacher_hidden   (B, T, H), and its head                                for divergences over the vocabulary

A completion for which the teacher's prompt cannot be made, or is too long, has no teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Formatter
from typing import Any

import torch

from kit.config.sections import TeacherConfig
from kit.errors import ConfigError, ModelError, ObjectiveError
from kit.objective.batch import fields_where
from kit.registry import did_you_mean
from kit.scoring.head import Projection
from kit.scoring.scorer import Rows, Scores, Wanted, scatter_to_tokens
from kit.trainer.policy_loss import MicroBatch
from kit.trainer.rollout import RolloutState

SELF = "self"
DEMONSTRATION_REWARD = 1.0
"""The least reward of a completion that is shown to the teacher as a demonstration."""
TEACHER_NEEDS = frozenset(fields_where(model="teacher"))
OF_THE_COMPLETION = ("prompt", "completion", "reward", "feedback", "demonstration")
"""What a template may name beside the columns of the data."""
Prompt = str | list[dict[str, Any]]

# --- what the teacher reads -------------------------------------------------------------------------------------------


def prompt_maker(spec: str | None) -> Callable[..., Prompt | None]:
    """Returns what makes a teacher's prompt of `row`, the columns in it, and `OF_THE_COMPLETION`, given as keywords.

    spec: as `teacher.prompt`. Raises `ConfigError` for a template that is malformed.
    """
    if spec is None:
        return lambda row, **_: row["prompt"]
    names = template_fields(spec)

    def fill(row: Mapping[str, Any], **more: Any) -> Prompt | None:
        values = {**row, **more}
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


def trial_prompts(spec: str | None, rows: Iterable[Mapping[str, Any]]) -> list[Prompt]:
    """Prompts of the teacher for `rows` before a rollout, by a template: a missing value is a dash; [] without a template."""
    if spec is None:
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
    needed = sorted(TEACHER_NEEDS & set(needs))
    if needed and config.model is None:
        raise ObjectiveError(
            f"The objective needs {needed[0]}, but the run has no teacher. Set teacher.model: self and teacher.prompt, e.g. "
            "'{prompt} The answer is {reference}.', or teacher.model to the folder or hub id of another model."
        )
    if config.model is not None and not needed:
        raise ConfigError(
            f"teacher.model: {config.model} would be ignored: no part of the objective learns from a teacher. Choose "
            "objective.recipe opd, sdpo or grpo_sdpo, or one of the hooks sdpo and distill."
        )
    if config.model is None or config.prompt is None:
        return
    prompt_maker(config.prompt)
    known = [*OF_THE_COMPLETION, *columns]
    for name in sorted(template_fields(config.prompt)):
        if name not in known:
            raise ConfigError(
                f"teacher.prompt names {{{name}}}, which the data does not have.{did_you_mean(name, known)} "
                f"It has: {', '.join(known)}."
            )


def check_vocabulary(policy: Any, teacher: Any, source: str) -> None:
    """Refuses another model whose tokens are not the policy's. Raises `ModelError`."""
    mine, other = policy.get_vocab(), teacher.get_vocab()
    if mine == other:
        return
    differing = sum(mine.get(token) != number for token, number in other.items()) + len(mine.keys() - other.keys())
    raise ModelError(
        f"teacher.model: {source} has another tokenizer than the policy ({differing} of {len(other)} tokens differ): its "
        "probabilities are of other tokens. Choose a model of the same family, or teacher.model: self."
    )


# --- the teacher ------------------------------------------------------------------------------------------------------


class Teacher:
    """The teacher of one run. model: the other model, where it is not the policy itself."""

    def __init__(self, settings: TeacherConfig, model: Any = None) -> None:
        if (model is None) != (settings.model == SELF):
            raise ModelError(
                f"teacher.model: {settings.model} needs {'no' if model else 'its'} model beside the policy."
            )
        self.settings, self.model = settings, model
        self.make = prompt_maker(settings.prompt)
        self.head: Projection | None = None
        """The head of its last pass, without hidden states."""

    def join(
        self,
        policy: Any,
        *,
        temperature: float,
        score: Callable[[Any, Rows, Wanted], Scores],
        tokenize: Callable[[list[Prompt]], list[list[int]]],
        pad: int,
        process: int = 0,
    ) -> None:
        """Takes from the trainer of the policy, before the first rollout, what scoring needs.

        temperature: of sampling. score: rows by a model. tokenize: the ids of prompts. pad: a token that fills. process: number
        of this process among those that share a batch.
        """
        self._policy, self._score, self._tokenize, self._pad, self._process = policy, score, tokenize, pad, process
        if self.model is not None:
            from trl.trainer.utils import add_fused_lm_head

            self.model.eval().requires_grad_(False)
            add_fused_lm_head(self.model, temperature=temperature, outputs=("log_probs", "entropy"))
        self._context = getattr(self._scorer.config.get_text_config(), "max_position_embeddings", None)

    @property
    def _scorer(self) -> Any:
        """The model that scores."""
        return self._policy if self.model is None else self.model

    def teach(self, batch: MicroBatch, state: RolloutState, group_size: int, *, hidden: bool) -> dict[str, Any]:
        """Scores a rollout by the teacher.

        Returns `teacher_logps` (B, T), NaN without a teacher, and with `hidden` also `teacher_hidden` (B, T, H), 0 without one,
        and `teacher_known` (B,) bool.
        """
        prompts = self._prompts(state, group_size)
        read = [row for row, ids in enumerate(prompts) if ids is not None]
        ids, mask = batch.completion_ids, batch.completion_mask
        logps = torch.full(ids.shape, torch.nan, device=ids.device)
        known = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        output: dict[str, Any] = {"teacher_logps": logps}
        scores: Scores | None = None
        if read:
            own, width = [prompts[row] or [] for row in read], max(len(prompts[row] or []) for row in read)
            padded = [[self._pad] * (width - len(prompt)) + prompt for prompt in own]
            live = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in own]
            rows = Rows(
                torch.cat([torch.tensor(padded, device=ids.device, dtype=ids.dtype), ids[read]], dim=1),
                torch.cat([torch.tensor(live, device=ids.device, dtype=mask.dtype), mask[read]], dim=1),
                ids.shape[1],
            )
            with torch.no_grad():
                scores = self._score(self._scorer, rows, Wanted(hidden=hidden))
            logps[read] = scores.logps.float()
            known[read] = True
        if hidden:
            output["teacher_known"] = known
            if scores is not None:
                self.head = scores.projection.bare()
                values = scatter_to_tokens(scores.projection.hidden, mask[read])
                hidden_states = values.new_zeros(len(ids), *values.shape[1:])
                hidden_states[read] = values
            else:
                hidden_states = torch.zeros(*ids.shape, 1, device=ids.device)
            output["teacher_hidden"] = hidden_states
        return output

    def see_head(self, batch: MicroBatch) -> None:
        """Scores one completion of a restored rollout: its head is in no checkpoint."""
        rows = batch.select([0]).rows
        with torch.no_grad():
            self.head = self._score(self._scorer, rows, Wanted(hidden=True)).projection.bare()

    # --- what it reads --------------------------------------------------------------------------------------------------

    def _prompts(self, state: RolloutState, group_size: int) -> list[list[int] | None]:
        """The ids of each completion's prompt for the teacher, or None."""
        texts = [completion_text(completion) for completion in state.rewards.completions]
        first = self._process * len(texts)
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
        ids = iter(self._tokenize([prompt for prompt in made if prompt is not None]))
        room = self._context
        prompts: list[list[int] | None] = []
        for row, prompt in enumerate(made):
            tokens = None if prompt is None else next(ids)
            long = (
                tokens is not None and room is not None and len(tokens) + len(state.rewards.completion_ids[row]) > room
            )
            prompts.append(None if long or not tokens else tokens)
        return prompts


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
    """The verifier's text on each completion: the column `feedback` of a reward function, else all reasons."""
    columns = [extra["feedback"]] if "feedback" in extra else [v for k, v in extra.items() if k.endswith("/reason")]
    return ["; ".join(str(column[row]) for column in columns if column[row]) for row in range(count)]


def demonstrations(rewards: Sequence[float], groups: Sequence[int], least: float) -> list[int | None]:
    """Returns for each completion the best other one of its group with a reward of `least` that is not worse; or None."""
    best: list[int | None] = []
    for row, reward in enumerate(rewards):
        others = [
            other
            for other, group in enumerate(groups)
            if group == groups[row] and other != row and rewards[other] >= least and not rewards[other] < reward
        ]
        best.append(max(others, key=lambda other: (rewards[other], -other)) if others else None)
    return best
