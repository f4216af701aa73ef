"""The web page: Gradio screens over run directories. No torch here; what is heavy is done by child processes.

server.py     the page mounted behind the gate, and the files that are served      settings.py  what it is started with
security.py   the gate: every request passes here first                            guard.py     what a configuration may say
page.py       the screens put together, and their look                             markup.py    pieces of HTML, escaped
site.py       what screens share: runs, polling, the run that an address names     children.py  child processes
draft.py      preset + changes -> config, YAML, command                            form.py      its inputs, made from the schema
uploads.py    files that a browser brings                                          results.py   how the Reward Lab's results look
The screens: home.py, new_run.py (steps.py, reward.py, lab.py), run.py (explorer.py, completions.py), compare.py, chat.py,
export.py.
"""
