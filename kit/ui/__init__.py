"""The web page: Gradio screens over run directories. Nothing here imports torch; child processes do the heavy work.

server.py     mounts the page behind the gate, and serves files of runs            settings.py  its options
security.py   the gate: every request passes it first                              guard.py     checks of a configuration
page.py       the screens and their look                                           markup.py    pieces of HTML, escaped
site.py       shared by all screens: runs, polling, the run in the address         children.py  child processes
draft.py      preset + changes -> config, YAML, command                            form.py      the inputs of New run
uploads.py    uploaded files                                                       results.py   HTML of the Reward Lab's results
The screens: home.py, new_run.py (steps.py, reward.py, lab.py), run.py (explorer.py, completions.py), compare.py, chat.py,
export.py.
"""
