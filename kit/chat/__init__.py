"""Chat with a run: the base model and the tuned one side by side, in a process that keeps them loaded.

client.py     the session, and the protocol: JSON lines over stdin and stdout (standard library only)
server.py     the process
answering.py  the models, their answers (streamed, generated as in held-out evaluation), and the rewards
"""
