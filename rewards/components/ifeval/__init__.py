"""Instructions that can be verified by looking at the response: IFEval's 25 kinds."""

from rewards.components.ifeval.component import InstructionFollowing, loose_variants
from rewards.components.ifeval.constraints import CONSTRAINTS, follows

__all__ = ["CONSTRAINTS", "InstructionFollowing", "follows", "loose_variants"]
