"""Before a run: does it fit into memory, how long does it take, will it learn, and can this machine run it?"""
