"""Structured log on standard error, as text or JSON. Owns the format of log lines."""

import logging
import sys
from typing import Any

import orjson

from shared.configuration.settings import LogConfig


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
    handler.setFormatter(_Formatter(role, config.format == "json"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("lockstep").setLevel(config.level.upper())
