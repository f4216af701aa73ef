"""The web page: Gradio screens over run directories. No torch here; what is heavy is done by child processes.

server.py    options, what is refused, uvicorn         page.py      the screens, put together
security.py  every request passes here first           files.py     reports and exports, the only files served
guard.py     what a configuration of the page may say  draft.py     preset + changes -> config, YAML, command
bench.py     a warm child for rows, rewards and plans  jobs.py      long children: signal check, generation
live.py      polling files, unchanged ones skipped     markup.py    HTML pieces, escaped
form.py      the form, made from the schema            theme.py     colours, fonts, style sheet
screens: home.py, new_run.py and its steps (step_model.py, step_data.py, step_lab.py, step_plan.py)
"""
