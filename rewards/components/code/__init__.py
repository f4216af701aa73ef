"""Grade generated programs by their output: they run in `rewards.sandbox`, and this process compares the output.

Expected outputs never enter the sandbox. The sandbox returns text or plain JSON, so that no object of the program takes part
in a comparison.
"""
