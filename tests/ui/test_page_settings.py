"""Refusals of the page before it starts: other machines without accounts, weak passwords, missing hooks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kit.errors import ConfigError
from kit.ui.settings import Settings, read_accounts

ROOT = Path(__file__).parents[2]
PASSWORD = "correct horse battery"


def test_the_program_refuses_other_machines_without_accounts() -> None:
    command = [sys.executable, str(ROOT / "app.py"), "--port", "1", "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "opens the page to other machines" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "options", [{"host": "0.0.0.0"}, {"host": "::"}, {"host": "192.168.1.5"}, {"host": "example.org"}]
)
def test_so_do_the_settings(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--auth"):
        Settings(**options).check()
    Settings(**options, accounts={"ada": PASSWORD}).check()


def test_this_machine_needs_none() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.0.0.2"):
        Settings(host=host).check()


def test_accounts_are_read_from_files_and_variables_and_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = tmp_path / "accounts"
    good.write_text(f"ada:{PASSWORD}\n\nbob:with:colon:s\n")
    assert read_accounts(str(good)) == {"ada": PASSWORD, "bob": "with:colon:s"}
    monkeypatch.setenv("KIT_ACCOUNTS", "ada:tooshor")
    with pytest.raises(ConfigError, match="at least 8") as weak:
        read_accounts("KIT_ACCOUNTS")
    assert "tooshor" not in str(weak.value)
    monkeypatch.setenv("KIT_ACCOUNTS", "  ")
    with pytest.raises(ConfigError, match="names no account"):
        read_accounts("KIT_ACCOUNTS")
    with pytest.raises(ConfigError, match="no such file") as typed:
        read_accounts("ada:my-own-password")
    assert "my-own-password" not in str(typed.value)


def test_hooks_are_files_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--hooks"):
        Settings(hooks=(tmp_path / "none.py",)).check()
