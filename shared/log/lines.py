"""Log lines as objects. Owns their keys, their JSON and their text form."""

import re
import socket
import time
from collections.abc import Mapping
from typing import Any

import orjson

from shared.clock import unix_time_s

OUTPUT = "output"
"""Event of a line that is no log line, such as what a library prints; its text is in `text`."""

_RANK = "rank"
_SHOWN_OTHERWISE = ("time", "level", "role", "host", "event")
_NAME = re.compile(r"(?P<role>[a-z]+)(?:[ -](?P<rank>[0-9]+))?")
_NAME_WIDTH = 9
_HOST = socket.gethostname()

Line = dict[str, Any]


def make(
    name: str,
    event: str,
    fields: Mapping[str, Any],
    *,
    level: str = "info",
    time_s: float | None = None,
) -> Line:
    """Return a log line of a process on this host.

    Args:
        name: `lockstep` (the supervisor), `gateway`, `scheduler`, `store`, `rank`, or a rank with
            its number, `rank 0` or `rank-0`.
        event: what happened.
        fields: further facts, by name.
        level: debug, info, warning or error.
        time_s: Unix time in seconds; None: now.

    Returns:
        The keys `time`, `level`, `role`, `rank` (of a rank with a number), `host` and `event`, then
        those of `fields` that have other names.
    """
    found = _NAME.fullmatch(name)
    role, rank = (found["role"], found["rank"]) if found else (name, None)
    own = {
        "time": unix_time_s() if time_s is None else time_s,
        "level": level,
        "role": role,
        **({} if rank is None else {_RANK: int(rank)}),
        "host": _HOST,
        "event": event,
    }
    return {**own, **fields, **own}


def encode(line: Line) -> str:
    """Return a line as one JSON object without a line end; values of other types as text."""
    return orjson.dumps(line, default=str).decode()


def decode(text: str, name: str, time_s: float | None = None) -> Line:
    """Return the log line in a line of output; any other text becomes the field of a new line.

    Args:
        text: one line that a process wrote, without its end.
        name: name of the process, as in `make`.
        time_s: Unix time of a new line in seconds; None: now.
    """
    if text.startswith("{"):
        try:
            line = orjson.loads(text)
        except orjson.JSONDecodeError:
            line = {}
        if isinstance(line.get("time"), int | float) and isinstance(line.get("event"), str):
            return dict(line)
    return make(name, OUTPUT, {"text": text}, time_s=time_s)


def name_of(line: Line) -> str:
    """Return the name of the process that wrote a line, such as `gateway` or `rank 0`."""
    role = str(line.get("role", ""))
    # A line of another role may be about a rank.
    return f"{role} {line[_RANK]}" if role == _RANK and _RANK in line else role


def render(line: Line) -> str:
    """Return a line for people, without date and process: time of day, level, event and fields.

    Output that is no log line, and a sentence of the supervisor, are returned as they were. A
    traceback makes the text several lines long.
    """
    if line["event"] == OUTPUT:
        return str(line.get("text", ""))
    if line.get("role") == "lockstep":
        return str(line["event"])
    clock = time.strftime("%H:%M:%S", time.localtime(line["time"]))
    return f"{clock} {_render_event(line)}"


def render_dated(line: Line) -> str:
    """Return a line for people: date, time of day, process, level, event and fields."""
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line["time"]))
    text = str(line.get("text", "")) if line["event"] == OUTPUT else _render_event(line)
    start = f"{moment} {name_of(line):<{_NAME_WIDTH}} | "
    return "\n".join(f"{start}{part}" for part in text.splitlines() or [""])


def _render_event(line: Line) -> str:
    parts = [str(line.get("level", "")).ljust(7), str(line["event"])]
    hidden = {*_SHOWN_OTHERWISE, *([_RANK] if line.get("role") == _RANK else [])}
    parts += [f"{key}={value}" for key, value in line.items() if key not in hidden]
    return " ".join(parts)
