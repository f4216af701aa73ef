"""Chat with a run: the base model and the tuned one side by side, in a process that keeps them loaded.

client.py     the session that faces hold, and the protocol: JSON lines over stdin and stdout (standard library only)
server.py     the process
answering.py  the models, the answers made as held-out evaluation makes them, word by word, and their rewards
"""
