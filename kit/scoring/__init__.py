"""Log-probabilities, entropies and divergences of completions, without logits and without padding."""
