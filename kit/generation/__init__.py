"""Sampling of completions: transformers' generate or vLLM, tools and turns, pictures."""
