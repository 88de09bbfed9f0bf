"""What a rank says before it belongs to a world, and how it takes on a world's environment."""

import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from services.rank_worker.device import gpu_choice
from shared.configuration.settings import Config
from shared.errors import ConfigError, WorldLost
from shared.log import Log
from shared.messages import JoinWorld, RankHello

_log = Log("rank_worker.join")

RANK_VARIABLE = "MLX_RANK"
"""Set by MLX's launchers; then the environment is theirs and stays as it is."""

_DECIDED = (
    *("MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR", "MLX_JACCL_RING"),
    *("JACCL_RANK", "JACCL_IBV_DEVICES", "JACCL_COORDINATOR", "JACCL_RING"),
    *("MLX_WORLD_SIZE", "NCCL_HOST_IP", "NCCL_PORT", "MLX_METAL_FAST_SYNCH"),
)
"""Variables that would change the world that is ordered. JACCL's own names win over MLX's."""


def launched_rank() -> int | None:
    """Return the rank that a launcher such as mlx.launch gave this process, or None.

    Raises:
        ConfigError: the variable holds no number.
    """
    text = os.environ.get(RANK_VARIABLE)
    if text is None:
        return None
    if not text.isdigit():
        raise ConfigError(f"The environment variable {RANK_VARIABLE} is {text!r}, not a rank.")
    return int(text)


def needs_port(config: Config) -> bool:
    """Tell whether collectives may run over a data address of this rank, now or in a later epoch.

    The scheduler may leave jaccl for ring, and a rank names its address before it knows.
    """
    if config.backend == "jaccl":
        return config.world.jaccl_fallback == "ring"
    return config.backend in ("ring", "nccl")


class DataPort:
    """A port of this machine for the rank's collectives, kept from others until MLX has it."""

    def __init__(self, host: str) -> None:
        """Reserve a free port.

        Raises:
            ConfigError: this machine has no such address.
        """
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # Bound but not listening, so that nobody gets it by chance and MLX can bind it at once.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, 0))
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"Cannot use world.data_host {host} on this machine ({error.strerror}): set it to "
                "an address that this machine has and the others reach."
            ) from None
        self.address = f"{host}:{self._socket.getsockname()[1]}"

    def lend(self) -> None:
        """Let the meeting and MLX bind the port too: a world is about to be joined.

        On Linux it is kept meanwhile. Importing MLX takes half a second, in which another rank of
        this machine that asks for any port could be given this one.
        """
        if sys.platform != "linux":
            # There a connection might find this socket, which takes none, in MLX's place.
            self.release()

    def release(self) -> None:
        """Keep the port no more: MLX has it. Twice is harmless."""
        self._socket.close()


def hello(
    rank: int, data_address: str, *, device: str, memory_bytes: int, mlx_version: str
) -> RankHello:
    """Say that this process is there; a launcher's rank goes before `rank`."""
    launched = launched_rank()
    return RankHello(
        rank=rank if launched is None else launched,
        host=socket.gethostname(),
        pid=os.getpid(),
        data_address="" if launched is not None else data_address,
        launched=launched is not None,
        device=device,
        mlx_version=mlx_version,
        memory_bytes=memory_bytes,
    )


@contextlib.contextmanager
def applied(order: JoinWorld, run_dir: Path) -> Iterator[None]:
    """Set the world's variables; files that they name are private and exist inside the block only.

    Args:
        order: the world.
        run_dir: for the files. Those of a process that was killed meanwhile are taken away.

    Raises:
        WorldLost: a launcher has made this process another rank than the order says.
        ConfigError: there is no GPU for this rank.
    """
    launched = launched_rank()
    if launched is not None and order.backend != "off":
        if launched != order.rank:
            raise WorldLost(f"This process was launched as rank {launched}, not {order.rank}.")
        yield
        return
    _take_on(order)
    name = f"world-of-rank-{order.rank}-"
    for left in run_dir.glob(f"{name}*"):
        if not _is_alive(left.name.removeprefix(name)):
            _remove(left)
    folder = run_dir / f"{name}{os.getpid()}"
    _remove(folder)
    folder.mkdir(mode=0o700, parents=True)
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
    """Tell whether a process may still read its files: another world may share the folder."""
    try:
        os.kill(int(pid), 0)
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _take_on(order: JoinWorld) -> None:
    """Set the order's variables, and take away what a shell has left of another world."""
    variables = dict(order.environment)
    if place := variables.get(gpu_choice.VARIABLE):
        visible = os.environ.get(gpu_choice.VARIABLE)
        variables[gpu_choice.VARIABLE] = gpu_choice.own_gpu(
            int(place), visible, gpu_choice.count_here()
        )
    if order.backend != "off":
        stale = [name for name in _DECIDED if name in os.environ and name not in variables]
        for name in stale:
            del os.environ[name]
        if stale:
            _log.warning("variables_left_aside", names=",".join(stale))
    os.environ.update(variables)
