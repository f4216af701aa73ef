"""The options of the server, and their checks."""

from __future__ import annotations

import ipaddress
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from kit.errors import ConfigError

SHORTEST_PASSWORD = 8
PORT = 7860


@dataclass(frozen=True)
class Settings:
    """Options of the page. `accounts` maps user names to passwords; a configuration may name functions of the files `hooks`."""

    host: str = "127.0.0.1"
    port: int = PORT
    root: Path = Path("runs")
    accounts: dict[str, str] = field(default_factory=dict, repr=False)
    hooks: tuple[Path, ...] = ()
    folder: Path = field(default_factory=Path.cwd)
    """Base of relative paths of data files and model folders."""
    folders: tuple[Path, ...] = ()
    """Further folders: data files and models must lie below these or `folder`."""
    proxy: bool = False
    """Whether a proxy sends the name that the browser requested as X-Forwarded-Host."""

    @property
    def readable(self) -> tuple[Path, ...]:
        """Return the folders of data files and models, with links resolved."""
        return tuple(path.resolve() for path in (self.folder, *self.folders))

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the page."""
        return is_loopback(self.host)

    def check(self) -> None:
        """Raise `ConfigError` for a page that is open to everybody, and for missing folders and hooks."""
        if not self.local and not self.accounts:
            raise ConfigError(
                f"--host {self.host} opens the page to other machines, and whoever opens it can start programs here. Give "
                "--auth FILE (a line `user:password` each) or --auth NAME (an environment variable of that form), or "
                "leave it at 127.0.0.1 and use an ssh tunnel: ssh -L 7860:127.0.0.1:7860 THIS_MACHINE"
            )
        for path in self.folders:
            if not path.is_dir():
                raise ConfigError(f"--folder {path}: there is no such folder.")
        for path in self.hooks:
            if not path.is_file() or path.suffix != ".py":
                raise ConfigError(f"--hooks {path}: expected an existing Python file (.py).")

    def admits(self, name: str, password: str) -> bool:
        """Whether there is an account with this name and password. Takes the same time for every wrong one."""
        expected = self.accounts.get(name, "\0")
        return secrets.compare_digest(expected.encode(), password.encode()) and name in self.accounts


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server at `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_accounts(source: str | None) -> dict[str, str]:
    """Read accounts from a file or an environment variable of this name: a line `user:password` each.

    Raises `ConfigError`; its message never contains a password.
    """
    if source is None:
        return {}
    path = Path(source)
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--auth {source} cannot be read: {type(error).__name__}.") from None
    elif source in os.environ:
        text = os.environ[source]
    else:
        raise ConfigError(
            f"--auth {source if source.isidentifier() or '/' in source else '...'}: there is no such file and no "
            "environment variable of that name. The command line takes no passwords, because others can see it."
        )
    accounts: dict[str, str] = {}
    for number, line in enumerate(filter(str.strip, text.splitlines()), 1):
        name, separator, password = line.strip().partition(":")
        if not (separator and name) or len(password) < SHORTEST_PASSWORD:
            raise ConfigError(
                f"--auth, line {number}: expected user:password with a password of at least {SHORTEST_PASSWORD} characters."
            )
        accounts[name] = password
    if not accounts:
        raise ConfigError("--auth names no account; expected lines of the form user:password.")
    return accounts
