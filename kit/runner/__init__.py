"""The steps that the main loop (kit/train.py) calls."""
