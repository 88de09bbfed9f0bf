"""Memory of GPUs that all ranks of one host read and write. CUDA only, through its driver.

Each rank allocates the same amount, and opens that of the others. It is not an array of MLX:
kernels get its addresses as numbers. It is freed when the process ends.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from services.rank_worker.device.cuda.driver import HANDLE_BYTES, LIBRARY, Driver
from services.rank_worker.peers.collectives import Collectives

_HOST_ID = Path("/proc/sys/kernel/random/boot_id")
_WORD_BYTES, _HOST_WORDS = 4, 4


class PeerMemory(NamedTuple):
    """The memory of all ranks, as this process addresses it."""

    rank: int
    """This rank."""
    addresses: tuple[int, ...]
    """Per rank."""


OpenPeerMemory = Callable[[int], tuple[PeerMemory | None, str]]
"""Takes a number of bytes; returns zeroed memory of this size on each rank, and ""; or None and the
reason. A collective."""


def open_peer_memory(
    world: Collectives, nbytes: int, library: str = LIBRARY
) -> tuple[PeerMemory | None, str]:
    """Allocate memory on each rank, and open that of the others. All ranks call it together.

    Each rank first writes its handle into its memory, by which the others find that they have
    opened the right one.

    Args:
        world: the ranks.
        nbytes: size of each rank's memory, at least 64.
        library: file name of CUDA's driver.

    Returns:
        The memory, zeroed on all ranks; or None, and why it cannot be used.
    """
    driver, own, handle, fault = _allocate(nbytes, library)
    answers = world.gather([not fault, *_words(_host_id()), *_words(handle)])
    if not all(has_memory for has_memory, *_ in answers):
        return None, fault or "another rank has no memory to share"
    if len({tuple(one[1 : 1 + _HOST_WORDS]) for one in answers}) > 1:
        return None, "the ranks run on several hosts"
    assert driver is not None
    addresses, fault = [own] * world.world_size, ""
    for rank, answer in enumerate(answers):
        if rank != world.rank and not fault:
            addresses[rank], fault = _open(driver, _bytes(answer[1 + _HOST_WORDS :]))
    if not world.all_agree(not fault):
        return None, fault or "another rank cannot open the others' memory"
    try:
        driver.clear(own, nbytes)
    except OSError as error:
        fault = str(error)
    # No rank uses the memory before all have cleared theirs.
    if not world.all_agree(not fault):
        return None, fault or "another rank cannot clear its memory"
    return PeerMemory(world.rank, tuple(addresses)), ""


def _allocate(nbytes: int, library: str) -> tuple[Driver | None, int, bytes, str]:
    """Return the driver, and the address and handle of memory that holds its handle; or a fault."""
    try:
        driver = Driver(library)
        address = driver.allocate(nbytes)
        handle = driver.handle_of(address)
        driver.write(address, handle)
    except OSError as error:
        return None, 0, bytes(HANDLE_BYTES), str(error)
    return driver, address, handle, ""


def _open(driver: Driver, handle: bytes) -> tuple[int, str]:
    """Return the address of the memory with a handle; or a fault."""
    try:
        address = driver.open(handle)
        found = driver.read(address, HANDLE_BYTES)
    except OSError as error:
        return 0, str(error)
    return address, "" if found == handle else "another rank's memory does not hold its handle"


def _host_id() -> bytes:
    """Return 16 bytes that differ between hosts and between starts of one; zeros if unknown."""
    try:
        return bytes.fromhex(_HOST_ID.read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


def _words(data: bytes) -> list[int]:
    """Return bytes as signed 32-bit numbers."""
    return [
        int.from_bytes(data[start : start + _WORD_BYTES], "little", signed=True)
        for start in range(0, len(data), _WORD_BYTES)
    ]


def _bytes(words: list[int]) -> bytes:
    return b"".join(word.to_bytes(_WORD_BYTES, "little", signed=True) for word in words)
