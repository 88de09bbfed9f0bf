"""Structured log on standard error, as text or JSON. Owns the format of log lines."""

import logging
import sys
import time
from typing import Any

import orjson

from shared.configuration.settings import LogConfig

TRACEBACK_INTERVAL_S = 60.0
"""Shortest time between two tracebacks of one kind, so that a client cannot fill the log."""


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
    def __init__(self, role: str, as_json: bool) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._role = role
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        text = record.getMessage()
        if record.exc_info:
            fields = {**fields, "traceback": self.formatException(record.exc_info)}
        if self._as_json:
            line = {
                "time": record.created,
                "level": record.levelname.lower(),
                "role": self._role,
                "event": text,
                **fields,
            }
            return orjson.dumps(line, default=str).decode()
        parts = [self.formatTime(record, self.datefmt), record.levelname.lower().ljust(7), text]
        parts += [f"{key}={value}" for key, value in fields.items()]
        return " ".join(parts)


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


def set_up(role: str, config: LogConfig) -> None:
    """Configure this process's log output. Call it once, at the start.

    Args:
        role: name of the process in JSON lines.
        config: level and format.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(TracebackLimit())
    handler.setFormatter(_Formatter(role, config.format == "json"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("lockstep").setLevel(config.level.upper())
