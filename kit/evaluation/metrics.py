"""Which held-out scores a configuration can be judged by, asked before anything runs."""

from __future__ import annotations

from kit.config import RunConfig
from kit.errors import ConfigError
from kit.registry import did_you_mean


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
    if metric not in ("auto", "greedy_reward") and not _is_checked(config):
        raise ConfigError(
            f"{where}: {metric} is a share of right answers, and nothing says what is right: the reward has no checker. Set "
            "evaluation.checker to a preset that fits the data (grpo-kit reward list), or take greedy_reward."
        )


def _is_checked(config: RunConfig) -> bool:
    """Whether something says what is right, as far as the configuration can tell; in doubt it does."""
    if config.evaluation.checker is not None:
        return True
    if config.reward.preset is None:
        return False
    import rewards

    try:
        return rewards.load(config.reward.preset, **config.reward.params).checker is not None
    except (ValueError, TypeError):  # an unknown preset or parameter is told when the run is prepared
        return True
