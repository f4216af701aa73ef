"""Before a run: will it fit, how long will it take, will it learn, and is this machine fit for it?"""
