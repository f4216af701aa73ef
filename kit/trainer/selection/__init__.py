"""Fewer wasted rollouts: which prompts are rolled out, and which completions are trained on. One method a file."""
