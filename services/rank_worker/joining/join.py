"""A rank's hello, its data port, and the environment variables of the world that it joins."""

import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from services.rank_worker.device.cuda import gpu_choice
from services.rank_worker.device.description import Device
from services.rank_worker.joining import code_version
from shared.configuration.settings import Config
from shared.errors import ConfigError, WorldLost
from shared.log import Log
from shared.messages import JoinWorld, RankHello
from shared.os import fast_synch, run_folder

_log = Log("rank_worker.join")

RANK_VARIABLE = "MLX_RANK"
"""Set by MLX's launchers, which then set the whole environment; it is not changed."""

_WORLD_VARIABLES = (
    *("MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR", "MLX_JACCL_RING"),
    *("JACCL_RANK", "JACCL_IBV_DEVICES", "JACCL_COORDINATOR", "JACCL_RING"),
    *("MLX_WORLD_SIZE", "NCCL_HOST_IP", "NCCL_PORT", "MLX_METAL_FAST_SYNCH"),
)
"""Variables that would override the ordered world. JACCL's names take precedence over MLX's."""


def launched_rank() -> int | None:
    """Return the rank that a launcher such as mlx.launch gave this process; None without one.

    Raises:
        ConfigError: when the environment variable `RANK_VARIABLE` is not a number.
    """
    text = os.environ.get(RANK_VARIABLE)
    if text is None:
        return None
    if not text.isdigit():
        raise ConfigError(f"The environment variable {RANK_VARIABLE} is {text!r}, not a rank.")
    return int(text)


def needs_data_port(config: Config) -> bool:
    """Tell whether collectives may use a data port of this rank, now or in a later epoch.

    With jaccl the scheduler may fall back to ring after a rank has sent its address.
    """
    if config.backend == "jaccl":
        return config.world.jaccl_fallback == "ring"
    return config.backend in ("ring", "nccl")


class DataPort:
    """A TCP port for this rank's collectives, held by a bound socket until MLX binds it."""

    def __init__(self, host: str) -> None:
        """Reserve a free port.

        Args:
            host: IPv4 address or name of this machine that the other ranks reach.

        Raises:
            ConfigError: when this machine has no such address.
        """
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # Bound but not listening, so that no other process gets the port and MLX can bind it.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, 0))
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"Cannot use world.data_host {host} on this machine ({error.strerror}): set it to "
                "an address of this machine that the others can reach."
            ) from None
        self.address = f"{host}:{self._socket.getsockname()[1]}"

    def allow_binding(self) -> None:
        """Let the rendezvous and MLX bind the port; to be called before a world is joined.

        On Linux the reservation is kept, because importing MLX takes half a second, in which
        another rank of this machine could be given the port.
        """
        if sys.platform != "linux":
            # Elsewhere connections could reach this socket instead of MLX's.
            self.release()

    def release(self) -> None:
        """Close the socket that reserves the port. May be called more than once."""
        self._socket.close()


def hello(rank: int, data_address: str, device: Device, *, is_spare: bool = False) -> RankHello:
    """Return this process's first message to the scheduler.

    Args:
        rank: the configured rank; -1: the scheduler assigns one. A launcher's rank takes
            precedence.
        data_address: host:port for collectives; not sent for a launched rank.
        device: the rank's device.
        is_spare: the rank's own process still runs.

    Raises:
        ConfigError: the launcher's rank is not a number.
    """
    launched = launched_rank()
    build = fast_synch.platform_build(device.kind, device.name)
    return RankHello(
        rank=rank if launched is None else launched,
        host=socket.gethostname(),
        pid=os.getpid(),
        data_address="" if launched is not None else data_address,
        launched=launched is not None,
        device=f"{device.kind} {device.name}".strip(),
        mlx_version=fast_synch.mlx_version(),
        build=code_version.build_id(),
        memory_bytes=device.memory_bytes,
        spare=is_spare,
        fast_synch=fast_synch.proof_state(fast_synch.proof_file(), build) if build else "unproven",
    )


@contextlib.contextmanager
def world_environment(order: JoinWorld, run_dir: Path) -> Iterator[None]:
    """Set the world's environment variables, and create the files that they name.

    The variables stay set. The files are private and are removed at the end of the block.

    Args:
        order: the order to join.
        run_dir: folder for the files. Files of processes that were killed are removed.

    Raises:
        WorldLost: when a launcher gave this process another rank.
        ConfigError: when there is no GPU for this rank, or the folder cannot be used.
    """
    launched = launched_rank()
    if launched is not None and order.backend != "off":
        if launched != order.rank:
            raise WorldLost(f"This process was launched as rank {launched}, not {order.rank}.")
        yield
        return
    _set_variables(order)
    name = f"world-of-rank-{order.rank}-"
    run_folder.prepare(run_dir)
    for stale in run_dir.glob(f"{name}*"):
        if not _is_alive(stale.name.removeprefix(name)):
            _remove(stale)
    folder = run_dir / f"{name}{os.getpid()}"
    _remove(folder)
    folder.mkdir(mode=0o700)
    try:
        for name, content in order.files.items():
            path = folder / name
            path.touch(mode=0o600)
            path.write_text(content)
            os.environ[name] = str(path)
        yield
    finally:
        _remove(folder)


def _is_alive(pid: str) -> bool:
    """Tell whether a process runs. Another world may use the same folder."""
    try:
        return bool(psutil.pid_exists(int(pid)))
    except (ValueError, OverflowError):
        return False


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _set_variables(order: JoinWorld) -> None:
    """Set the order's variables, and delete inherited variables of another world."""
    variables = dict(order.environment)
    if place := variables.get(gpu_choice.VARIABLE):
        visible = os.environ.get(gpu_choice.VARIABLE)
        variables[gpu_choice.VARIABLE] = gpu_choice.own_gpu(
            int(place), visible, gpu_choice.count_gpus()
        )
    if order.backend != "off":
        stale = [name for name in _WORLD_VARIABLES if name in os.environ and name not in variables]
        for name in stale:
            del os.environ[name]
        if stale:
            _log.warning("variables_ignored", names=",".join(stale))
    os.environ.update(variables)
