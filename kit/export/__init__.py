"""A run's weights in forms that other programs read, each one checked against the model that was trained.

request.py  what can be asked, checked before anything is started, and what came of it
job.py      the process that exports: read this first
target.py   a folder that is whole or not there
source.py   the policy as it was trained; its weights merged in float32, quantised, written
verify.py   the same prompts through source and export, its files, and every tensor against base + update
gguf.py     llama.cpp's file and Ollama's Modelfile
card.py     the model card of every export
"""
