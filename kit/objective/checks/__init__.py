"""The checks behind `kit.objective.check.check_hook`, by kind of hook."""
