"""Words of command lines that people copy, or another host's shell reads. Pure."""

import re
import shlex

_HOME = re.compile(r"~[A-Za-z0-9._-]*(?:/|$)")


def quoted(path: str) -> str:
    """Return a path as one word of a shell; a home folder at its start is left to the shell."""
    home = _HOME.match(path)
    if home is None:
        return shlex.quote(path)
    rest = path[home.end() :]
    return home[0] + (shlex.quote(rest) if rest else "")


def settings_flags(config: str | None, inventory: str | None, host: str) -> str:
    """Return the flags that say where settings stand, each word after a space; "": nowhere."""
    if inventory:
        return f" --inventory {quoted(inventory)} --host {shlex.quote(host)}"
    return f" --config {quoted(config)}" if config else ""
