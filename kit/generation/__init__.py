"""How completions are sampled: transformers' generate or vLLM, tools and turns, images."""
