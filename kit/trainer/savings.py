"""Work that is left out for the same gradient: each saving is a switch, and where it is not exact it says so and stays off.

`trainer.savings_report` tells of every saving `on`, or why not. A reason is logged once, and kept in `env.json`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kit.objective import Objective
from kit.objective.objective import to_skipping
from kit.scoring.tolerances import has_dropout
from kit.trainer.value_head import Critic

if TYPE_CHECKING:
    from kit.config import RunConfig

log = logging.getLogger("kit")
ON = "on"
OFF = "switched off"
_Trainer: Any = object  # what it is mixed into: `trl.GRPOTrainer`, whichever class that is
_said: set[str] = set()


def say_once(text: str) -> None:
    """A warning in the log, the first time only."""
    if text not in _said:
        _said.add(text)
        log.warning("%s", text)


class SavingsSide(_Trainer):  # type: ignore[misc]
    """Mixed into `HookedGRPOTrainer`, before TRL's class."""

    objective: Objective | None
    token_budget: int | None
    savings_report: dict[str, str]
    _critic: Critic | None

    def _settle_savings(self, *, skip_flat_groups: bool, reuse_old_logps: bool) -> None:
        """Decides, once the trainer is built, what is left out of every step."""
        if self.objective is None:
            return
        budget = self.token_budget is not None
        obstacle = self._obstacle_to_dividing() if budget else "no budget is set"
        self._note_saving("token_budget", obstacle, quiet=not budget)
        self._note_saving("skip_flat_groups", self._obstacle_to_skipping() if skip_flat_groups else OFF)
        obstacle = self._obstacle_to_reuse() if reuse_old_logps else OFF
        self._note_saving("reuse_old_logps", obstacle, quiet=self._needs_no_old_logps())

    def _note_saving(self, name: str, obstacle: str | None, *, quiet: bool = False) -> None:
        self.savings_report[name] = ON if obstacle is None else obstacle
        if obstacle not in (None, OFF) and not quiet:
            log.info("%s is off: %s", name, obstacle)

    def _note_undivided(self) -> None:
        """Takes back what was said of savings if the loss was replaced after the trainer was built."""
        obstacle = self._obstacle_to_dividing()
        for name in ("token_budget", "skip_flat_groups"):
            if obstacle is not None and self.savings_report.get(name) == ON:
                self._note_saving(name, obstacle)

    @property
    def skips_flat(self) -> bool:
        """Whether completions without an advantage are not scored."""
        return self.savings_report.get("skip_flat_groups") == ON

    @property
    def reuses_old_logps(self) -> bool:
        """Whether the first pass over completions gives their old log-probabilities, for later steps on them."""
        return self.savings_report.get("reuse_old_logps") == ON

    def _obstacle_to_skipping(self) -> str | None:
        assert self.objective is not None
        if (obstacle := to_skipping(self.objective)) is not None:
            return obstacle
        if (undivided := self._obstacle_to_dividing()) is not None:
            return undivided
        if self._critic is not None:
            return "the value head learns from every completion"
        if self.aux_loss_enabled:
            return "the load balance of the router is one of all completions"
        if has_dropout(self.model):
            return "the model has dropout, and its random numbers would fall on other completions"
        return None

    def _obstacle_to_dividing(self) -> str | None:
        """Why a micro-batch cannot be scored in parts."""
        if not self._steps_by_itself():
            return "the gradients of several processes are put together while they are computed, so all must score"
        if not self._is_plain():
            return "compute_loss is not the kit's own, and what is added to the loss would be lost in parts"
        return None

    def _needs_no_old_logps(self) -> bool:
        """Whether no step is made on completions after another one: TRL then computes none."""
        window = self.args.steps_per_generation * self.num_iterations
        return bool(self.args.gradient_accumulation_steps % window == 0)

    def _obstacle_to_reuse(self) -> str | None:
        if self._needs_no_old_logps():
            return "not needed: there is one step on each completion"
        accumulation, parts = self.args.gradient_accumulation_steps, self.args.steps_per_generation
        if accumulation % parts:
            return (
                f"some completions are first trained on after a step that follows their rollout (steps_per_generation "
                f"{parts}, gradient_accumulation_steps {accumulation})"
            )
        if self._critic is not None:
            return "the value head needs a scoring pass at the rollout, which gives them as well"
        if has_dropout(self.model):
            return "the model has dropout, so that no two passes agree"
        return None


def switches(config: RunConfig) -> dict[str, Any]:
    """The trainer's keyword arguments."""
    names = ("token_budget", "skip_flat_groups", "reuse_old_logps")
    return {name: getattr(config.optimisation, name) for name in names}


def planned(config: RunConfig, objective: Objective) -> dict[str, str]:
    """What is known of the savings of `kit.trainer.loss_in_parts` and `old_logps` before there is a model, by switch."""
    settings = config.optimisation
    dropout = config.model.lora.dropout if config.model.lora is not None else 0.0
    skipping = to_skipping(objective)
    if skipping is None and "values" in objective.needs:
        skipping = "the value head learns from every completion"
    if skipping is None and dropout:
        skipping = "the model has dropout (model.lora.dropout)"
    reuse = None
    if settings.iterations == 1:
        reuse = "not needed: there is one step on each completion"
    elif "values" in objective.needs:
        reuse = "the value head needs a scoring pass at the rollout, which gives them as well"
    elif dropout:
        reuse = "the model has dropout (model.lora.dropout)"
    budget = settings.token_budget
    return {
        "token_budget": "no budget is set" if budget is None else f"at most {budget} tokens at once",
        "skip_flat_groups": (skipping or ON) if settings.skip_flat_groups else OFF,
        "reuse_old_logps": (reuse or ON) if settings.reuse_old_logps else OFF,
    }
