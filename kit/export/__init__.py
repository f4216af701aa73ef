"""A run's weights in forms that other programs read, each one checked against the model that was trained.

face.py      what is asked for, checked before anything is started; the handle's end of it
job.py       the process that exports: read this first
formats.py   the formats, what they may differ by, and the room that they need
target.py    a folder that is whole or not there
source.py    the policy as it was trained, and what it answers
weights.py   merging in float32, and every tensor of an export against base + update
layout.py    what is in the written files: whole, finite, the right tokenizer, the right ends
verify.py    the same prompts through source and export
gguf.py, ollama.py, hub.py, card.py   what the single formats need beyond that
"""
