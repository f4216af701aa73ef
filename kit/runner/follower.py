"""The training loop of all processes but the first in a data-parallel run (`kit.runner.distributed`)."""

from __future__ import annotations

from pathlib import Path

from kit.models.backend import activate_backend, use_threads
from kit.models.libraries import load_libraries
from kit.runner import console, lifecycle, prepare, resume
from kit.runner.distributed import FollowersRunDir


def follow() -> None:
    """Waits for the first process, builds the same trainer, and trains."""
    from accelerate.utils import broadcast_object_list

    from kit.models.failures import explained

    config, resumption, threads = broadcast_object_list([None])[0]  # waits for `announce` of the first process
    load_libraries(config.model)
    use_threads(threads, config.model.name)
    parts = prepare.prepare(config, fresh=False)
    folder = FollowersRunDir(Path(config.run.root) / str(config.run.id))
    stop = lifecycle.StopSignal(folder)
    backend = activate_backend(parts.files.backend, standby=config.generation.vllm.standby)
    with explained(), stop.listening(lambda text: None), backend:
        from kit.runner import build, recording  # imports TRL, so after the backend is active

        trainer, _ = build.build(build.Job(parts, folder, console.Reporter(quiet=True), stop, resumption), threads)
        trainer.add_callback(recording.SharedStop(stop, folder))
        resume.train_on(trainer, resumption)
