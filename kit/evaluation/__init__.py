"""Scores of a model on problems that it was not trained on."""
