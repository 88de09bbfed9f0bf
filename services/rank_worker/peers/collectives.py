"""Collectives of a rank. The only module that calls `mlx.core.distributed`.

Except while a rank loads, collectives run only as part of a step plan (ARCHITECTURE.md, I3).
"""

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np

from services.rank_worker.peers.failure import shows_ended_peer
from shared.configuration.device_matrix import DEVICE_QUEUE_PAIRS_MAX, DEVICE_REGIONS_MAX
from shared.errors import ConfigError, PeerEnded, WorldLost
from shared.messages.rank_link import Backend

_ERROR_NUMBER = re.compile(r"\(error: (\d+)\)|errno=?\s*(\d+)")

_NO_RDMA_RESOURCES = re.compile(
    r"\[jaccl\] (Register memory region failed"
    r"|Couldn't (allocate protection domain|create queue pair|create completion queue))"
)
"""MLX's messages when an RDMA device has nothing left to give."""


_COLLECTIVES = (
    "all_sum",
    "all_max",
    "all_min",
    "all_gather",
    "sum_scatter",
    "send",
    "recv",
    "recv_like",
)


class Collectives:
    """The sums and exchanges that a rank does together with all other ranks of its world."""

    def __init__(self, group: mx.distributed.Group | None, rank: int, world_size: int) -> None:
        self.group = group
        """MLX group for `model.shard`; None with one rank."""
        self.rank = rank
        self.world_size = world_size
        """Number of ranks."""

    def sum_ids(self, ids: mx.array) -> mx.array:
        """Sum ids over all ranks, as part of the graph.

        Args:
            ids: int32 of any shape. Shape, dtype and place in the graph must be equal on all ranks.

        Returns:
            The sum, with the shape and dtype of `ids`.
        """
        return ids if self.group is None else mx.distributed.all_sum(ids, group=self.group)

    def sum_over_ranks(self, array: mx.array) -> mx.array:
        """Sum activations over all ranks, as part of the graph of a forward.

        Args:
            array: any shape and dtype. Shape, dtype and place in the graph must be equal on all
                ranks.

        Returns:
            The sum, with the shape and dtype of `array`.
        """
        return array if self.group is None else sum_in_group(array, self.group)

    def gather_arrays(self, array: mx.array) -> mx.array:
        """Return the arrays of all ranks behind one another, as part of the graph of a step.

        Args:
            array: [n] of any dtype. Shape, dtype and place in the graph must be equal on all ranks.

        Returns:
            [N n] for N ranks, in rank order.
        """
        return array if self.group is None else mx.distributed.all_gather(array, group=self.group)

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every rank, one list per rank in rank order; waits for all ranks.

        For use while loading only.

        Args:
            values: this rank's 32-bit integers, the same number of them on every rank.
        """
        rows = np.zeros((self.world_size, len(values)), dtype=np.int32)
        rows[self.rank] = values
        gathered = np.array(self.sum_ids(mx.array(rows)))
        return [[int(value) for value in row] for row in gathered]

    def all_agree(self, holds: bool) -> bool:
        """Tell whether a statement holds on all ranks; for use while loading only."""
        return all(row[0] for row in self.gather([int(holds)]))

    def check(self) -> None:
        """Sum 1, the rank and its square over all ranks, and compare with the known sums.

        Returns when all ranks have called it.

        Raises:
            PeerEnded: another rank has ended.
            WorldLost: a sum differs from the known one.
        """
        if self.group is None:
            return
        summands = mx.array([1, self.rank, self.rank * self.rank], dtype=mx.int32)
        try:
            total = mx.distributed.all_sum(summands, group=self.group)
            mx.eval(total)
        except RuntimeError as error:
            if shows_ended_peer(str(error)):
                raise PeerEnded(f"A peer ended before the first collective: {error}.") from error
            raise WorldLost(f"The first collective failed: {error}.") from error
        n = self.world_size
        expected = [n, n * (n - 1) // 2, n * (n - 1) * (2 * n - 1) // 6]
        if total.tolist() != expected:
            raise WorldLost(
                f"The first collective returned {total.tolist()} instead of {expected}: the links "
                "between the ranks are faulty."
            )


def sum_in_group(array: mx.array, group: mx.distributed.Group) -> mx.array:
    """Sum activations over the ranks of a group, as part of the graph of a forward.

    Args:
        array: any shape and dtype. Shape, dtype and place in the graph must be equal on all ranks.
        group: of a module that mlx-lm has divided.

    Returns:
        The sum, with the shape and dtype of `array`.
    """
    return mx.distributed.all_sum(array, group=group)


@contextlib.contextmanager
def observed(observe: Callable[..., Any]) -> Iterator[None]:
    """Pass every collective that is called within the block through a function.

    mlx-lm's and MLX's layers call collectives themselves, so MLX's own functions are replaced.

    Args:
        observe: called as `observe(name, function, *args, **kwargs)`; returns the function's
            result.
    """
    originals = {name: getattr(mx.distributed, name) for name in _COLLECTIVES}
    for name, original in originals.items():
        setattr(mx.distributed, name, functools.partial(observe, name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(mx.distributed, name, original)


def init(backend: Backend, rank: int, world_size: int) -> Collectives:
    """Join the world that the environment describes. Waits for all ranks, without a deadline.

    Args:
        backend: MLX's backend for collectives; "off": a world of one rank, which joins nothing.
        rank: the rank that the scheduler ordered.
        world_size: the number of ranks that it ordered.

    Raises:
        ConfigError: MLX on this machine lacks the backend.
        PeerEnded: another rank has ended or does not answer.
        WorldLost: MLX cannot join, or it joined with another rank or number of ranks than ordered.
    """
    if backend == "off":
        return Collectives(None, rank, world_size)
    if not mx.distributed.is_available(backend):
        if backend == "jaccl":
            # Not a ConfigError: world.jaccl_fallback may change the backend to ring.
            raise WorldLost(
                "MLX finds no RDMA on this machine, but jaccl needs it: use macOS 26.2 or later on "
                "a Mac with Thunderbolt 5, and run `rdma_ctl enable` once in its recovery system."
            )
        raise ConfigError(
            f"MLX on this machine has no {backend}: set world.backend to ring, or install MLX for "
            "CUDA (the extra `cuda13`)."
        )
    try:
        group = mx.distributed.init(strict=True, backend=backend)
    except (RuntimeError, ValueError) as error:
        _refuse_init(backend, str(error).rstrip("."))
    if (group.rank(), group.size()) != (rank, world_size):
        raise WorldLost(
            f"The scheduler ordered rank {rank} of {world_size}, "
            f"but MLX joined as rank {group.rank()} of {group.size()}."
        )
    return Collectives(group, rank, world_size)


def _refuse_init(backend: Backend, text: str) -> NoReturn:
    """Raise the error for a message of MLX's init."""
    if "Couldn't connect" in text:
        raise PeerEnded(
            f"Joining the world over {backend} failed: a peer did not answer while joining "
            f"({_name_error_numbers(text)})."
        )
    if shows_ended_peer(text):
        # The number is of an earlier system call: at the end of a connection none is set.
        said = _ERROR_NUMBER.sub("", text).replace(" with ", " ").strip()
        raise PeerEnded(
            f"Joining the world over {backend} failed: a peer ended while joining, and its own "
            f"report says why ({said})."
        )
    if _NO_RDMA_RESOURCES.search(text):
        raise WorldLost(
            f"Joining the world over {backend} failed: {text}. An RDMA device has "
            f"{DEVICE_QUEUE_PAIRS_MAX} queue pairs and {DEVICE_REGIONS_MAX} memory regions, and "
            "another process may hold them: end it, or restart this machine; `lockstep doctor` "
            "counts what a world needs."
        )
    raise WorldLost(f"Joining the world over {backend} failed: {_name_error_numbers(text)}.")


def _name_error_numbers(text: str) -> str:
    """Replace error numbers in MLX's message by their names."""
    return _ERROR_NUMBER.sub(lambda match: f"({os.strerror(int(match[1] or match[2]))})", text)
