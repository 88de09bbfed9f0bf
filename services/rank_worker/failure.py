"""What kind of error ends a rank, and whose it is."""

import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from shared.errors import (
    CanaryFailed,
    ConfigError,
    LockstepError,
    RanksUnreachable,
    UnavailableError,
)
from shared.log import Log

_log = Log("rank_worker")

FailureCause = Literal["error", "memory", "unavailable", "canary"]

_OUT_OF_MEMORY_WORDS = re.compile(
    r"out ?of ?memory|insufficient memory|unable to allocate|std::bad_alloc"
    r"|\[(metal::)?malloc(_or_wait)?\]",
    re.IGNORECASE,
)
"""What MLX says: "[metal::malloc] ...", "[malloc] Unable to allocate n bytes.", Metal's
"Insufficient Memory (...ErrorOutOfMemory)", CUDA's "cudaMallocAsync(...) failed: out of memory"."""

_MODEL_CODE = "custom_model"
"""The name under which mlx-lm imports the Python file of a model that brings one."""


def failure_cause(error: BaseException) -> FailureCause:
    """Tell what kind of error ends this rank."""
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY_WORDS.search(str(error)):
        return "memory"
    if isinstance(error, CanaryFailed):
        return "canary"
    # A network that is not up yet is waited for like a service.
    return "unavailable" if isinstance(error, UnavailableError | RanksUnreachable) else "error"


def first_line(error: BaseException) -> str:
    """Return what an error says, as far as it fits into a sentence; "" if it says nothing."""
    return next(iter(str(error).strip().splitlines()), "")[:500]


@contextlib.contextmanager
def of_model_code() -> Iterator[None]:
    """Name the line of a model's own code that fails before the rank serves.

    Raises:
        ConfigError: it has failed, and would again.
    """
    try:
        yield
    except LockstepError:
        raise
    except (Exception, SystemExit) as error:
        place = _place(error)
        if place is None:
            raise
        if _may_pass(error):
            _log.error("model_code_failed", place=place)
            raise
        _log.debug("model_code_failed", traceback=traceback.format_exc())
        raise ConfigError(
            f"The model's own code fails before it serves ({place}): "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error


def _may_pass(error: BaseException) -> bool:
    """Tell whether a rank may serve in the next epoch all the same.

    MLX tells of lost peers, of devices and of memory by RuntimeError itself, wherever arrays are
    evaluated.
    """
    from_system = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
    return type(error) is RuntimeError or from_system or failure_cause(error) == "memory"


def _place(error: BaseException) -> str | None:
    """Return file and line of the innermost call of a model's own code.

    Returns:
        None if it has no part in the error, or what it called of ours fails.
    """
    place = None
    module = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__"))
        if module == _MODEL_CODE:
            place = f"{Path(frame.f_code.co_filename).name}, line {line}"
        elif module.startswith("services."):
            place = None
    return place
