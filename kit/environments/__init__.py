"""Environments for `generation.environment`: classes whose methods are tools. Standard library only."""
