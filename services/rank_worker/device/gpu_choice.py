"""Which GPU is a rank's own. No MLX, as CUDA looks only once."""

import re
from collections.abc import MutableMapping
from pathlib import Path

from shared.errors import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"

_DEVICE_FILE = re.compile(r"nvidia\d+")


def count_here(folder: Path = Path("/dev")) -> int | None:
    """Return how many NVIDIA GPUs this machine or container has; None where nobody can tell."""
    if not folder.is_dir():
        return None
    found = sum(1 for path in folder.iterdir() if _DEVICE_FILE.fullmatch(path.name))
    return found or None


def see_one_gpu(environment: MutableMapping[str, str], count: int | None) -> None:
    """Let a rank that is alone see the first GPU only, unless somebody has said which.

    It computes on that one anyway, and with two in sight MLX 0.32 now and then fails to copy what
    the host gives it (`cudaMemcpy ... invalid argument`).

    Args:
        environment: of this process.
        count: as `count_here` returns it.
    """
    if count is not None and count > 1:
        environment.setdefault(VARIABLE, "0")


def own_gpu(place: int, visible: str | None, count: int | None) -> str:
    """Return what `CUDA_VISIBLE_DEVICES` must be for one rank.

    Args:
        place: number of ranks before this one on its host.
        visible: what the variable is so far; None when nobody has set it.
        count: as `count_here` returns it.

    Raises:
        ConfigError: there are more ranks than GPUs.
    """
    needed = "the backend nccl needs one per rank"
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        if place >= len(names):
            raise ConfigError(
                f"This is rank number {place + 1} on its host, but {VARIABLE} is {visible!r}, so "
                f"there {_are(len(names))}: {needed}. Name them all, or leave the variable unset."
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
