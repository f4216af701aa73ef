"""Models, scorer and trainer: everything that touches torch."""
