"""Classification of the errors that end a rank. Does not end it; `main` does."""

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
    PeerEnded,
    RanksUnreachable,
    UnavailableError,
)
from shared.log import Log

_log = Log("rank_worker")

FailureCause = Literal["error", "memory", "unavailable", "canary", "peer"]

_OUT_OF_MEMORY_MESSAGE = re.compile(
    r"out ?of ?memory|insufficient memory|unable to allocate|std::bad_alloc"
    r"|\[(metal::)?malloc(_or_wait)?\]",
    re.IGNORECASE,
)
"""Messages of MLX: "[metal::malloc] ...", "[malloc] Unable to allocate n bytes.", Metal's
"Insufficient Memory (...ErrorOutOfMemory)", CUDA's "cudaMallocAsync(...) failed: out of memory"."""

_PEER_ENDED_MESSAGE = re.compile(
    r"\[(jaccl|ring)\] (Recv failed(?! with error code)|Send failed with errno|Accept failed"
    r"|Couldn't connect|connection to a peer was lost)"
)
"""MLX's messages about a connection that another rank has closed or does not accept. "error code"
is the rank's own RDMA device."""

_MODEL_CODE = "custom_model"
"""Module name under which mlx-lm imports a model's own Python file."""


def failure_cause(error: BaseException) -> FailureCause:
    """Classify the error that ends this rank, for the scheduler's decision about the next epoch.

    Returns:
        "memory": host or device memory is exhausted; "canary": a canary check failed;
        "unavailable": a service or rank cannot be reached; "peer": another rank has ended, and only
        that one knows why; "error": everything else.
    """
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY_MESSAGE.search(str(error)):
        return "memory"
    if isinstance(error, CanaryFailed):
        return "canary"
    if isinstance(error, PeerEnded) or shows_ended_peer(str(error)):
        return "peer"
    # A network that is not up yet is retried like a service.
    return "unavailable" if isinstance(error, UnavailableError | RanksUnreachable) else "error"


def shows_ended_peer(text: str) -> bool:
    """Tell whether an error message of MLX is about a rank that has ended or does not answer."""
    return _PEER_ENDED_MESSAGE.search(text) is not None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 500 characters; "" if it has none."""
    return next(iter(str(error).strip().splitlines()), "")[:500]


@contextlib.contextmanager
def name_model_code_line() -> Iterator[None]:
    """Turn an error of the model's own Python file in this block into one that names file and line.

    Errors of Lockstep, and those that may not occur again (memory, lost peers), pass unchanged.

    Raises:
        ConfigError: the file raised, and would raise again in the next epoch.
    """
    try:
        yield
    except LockstepError:
        raise
    except (Exception, SystemExit) as error:
        location = _model_code_location(error)
        if location is None:
            raise
        if _is_transient(error):
            _log.error("model_code_failed", location=location)
            raise
        _log.debug("model_code_failed", traceback=traceback.format_exc())
        raise ConfigError(
            f"The model's own Python file raises an error before the rank is ready ({location}); "
            "correct the file or use another model: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error


def _is_transient(error: BaseException) -> bool:
    """Tell whether the rank may succeed in the next epoch.

    MLX raises a plain RuntimeError for lost peers, device errors and lack of memory.
    """
    from_system = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
    return type(error) is RuntimeError or from_system or failure_cause(error) == "memory"


def _model_code_location(error: BaseException) -> str | None:
    """Return file and line of the innermost call of a model's own Python file.

    Returns:
        None if the file has no part in the error, or if Lockstep code that it called raised.
    """
    location = None
    module = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__"))
        if module == _MODEL_CODE:
            location = f"{Path(frame.f_code.co_filename).name}, line {line}"
        elif module.startswith("services."):
            location = None
    return location
