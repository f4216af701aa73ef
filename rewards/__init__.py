"""Rewards for training language models with reinforcement learning: presets, components and adaptors for trainers.

>>> from rewards import load
>>> rewards = load("gsm8k-reasoning").trl()       # GRPOTrainer(reward_funcs=rewards, ...)
>>> rewards.reward_weights                        # GRPOConfig(reward_weights=rewards.reward_weights)
[1.0, 0.2, 0.1]
"""

from rewards.errors import FunctionPathError, PresetError, RewardsError, UnknownParameterError, UnknownPresetError
from rewards.evaluation import Evaluation
from rewards.functions import from_function, from_functions
from rewards.preset import Gate, Preset, Weighted, combine, gate
from rewards.presets import describe, load, names, parameters
from rewards.protocol import Component, Context, ItemComponent, Sample, Score, Status
from rewards.samples import build_samples

__all__ = [
    "Component",
    "Context",
    "Evaluation",
    "FunctionPathError",
    "Gate",
    "ItemComponent",
    "Preset",
    "PresetError",
    "RewardsError",
    "Sample",
    "Score",
    "Status",
    "UnknownParameterError",
    "UnknownPresetError",
    "Weighted",
    "build_samples",
    "combine",
    "describe",
    "from_function",
    "from_functions",
    "gate",
    "load",
    "names",
    "parameters",
]
