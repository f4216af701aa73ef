"""Generated programs, judged by what they print or return: run in `rewards.sandbox`, compared out here.

Expected outputs never enter the sandbox. What comes out is text or plain JSON, so that no object of the program's takes
part in a comparison.
"""
