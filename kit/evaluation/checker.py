"""Build the checker that decides correctness in held-out evaluation; refuse settings and scores that need another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.config import RunConfig
from kit.errors import ConfigError, refuse
from kit.registry import did_you_mean

if TYPE_CHECKING:
    from rewards import Preset


def build_checker(config: RunConfig, preset: Preset) -> Preset:
    """Return the preset whose checker decides correctness in evaluation: evaluation.checker, else the training `preset`.

    Raises `ConfigError` for an unusable checker and for evaluation settings that contradict each other.
    """
    import rewards

    evaluation, name = config.evaluation, config.evaluation.checker
    if name is not None:
        advice = "(grpo-kit reward list)"
        if name not in rewards.names():
            near = did_you_mean(name, rewards.names())
            raise ConfigError(f"evaluation.checker: there is no preset '{name}'.{near} Choose one {advice}.")
        try:
            preset = rewards.load(name, **(config.reward.params if name == config.reward.preset else {}))
        except rewards.UnknownParameterError as error:
            raise ConfigError(
                f"evaluation.checker: preset '{name}' cannot be used without parameters ({error}). Choose another preset, or "
                "train on it (reward.preset, reward.params) and leave evaluation.checker out."
            ) from error
        if preset.checker is None:
            raise ConfigError(
                f"evaluation.checker: preset '{name}' has no component that decides whether a completion is right. Choose "
                f"another one {advice}."
            )
    key = "patience" if evaluation.patience is not None else "alarm: stop"
    refuse(
        ConfigError,
        (
            (evaluation.patience is not None or evaluation.alarm == "stop") and not evaluation.every,
            f"evaluation.{key} needs held-out scores during training, but evaluation.every is 0.",
            f"Set evaluation.every, for example to {max(1, config.optimisation.steps // 10)}.",
        ),
        (
            evaluation.metric not in ("auto", "greedy_reward") and preset.checker is None,
            f"evaluation.metric: {evaluation.metric} is a share of right answers, but nothing decides what is right: the reward "
            "has no checker.",
            "Set evaluation.checker to a preset that fits the data (grpo-kit reward list), or evaluation.metric: greedy_reward.",
        ),
    )
    return preset


def check_metric(metric: str, config: RunConfig, where: str) -> None:
    """Raise `ConfigError` if no evaluation of `config` will have the score `metric`. `where` names the option."""
    k = config.evaluation.k
    names = ["auto", "greedy_accuracy", "pass@1", "pass@k", "greedy_reward", f"pass@{k}"]
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
        except (ValueError, TypeError):  # unknown presets and parameters are reported when the run is prepared
            return
    if checker is None:
        raise ConfigError(
            f"{where}: {metric} is a share of right answers, but nothing decides what is right: the reward has no checker. Set "
            "evaluation.checker to a preset that fits the data (grpo-kit reward list), or take greedy_reward."
        )
