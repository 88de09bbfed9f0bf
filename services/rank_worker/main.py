"""The shell of a rank worker: prepares the process, and turns every failure into its end.

MLX is imported inside `run` only: the BLAS and a GPU must be chosen before.
"""

import contextlib
import os
import signal

import msgspec

from services.rank_worker.device import blas, cuda_caches, description, gpu_choice
from services.rank_worker.device.description import Device
from services.rank_worker.failure import failure_cause
from services.rank_worker.joining import join
from services.rank_worker.model import lazy_mlx_lm
from services.rank_worker.scheduler_link import SchedulerLink
from shared import limits, log
from shared.clock import Clock, SystemClock
from shared.configuration.settings import Config
from shared.errors import ConfigError, LockstepError, RanksUnreachable, UnavailableError
from shared.log import Log
from shared.messages import JoinWorld, RankFailed
from shared.os import fast_synch, lifeline

_log = Log("rank_worker")


def run(config: Config, rank: int = -1) -> int:
    """Be one rank of one epoch; the process ends with the epoch, never with 0.

    Args:
        config: the settings.
        rank: which rank to be; -1: the one that the scheduler says.
    """
    _prepare_signals()
    lifeline.exit_with_parent()
    log.set_up("rank_worker", config.log)
    try:
        return _work(config, rank, SystemClock())
    except LockstepError as error:
        _log.error("rank_failed", detail=str(error))
        return error.exit_code
    except Exception:  # noqa: BLE001 - the top of the shell
        _log.exception("rank_failed")
        return limits.EXIT_SOFTWARE


def _prepare_signals() -> None:
    """End at once on SIGTERM; leave Ctrl-C to the supervisor where there is one.

    Python's own handlers wait for the main thread, which may be inside a collective for ever.
    """
    is_supervised = lifeline.VARIABLE in os.environ
    signal.signal(signal.SIGINT, signal.SIG_IGN if is_supervised else signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _work(config: Config, rank: int, clock: Clock) -> int:
    library = blas.preload() if config.rank_worker.blas == "auto" else ""
    if config.backend == "off":
        gpu_choice.see_one_gpu(os.environ, gpu_choice.count_here())
    cuda_caches.make_room(os.environ)
    is_free = join.launched_rank() is None
    port = join.DataPort(config.world.data_host) if is_free and join.needs_port(config) else None
    # With NCCL the order to join says which GPU is this rank's, and CUDA looks only once.
    here = description.look_elsewhere() if config.backend == "nccl" and port else _look()
    hello = join.hello(
        rank,
        port.address if port else "",
        device=f"{here.kind} {here.name}".strip(),
        memory_bytes=here.memory_bytes,
        mlx_version=fast_synch.mlx_version(),
    )
    proven = fast_synch.proof_state(
        fast_synch.proof_file(), fast_synch.platform_build(here.kind, here.name)
    )
    hello = msgspec.structs.replace(hello, fast_synch=proven)
    link = SchedulerLink(config.rank_address, hello, clock, keys_dir=config.keys_dir)
    link.start()
    order = link.orders.get()
    if not isinstance(order, JoinWorld):
        raise TypeError(f"expected JoinWorld as the first order, got {type(order).__name__}")
    try:
        with contextlib.ExitStack() as environment:
            if port is not None:
                environment.callback(port.release)
                port.lend()
            environment.enter_context(join.applied(order, config.run_dir))
            # First here: importing MLX starts CUDA, which looks only once which GPUs it may see.
            if not config.model.trust_remote_code:
                # A model's own code may import what it likes of mlx-lm.
                lazy_mlx_lm.import_mlx_lm()
            from services.rank_worker import worker  # noqa: PLC0415

            joined = environment.close
            worker.serve(config, order, link, joined, here=here, clock=clock, blas=library)
    except ConfigError as error:
        _log.error("rank_failed", detail=str(error))
        return _fail(link, order, error, str(error), error.exit_code)
    except (UnavailableError, RanksUnreachable) as error:
        # Nothing here is broken: a traceback would hide the sentence.
        _log.error("rank_failed", detail=str(error))
        return _fail(link, order, error, str(error), error.exit_code)
    except LockstepError as error:
        _log.exception("rank_failed")
        return _fail(link, order, error, str(error), error.exit_code)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error in a step ends the epoch
        _log.exception("rank_failed")
        detail = f"{type(error).__name__}: {error}"
        return _fail(link, order, error, detail, limits.EXIT_WORLD_LOST)


def _look() -> Device:
    from services.rank_worker.device import hardware  # noqa: PLC0415 - imports MLX

    return hardware.look()


def _fail(
    link: SchedulerLink, order: JoinWorld, error: BaseException, detail: str, exit_code: int
) -> int:
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
