"""Entry points of a rank worker. Prepares the process and maps every error to an exit code.

`run` is a rank. A spare process calls `wait_as_spare` first: interpreter, imports and the BLAS are
most of the time from a rank's end to its successor's hello, and need no epoch. A loaded spare
process runs as a rank of the spare world, which waits for the end of the epoch before it.

MLX is imported inside functions only: the BLAS and the GPU must be chosen before.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable

from services.rank_worker.device import blas, description
from services.rank_worker.device.cuda import gpu_choice, variables
from services.rank_worker.device.description import Device
from services.rank_worker.joining import code_version, join
from services.rank_worker.model import lazy_mlx_lm
from services.rank_worker.peers.failure import failure_cause
from services.rank_worker.scheduler_link import SchedulerLink
from shared import limits, log
from shared.clock import Clock, SystemClock
from shared.configuration.settings import Config
from shared.errors import (
    ConfigError,
    LockstepError,
    RanksUnreachable,
    UnavailableError,
    UsageError,
    WorldLost,
)
from shared.log import Log
from shared.messages import JoinWorld, RankFailed
from shared.os import lifeline

_log = Log("rank_worker")

_FILES_CHANGED = "Lockstep's files have changed since this spare process has read them."


def run(config: Config, rank: int = -1, *, blas_library: str | None = None) -> int:
    """Run one rank for one epoch and return the exit code, which is never 0.

    Args:
        config: the settings.
        rank: this rank; -1: the scheduler assigns it.
        blas_library: what `wait_as_spare` has returned; None: this process was no spare.
    """
    return _run(config, rank, blas_library)


def run_as_loaded_spare(config: Config, rank: int, on_place_taken: Callable[[], object]) -> int:
    """Run one rank of the spare world, and of the epoch that follows; return as `run` does.

    Args:
        config: the settings.
        rank: whose place this process will take.
        on_place_taken: called in a thread when the process before this one has ended.

    Raises:
        UsageError: no supervisor has started this process.
    """
    _check_supervised()
    return _run(config, rank, None, on_place_taken)


def _run(
    config: Config,
    rank: int,
    blas_library: str | None,
    on_place_taken: Callable[[], object] | None = None,
) -> int:
    _set_up_process(config, rank)
    try:
        blas_used = _prepare_for_mlx(config) if blas_library is None else blas_library
        return _run_epoch(config, rank, SystemClock(), blas_used, on_place_taken)
    except LockstepError as error:
        _log.error("rank_failed", detail=str(error))
        return error.exit_code
    except Exception:  # noqa: BLE001 - top of the process
        _log.exception("rank_failed")
        return limits.EXIT_SOFTWARE


def wait_as_spare(config: Config, rank: int) -> str:
    """Import what a rank needs, then wait until the supervisor gives this process its place.

    Until then it holds no weights, no memory of the device, no port and no link.

    Args:
        config: the settings.
        rank: whose place this process will take.

    Returns:
        A description of the BLAS, for `run`.

    Raises:
        UsageError: no supervisor has started this process.
        WorldLost: Lockstep's files have changed meanwhile.
    """
    _check_supervised()
    _set_up_process(config, rank)
    build = code_version.build_id()
    blas_library = _prepare_for_mlx(config)
    # With CUDA an import of MLX and mlx-lm may already take memory of the GPU; and with NCCL the
    # order to join assigns the GPU, while MLX reads the visible GPUs on its import.
    if gpu_choice.count_gpus() is None:
        _import_all(config)
    lifeline.wait_for_turn()
    if code_version.build_id() != build:
        # The other ranks may run the new code; the supervisor starts a new process at once.
        raise WorldLost(_FILES_CHANGED)
    return blas_library


def _check_supervised() -> None:
    if not lifeline.is_held():
        raise UsageError("Spare processes of ranks are started by `lockstep up` only.")


def _set_up_process(config: Config, rank: int) -> None:
    _set_signal_handlers()
    lifeline.exit_with_parent()
    log.set_up(f"rank-{rank}" if rank >= 0 else "rank", config.log, config.log_directory)


def _prepare_for_mlx(config: Config) -> str:
    """Load the BLAS and choose the GPU, which must be done before MLX is imported.

    Returns:
        A description of the BLAS; "" if MLX uses its own.
    """
    blas_library = blas.preload() if config.rank_worker.blas == "auto" else ""
    if config.backend == "off":
        gpu_choice.show_one_gpu(os.environ, gpu_choice.count_gpus())
    variables.enlarge_caches(os.environ)
    variables.keep_compiled_kernels(os.environ)
    return blas_library


def _set_signal_handlers() -> None:
    """Exit at once on SIGTERM; ignore SIGINT under a supervisor, which handles it.

    Python's own handlers run in the main thread, which may be inside a collective that never
    returns.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN if lifeline.is_held() else signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run_epoch(
    config: Config,
    rank: int,
    clock: Clock,
    blas_library: str,
    on_place_taken: Callable[[], object] | None,
) -> int:
    is_unlaunched = join.launched_rank() is None
    port = (
        join.DataPort(config.world.data_host)
        if is_unlaunched and join.needs_data_port(config)
        else None
    )
    # With NCCL the order to join assigns the GPU, and CUDA reads its environment only once, so
    # another process describes the device.
    device = (
        description.describe_in_subprocess()
        if config.backend == "nccl" and port
        else _describe_device()
    )
    is_spare = on_place_taken is not None
    hello = join.hello(rank, port.address if port else "", device, is_spare=is_spare)
    link = SchedulerLink(config.rank_address, hello, clock, keys_dir=config.keys_dir)
    link.start()
    if on_place_taken is not None:
        waited_for = (link, hello.build, on_place_taken)
        threading.Thread(target=_take_place, args=waited_for, daemon=True).start()
    order = link.orders.get()
    if not isinstance(order, JoinWorld):
        raise TypeError(f"expected JoinWorld as the first order, got {type(order).__name__}")
    log.bind(rank=order.rank, epoch=order.epoch)
    try:
        if is_spare and code_version.build_id() != hello.build:
            # It would import the rest of the code from the new files.
            raise WorldLost(_FILES_CHANGED)
        with contextlib.ExitStack() as environment:
            if port is not None:
                environment.callback(port.release)
                port.allow_binding()
            environment.enter_context(join.world_environment(order, config.run_dir))
            if order.backend == "nccl":
                variables.encode_without_graphs(os.environ)
            # MLX is imported only now: it starts CUDA, which reads the visible GPUs only once.
            if not config.model.trust_remote_code:
                # Skips the parts of mlx-lm that only a model's own Python file may need.
                lazy_mlx_lm.import_mlx_lm()
            from services.rank_worker.worker import Worker  # noqa: PLC0415

            Worker(config, order, link, device, clock, blas_library).serve(environment.close)
    except (ConfigError, UnavailableError, RanksUnreachable) as error:
        # Not a bug: a traceback would hide the message.
        _log.error("rank_failed", detail=str(error))
        return _report_failure(link, order, error, str(error), error.exit_code)
    except LockstepError as error:
        _log.exception("rank_failed")
        return _report_failure(link, order, error, str(error), error.exit_code)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error in a step ends the epoch
        _log.exception("rank_failed")
        detail = f"{type(error).__name__}: {error}"
        return _report_failure(link, order, error, detail, limits.EXIT_WORLD_LOST)


def _take_place(link: SchedulerLink, build: str, on_place_taken: Callable[[], object]) -> None:
    """Wait until the supervisor gives this spare process its place; tell the scheduler.

    The process ends instead if Lockstep's files have changed and it has not served yet.
    """
    lifeline.wait_for_turn()
    if code_version.build_id() != build and not link.step_started:
        _log.error("rank_failed", detail=_FILES_CHANGED)
        link.exit(limits.EXIT_WORLD_LOST)
    link.take_place()
    try:
        on_place_taken()
    except LockstepError as error:
        _log.error("process_file_not_written", detail=str(error))


def _describe_device() -> Device:
    from services.rank_worker.device import hardware  # noqa: PLC0415 - imports MLX

    return hardware.describe_device()


def _report_failure(
    link: SchedulerLink, order: JoinWorld, error: BaseException, detail: str, exit_code: int
) -> int:
    """Send RankFailed to the scheduler and exit."""
    link.send(
        RankFailed(
            rank=order.rank,
            epoch=order.epoch,
            detail=detail[:4_000],
            permanent=isinstance(error, ConfigError),
            cause=failure_cause(error),
        )
    )
    link.exit(exit_code)
    return exit_code


def _import_all(config: Config) -> None:
    if not config.model.trust_remote_code:
        lazy_mlx_lm.import_mlx_lm()
    # Not at a low priority: an unprivileged process cannot raise it again for its turn.
    import services.rank_worker.worker  # noqa: F401, PLC0415 - imports MLX
