"""Talking to a run: the base model and the tuned one, side by side, in a process that keeps them loaded.

client.py     the session that faces hold: spawns the process, asks, streams, cancels (standard library only)
protocol.py   what the two say to each other: JSON lines over stdin and stdout
server.py     the process
answering.py  the models, the answers, the rewards
generating.py  an answer made as held-out evaluation makes one, word by word
terminal.py   `grpo-kit chat`
"""
