"""The TRL that the trainer is a subclass of."""

from __future__ import annotations

import os

from kit.errors import EnvironmentUnsupported

TESTED_TRL = "1.15"


def check_trl() -> None:
    """Refuses a TRL outside the tested range. Raises `EnvironmentUnsupported`; `KIT_ALLOW_UNTESTED=1` lets it pass."""
    import trl

    if trl.__version__.startswith(f"{TESTED_TRL}.") or os.environ.get("KIT_ALLOW_UNTESTED") == "1":
        return
    raise EnvironmentUnsupported(
        f"TRL {trl.__version__} is installed; the trainer is a subclass of TRL {TESTED_TRL}.* and was tested with that only. "
        f"Install it (pip install 'trl=={TESTED_TRL}.*'), or set KIT_ALLOW_UNTESTED=1 to try anyway."
    )
