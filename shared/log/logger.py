"""Log of one process. Owns its handlers, its fields common to all lines, and rare tracebacks."""

import logging
import sys
import time
from pathlib import Path
from typing import Any, Literal

from shared.configuration.settings import LogConfig
from shared.log import lines
from shared.log.files import LogFile

TRACEBACK_INTERVAL_S = 60.0
"""Shortest time between two tracebacks of one kind, so that a client cannot fill the log."""


_context: dict[str, Any] = {}
"""Fields of all lines of this process."""


class TracebackLimit(logging.Filter):
    """Drops a failure with a traceback if the same kind was logged a short time ago.

    The kind is the logger and the type of the exception. The next line that is not dropped has the
    number of dropped ones in its field `suppressed`.
    """

    def __init__(self) -> None:
        """Begin without failures."""
        super().__init__()
        self._next_s: dict[object, float] = {}
        self._suppressed: dict[object, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record; add the number of dropped ones to it."""
        if not record.exc_info:
            return True
        kind = record.name, record.exc_info[0]
        now_s = time.monotonic()
        if now_s < self._next_s.get(kind, now_s):
            self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
            return False
        self._next_s[kind] = now_s + TRACEBACK_INTERVAL_S
        if suppressed := self._suppressed.pop(kind, 0):
            fields = getattr(record, "fields", {})
            record.__dict__["fields"] = {**fields, "suppressed": suppressed}
        return True


class _Formatter(logging.Formatter):
    def __init__(self, name: str, as_json: bool) -> None:
        super().__init__()
        self._name = name
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        # The fields of the event come first in the text, and its own epoch takes precedence.
        fields: dict[str, Any] = {**getattr(record, "fields", {})}
        fields.update({key: value for key, value in _context.items() if key not in fields})
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        line = lines.make(
            self._name,
            record.getMessage(),
            fields,
            level=record.levelname.lower(),
            time_s=record.created,
        )
        return lines.encode(line) if self._as_json else lines.render(line)


class Log:
    """A logger whose calls name an event and its fields: `log.info("step_finished", step_id=3)`."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"lockstep.{name}")

    def debug(self, event: str, **fields: Any) -> None:
        """Log an event that only helps to find a bug."""
        self._logger.debug(event, extra={"fields": fields})

    def info(self, event: str, **fields: Any) -> None:
        """Log an event that an operator may want to see."""
        self._logger.info(event, extra={"fields": fields})

    def warning(self, event: str, **fields: Any) -> None:
        """Log an event that an operator should check."""
        self._logger.warning(event, extra={"fields": fields})

    def error(self, event: str, **fields: Any) -> None:
        """Log a failure."""
        self._logger.error(event, extra={"fields": fields})

    def exception(self, event: str, **fields: Any) -> None:
        """Log a failure with the traceback of the exception being handled."""
        self._logger.error(event, extra={"fields": fields}, exc_info=True)


def set_up(name: str, config: LogConfig, directory: Path | None = None) -> None:
    """Configure this process's log output. Call it once, at the start.

    Without a directory the log goes to standard error. With one it goes to a file there, and on a
    terminal to standard error as well; elsewhere the file gets all other output of this process
    too.

    Args:
        name: `gateway`, `scheduler`, `store`, `rank`, or a rank with its number, `rank-0`.
        config: level, format, and bounds of the files.
        directory: folder of the log files (`Config.log_directory`).

    Raises:
        ConfigError: when the file cannot be written.
    """
    _context.clear()
    handlers: list[logging.Handler] = []
    is_terminal = sys.stderr.isatty()
    if directory is not None:
        file = LogFile(directory, name, config, takes_output=not is_terminal)
        file.setFormatter(_Formatter(name, as_json=True))
        handlers.append(file)
    if directory is None or is_terminal:
        stream = logging.StreamHandler(sys.stderr)
        stream.setFormatter(_Formatter(name, config.format == "json"))
        handlers.append(stream)
    for handler in handlers:
        handler.addFilter(TracebackLimit())
    root = logging.getLogger()
    root.handlers = handlers
    root.setLevel(logging.WARNING)
    logging.getLogger("lockstep").setLevel(config.level.upper())


def bind(**fields: Any) -> None:
    """Add fields to all later lines of this process, such as its epoch."""
    _context.update(fields)


def report(sentence: str, config: LogConfig, level: Literal["warning", "error"]) -> None:
    """Write a sentence for the operator to standard error before or after serving.

    Args:
        sentence: the cause and the remedy.
        config: contains the format; JSON lines have the role `lockstep`.
        level: how serious it is.
    """
    text = f"lockstep: {'warning: ' if level == 'warning' else ''}{sentence}"
    if config.format == "json":
        text = lines.encode(lines.make("lockstep", sentence, {}, level=level))
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
