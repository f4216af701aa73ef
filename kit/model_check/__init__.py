"""`grpo-kit model check`: does a model that nobody listed train here?"""
