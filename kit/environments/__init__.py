"""Environments to act in, for `generation.environment`: classes whose methods are tools. Standard library only."""
