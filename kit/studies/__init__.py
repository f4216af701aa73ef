"""Several runs at once: comparisons with a verdict, and sweeps."""
