"""The teacher: a model that knows more than the policy and scores the policy's completions.

It is another model, or the policy with a longer prompt: with the reference answer, the verifier's feedback on the completion,
or a better completion of the same prompt. At every rollout it scores each completion once, without gradient, in the same
layouts as the policy (`kit.scoring.scorer`). It provides:

    teacher_logps    (B, T) log-probabilities of the sampled tokens, nats   for advantages, and `distill` of sampled tokens
    teacher_hidden   (B, T, H) hidden states, with the teacher's head       for divergences over the vocabulary

A completion has no teacher if its prompt for the teacher cannot be made or is too long.
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
from kit.scoring.scorer import ExtraOutputs, Rows, Scores, scatter_to_tokens
from kit.trainer.policy_loss import MicroBatch
from kit.trainer.rollout import RolloutState

SELF = "self"
DEMONSTRATION_REWARD = 1.0
"""Least reward of a completion that the teacher gets as a demonstration."""
TEACHER_NEEDS = frozenset(fields_where(model="teacher"))
OF_THE_COMPLETION = ("prompt", "completion", "reward", "feedback", "demonstration")
"""Names for a template in addition to the columns of the data."""
Prompt = str | list[dict[str, Any]]

# --- prompts of the teacher -------------------------------------------------------------------------------------------


def prompt_maker(spec: str | None) -> Callable[..., Prompt | None]:
    """Return a function that makes a teacher's prompt from the keywords `row` and `OF_THE_COMPLETION`.

    `spec` is the template `teacher.prompt`. Raises `ConfigError` if it is malformed.
    """
    if spec is None:
        return lambda row, **_: row["prompt"]
    names = template_fields(spec)

    def fill(row: Mapping[str, Any], **of_completion: Any) -> Prompt | None:
        values = {**row, **of_completion}
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
    """Fill the template for `rows` before a rollout, with dashes for values of the completion; [] without a template."""
    if spec is None:
        return []
    make, dashes = prompt_maker(spec), dict.fromkeys(OF_THE_COMPLETION, "-")
    prompts = [make(row=row, **(dashes | {"prompt": user_text(row["prompt"])})) for row in rows]
    return [prompt for prompt in prompts if prompt is not None]


def template_fields(template: str) -> set[str]:
    """The names in braces. Raises `ConfigError` for a malformed template and for braces without a name."""
    try:
        names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ConfigError(f"teacher.prompt: {error}. Write {{{{ and }}}} for braces of the text.") from None
    if any(not name.isidentifier() for name in names):
        raise ConfigError(
            f"teacher.prompt: braces must contain the name of a column, got {sorted(names)}. Write {{{{ and }}}} for braces."
        )
    return names


def check_teacher(config: TeacherConfig, needs: Iterable[str], columns: Sequence[str]) -> None:
    """Check that hooks which need a teacher have one, that the teacher is used, and that the data has the template's columns.

    Raises `ObjectiveError` and `ConfigError`.
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
    """Raise `ModelError` if the tokens of the teacher are not those of the policy."""
    own, other = policy.get_vocab(), teacher.get_vocab()
    if own == other:
        return
    differing = sum(own.get(token) != number for token, number in other.items()) + len(own.keys() - other.keys())
    raise ModelError(
        f"teacher.model: {source} has another tokenizer than the policy ({differing} of {len(other)} tokens differ), so "
        "their probabilities cannot be compared. Choose a model of the same family, or teacher.model: self."
    )


# --- the teacher ------------------------------------------------------------------------------------------------------


class Teacher:
    """The teacher of one run. `model` is None if the policy is its own teacher."""

    def __init__(self, settings: TeacherConfig, model: Any = None) -> None:
        if (model is None) != (settings.model == SELF):
            raise ModelError(
                f"teacher.model: {settings.model} needs {'no' if model else 'a'} model in addition to the policy."
            )
        self.settings, self.model = settings, model
        self.make = prompt_maker(settings.prompt)
        self.head: Projection | None = None
        """The head of the last scoring pass, without hidden states."""

    def join(
        self,
        policy: Any,
        *,
        temperature: float,
        score: Callable[[Any, Rows, ExtraOutputs], Scores],
        tokenize: Callable[[list[Prompt]], list[list[int]]],
        pad: int,
        process: int = 0,
    ) -> None:
        """Connect the teacher to the trainer of the policy before the first rollout.

        `temperature` is that of sampling. `score` scores rows with a model, `tokenize` turns prompts into token ids, `pad` is the
        id of the padding token, and `process` the number of this process among those that share a batch.
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
        """Score a rollout with the teacher.

        Returns `teacher_logps` (B, T), NaN for a completion without a teacher. With `hidden`, also returns `teacher_hidden`
        (B, T, H), 0 for such a completion, and `teacher_known` (B,) bool.
        """
        prompts = self._prompts(state, group_size)
        scored = [row for row, ids in enumerate(prompts) if ids is not None]
        ids, mask = batch.completion_ids, batch.completion_mask
        logps = torch.full(ids.shape, torch.nan, device=ids.device)
        known = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        output: dict[str, Any] = {"teacher_logps": logps}
        scores: Scores | None = None
        if scored:
            known_prompts = [prompts[row] or [] for row in scored]
            width = max(map(len, known_prompts))
            padded = [[self._pad] * (width - len(prompt)) + prompt for prompt in known_prompts]
            live = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in known_prompts]
            rows = Rows(
                torch.cat([torch.tensor(padded, device=ids.device, dtype=ids.dtype), ids[scored]], dim=1),
                torch.cat([torch.tensor(live, device=ids.device, dtype=mask.dtype), mask[scored]], dim=1),
                ids.shape[1],
            )
            with torch.no_grad():
                scores = self._score(self._scorer, rows, ExtraOutputs(hidden=hidden))
            logps[scored] = scores.logps.float()
            known[scored] = True
        if hidden:
            output["teacher_known"] = known
            if scores is not None:
                self.head = scores.projection.bare()
                values = scatter_to_tokens(scores.projection.hidden, mask[scored])
                hidden_states = values.new_zeros(len(ids), *values.shape[1:])
                hidden_states[scored] = values
            else:
                hidden_states = torch.zeros(*ids.shape, 1, device=ids.device)
            output["teacher_hidden"] = hidden_states
        return output

    def restore_head(self, batch: MicroBatch) -> None:
        """Score one completion of a restored rollout, because checkpoints do not contain the head."""
        rows = batch.select([0]).rows
        with torch.no_grad():
            self.head = self._score(self._scorer, rows, ExtraOutputs(hidden=True)).projection.bare()

    # --- its prompts ----------------------------------------------------------------------------------------------------

    def _prompts(self, state: RolloutState, group_size: int) -> list[list[int] | None]:
        """The token ids of the teacher's prompt for each completion, or None."""
        texts = [completion_text(completion) for completion in state.rewards.completions]
        first = self._process * len(texts)
        rewards = state.rewards.total[first : first + len(texts)].tolist()
        groups = [(first + row) // group_size for row in range(len(texts))]
        feedback = feedback_of(state.rewards.extra, len(texts))
        best = demonstrations(rewards, groups, DEMONSTRATION_REWARD)
        filled: list[Prompt | None] = []
        for row, text in enumerate(texts):
            columns = dict(state.rows[row])
            demonstration = best[row]
            filled.append(
                self.make(
                    row=columns,
                    prompt=user_text(columns["prompt"]),
                    completion=text,
                    reward=None if rewards[row] != rewards[row] else rewards[row],
                    feedback=feedback[row],
                    demonstration=None if demonstration is None else texts[demonstration],
                )
            )
        ids = iter(self._tokenize([prompt for prompt in filled if prompt is not None]))
        context = self._context
        prompts: list[list[int] | None] = []
        for row, prompt in enumerate(filled):
            tokens = None if prompt is None else next(ids)
            length = len(tokens or ()) + len(state.rewards.completion_ids[row])
            too_long = context is not None and length > context
            prompts.append(None if too_long or not tokens else tokens)
        return prompts


# --- values for templates ----------------------------------------------------------------------------------------------


def completion_text(completion: Any) -> str:
    """The text of a completion: the assistant's messages, one line each."""
    if isinstance(completion, str):
        return completion
    return "\n".join(user_text([message]) for message in completion if message.get("role") == "assistant").strip()


def user_text(prompt: Any) -> str:
    """The text of a prompt, or of its last message if it has several."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[-1].get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text") or "") for part in content)


def feedback_of(extra: Mapping[str, Sequence[Any]], count: int) -> list[str]:
    """The verifier's feedback on each completion: the column `feedback` of a reward function, or all reasons."""
    columns = [extra["feedback"]] if "feedback" in extra else [v for k, v in extra.items() if k.endswith("/reason")]
    return ["; ".join(str(column[row]) for column in columns if column[row]) for row in range(count)]


def demonstrations(rewards: Sequence[float], groups: Sequence[int], least: float) -> list[int | None]:
    """For each completion, the best other completion of its group that has at least its reward and `least`; or None."""
    best: list[int | None] = []
    for row, reward in enumerate(rewards):
        others = [
            other
            for other, group in enumerate(groups)
            if group == groups[row] and other != row and rewards[other] >= least and not rewards[other] < reward
        ]
        best.append(max(others, key=lambda other: (rewards[other], -other)) if others else None)
    return best
