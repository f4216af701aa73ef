"""How good a model is on problems that it was not trained on."""
