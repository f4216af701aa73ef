"""Everything a run is made of but the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kit.config import RunConfig
from kit.generation.engine import HF, Engine
from kit.generation.tools import NOTHING, Interaction

if TYPE_CHECKING:
    from kit.data import DataSplit
    from kit.models.loading import ModelFiles
    from kit.objective import Objective
    from rewards import Preset


@dataclass(frozen=True)
class Parts:
    """Everything a run is made of but the weights."""

    config: RunConfig
    objective: Objective
    preset: Preset
    files: ModelFiles
    data: DataSplit
    checker: Preset
    engine: Engine = HF
    interaction: Interaction = NOTHING
