"""Comparisons of several runs, with a verdict."""
