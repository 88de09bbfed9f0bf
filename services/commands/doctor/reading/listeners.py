"""Who listens on a port: `lsof -nP -iTCP:PORT -sTCP:LISTEN -Fpc`, or `ss -Hltnp sport = :PORT`."""

import re

_SS = re.compile(r'\("([^"]{1,64})",pid=(\d{1,10})')


def read_lsof(text: str) -> list[tuple[str, int]]:
    """Return (command, process id) of each holder."""
    found: list[tuple[str, int]] = []
    pid = 0
    for line in text.splitlines():
        if line[:1] == "p" and line[1:].isascii() and line[1:11].isdecimal():
            pid = int(line[1:11])
        elif line[:1] == "c" and pid:
            found.append((line[1:65], pid))
            pid = 0
    return found


def read_ss(text: str) -> list[tuple[str, int]]:
    """Return (command, process id) of each holder; those of other users are not shown."""
    return list(dict.fromkeys((name, int(pid)) for name, pid in _SS.findall(text)))
