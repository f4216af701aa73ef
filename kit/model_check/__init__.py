"""`grpo-kit model check`: does an unlisted model train here?"""
