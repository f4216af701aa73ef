"""Export a run's weights in formats that other programs read, and verify each export against the trained model.

job.py      the process that exports: read this first
request.py  the options of an export, checked before a process starts, and its result
source.py   the trained policy: merge its weights in float32 and write them
verify.py   compare the export's files and answers with those of the trained model
target.py   atomic export folders
gguf.py     llama.cpp's GGUF file and Ollama's Modelfile
card.py     the model card of every export
"""
