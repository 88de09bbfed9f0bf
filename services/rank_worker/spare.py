"""A spare process of a rank: has imported everything, and waits for the place of one that ended.

Interpreter, imports and the BLAS are most of the time from a rank's end to its successor's hello.
None of them needs an epoch, so the supervisor has them done in advance. A spare holds no weights,
no memory of the device, no port and no file in the run folder.
"""

import contextlib
import os
import sys
import threading

from services.rank_worker import main
from services.rank_worker.joining import code_version
from services.rank_worker.model import lazy_mlx_lm
from shared.configuration.settings import Config
from shared.errors import UsageError, WorldLost
from shared.os import lifeline

_LOW_PRIORITY = 10
"""Nice value of the imports: a rank that serves on the same core gets nine tenths of it."""


def wait_for_turn(config: Config, rank: int) -> str:
    """Import what a rank needs, then wait until the supervisor gives this process its place.

    Args:
        config: the settings.
        rank: whose place this process will take.

    Returns:
        A description of the BLAS, as `main.prepare_for_mlx`.

    Raises:
        UsageError: no supervisor has started this process.
    """
    if not lifeline.is_held():
        raise UsageError("Spare processes of ranks are started by `lockstep up` only.")
    main.set_up_process(config, rank)
    build = code_version.build_id()
    blas_library = main.prepare_for_mlx(config)
    # With NCCL the order to join assigns the GPU, and MLX reads the visible GPUs on its import.
    if config.backend != "nccl":
        _import_all(config)
    lifeline.wait_for_turn()
    if code_version.build_id() != build:
        # The other ranks may run the new code; the supervisor starts a new process at once.
        raise WorldLost("Lockstep's files have changed since this spare process has read them.")
    return blas_library


def _import_all(config: Config) -> None:
    """Import MLX, mlx-lm and the worker; ranks that serve meanwhile have precedence."""
    import mlx.core  # noqa: F401, PLC0415

    # A process cannot raise its priority again, but it can have a thread with a lower one. MLX
    # itself is imported above, because the objects of its main thread belong to this one.
    thread = threading.Thread(target=_import_rest, args=(config,), name="imports")
    thread.start()
    thread.join()


def _import_rest(config: Config) -> None:
    _lower_priority()
    if not config.model.trust_remote_code:
        lazy_mlx_lm.import_mlx_lm()
    import services.rank_worker.worker  # noqa: F401, PLC0415 - imports mlx-lm


def _lower_priority() -> None:
    """Give this thread a low priority. Threads that it starts inherit it."""
    with contextlib.suppress(OSError):
        if sys.platform == "darwin":
            os.setpriority(os.PRIO_DARWIN_THREAD, 0, os.PRIO_DARWIN_BG)
        elif sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
