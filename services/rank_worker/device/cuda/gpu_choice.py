"""Chooses the GPU of a rank. Must run before MLX starts CUDA, so it imports no MLX."""

import re
from collections.abc import MutableMapping
from pathlib import Path

from shared.errors import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"

_DEVICE_FILE = re.compile(r"nvidia\d+")


def count_gpus(folder: Path = Path("/dev")) -> int | None:
    """Return the number of NVIDIA GPUs of this machine or container; None when unknown."""
    if not folder.is_dir():
        return None
    found = sum(1 for path in folder.iterdir() if _DEVICE_FILE.fullmatch(path.name))
    return found or None


def show_one_gpu(environment: MutableMapping[str, str], count: int | None) -> None:
    """Make only the first GPU visible to a single rank, unless the variable is set already.

    MLX uses only that one, and with two visible GPUs MLX 0.32 sometimes fails to copy from the host
    (`cudaMemcpy ... invalid argument`).

    Args:
        environment: variables of this process.
        count: result of `count_gpus`.
    """
    if count is not None and count > 1:
        environment.setdefault(VARIABLE, "0")


def own_gpu(place: int, visible: str | None, count: int | None) -> str:
    """Return the value of `CUDA_VISIBLE_DEVICES` for one rank.

    Args:
        place: number of ranks before this one on its host.
        visible: the variable's present value; None when it is not set.
        count: result of `count_gpus`.

    Raises:
        ConfigError: when there are more ranks than GPUs.
    """
    needed = "the backend nccl needs one per rank"
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        if place >= len(names):
            raise ConfigError(
                f"This is rank number {place + 1} on its host, but {VARIABLE} is {visible!r}, so "
                f"there {_are(len(names))}: {needed}. List all GPUs, or leave the variable unset."
            )
        return names[place]
    if count is not None and place >= count:
        raise ConfigError(
            f"This is rank number {place + 1} on its host, but there {_are(count)}: {needed}. "
            "Lower world.size (--ranks), or spread the ranks over more hosts."
        )
    return str(place)


def _are(count: int) -> str:
    return "is 1 GPU" if count == 1 else f"are {count} GPUs"
