"""The checker that decides correctness in held-out evaluation, whether it fits the configuration, and which scores follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kit.config import RunConfig
from kit.errors import ConfigError
from kit.registry import did_you_mean

if TYPE_CHECKING:
    from rewards import Preset, Sample


def build_checker(config: RunConfig, preset: Preset) -> Preset:
    """The preset whose checker decides correctness in evaluation. Raises `ConfigError` for evaluation.checker."""
    import rewards

    name = config.evaluation.checker
    if name is None:
        return preset
    if name not in rewards.names():
        raise ConfigError(
            f"evaluation.checker: there is no preset '{name}'.{did_you_mean(name, rewards.names())} All of them: grpo-kit "
            "reward list"
        )
    try:
        checker = rewards.load(name, **(config.reward.params if name == config.reward.preset else {}))
    except rewards.UnknownParameterError as error:
        raise ConfigError(
            f"evaluation.checker: preset '{name}' cannot be used without parameters ({error}). Choose another preset, or "
            "train on it (reward.preset, reward.params) and leave evaluation.checker out."
        ) from error
    if checker.checker is None:
        raise ConfigError(
            f"evaluation.checker: preset '{name}' has no component that says whether a completion is right. Choose "
            "another one (grpo-kit reward list)."
        )
    return checker


def check_evaluation(config: RunConfig, checker: Preset) -> None:
    """Raises `ConfigError`, with what to set, for evaluation settings that cannot work together."""
    evaluation = config.evaluation
    acts = evaluation.alarm in ("stop", "rollback")
    if (evaluation.patience is not None or acts) and not evaluation.every:
        key = "patience" if evaluation.patience is not None else f"alarm: {evaluation.alarm}"
        raise ConfigError(
            f"evaluation.{key} acts on held-out scores during training, and evaluation.every is 0: there are none. Set "
            f"evaluation.every, for example to {max(1, config.optimisation.steps // 10)}."
        )
    if evaluation.metric not in ("auto", "greedy_reward") and checker.checker is None:
        raise ConfigError(
            f"evaluation.metric: {evaluation.metric} is a share of right answers, and nothing says what is right: the reward "
            "has no checker. Set evaluation.checker to a preset that fits the data (grpo-kit reward list), or "
            "evaluation.metric: greedy_reward."
        )


def check_checker(config: RunConfig, checker: Preset, samples: Sequence[Sample], columns: Sequence[str]) -> None:
    """Tries evaluation.checker on a few completions. Raises `ConfigError` when it can judge none of them."""
    from kit.evaluation.heldout import scoring_context

    if config.evaluation.checker is None:
        return
    scores = checker.verdicts(samples, scoring_context(config.run.seed, config.optimisation.steps))
    if scores and {score.status for score in scores} == {"error"}:
        raise ConfigError(
            f"evaluation.checker: '{checker.name}' cannot judge the rows of {config.data.source}: "
            f"{scores[0].info.get('reason', 'no reason given')}. Choose a preset that fits the data (grpo-kit reward list). "
            f"Columns: {', '.join(columns)}."
        )


def check_metric(metric: str, config: RunConfig, where: str) -> None:
    """Refuses a score that no evaluation of `config` will have. `where` names the option. Raises `ConfigError`."""
    k = config.evaluation.k
    names = ["auto", "greedy_accuracy", "pass@1", "pass@k", "maj@k", "greedy_reward", f"pass@{k}", f"maj@{k}"]
    options = list(dict.fromkeys(names))
    if metric not in options:
        raise ConfigError(
            f"{where}: there is no held-out score '{metric}'.{did_you_mean(metric, options)} With evaluation.k: {k} there are: "
            f"{', '.join(options)}."
        )
    if metric in ("auto", "greedy_reward") or config.evaluation.checker is not None:
        return
    import rewards

    checker = None
    if config.reward.preset is not None:
        try:
            checker = rewards.load(config.reward.preset, **config.reward.params).checker
        except (ValueError, TypeError):  # an unknown preset or parameter is told when the run is prepared
            return
    if checker is None:
        raise ConfigError(
            f"{where}: {metric} is a share of right answers, and nothing says what is right: the reward has no checker. Set "
            "evaluation.checker to a preset that fits the data (grpo-kit reward list), or take greedy_reward."
        )
