"""Memory of GPUs that all ranks of one host read and write. CUDA only, through its driver.

Each rank allocates the same amount, and opens that of the others. It is not an array of MLX:
kernels get its addresses as numbers. It is freed when the process ends.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from services.rank_worker.peers.collectives import Collectives

_DRIVER = "libcuda.so.1"
_HANDLE_BYTES = 64
_OPEN_WITH_PEER_ACCESS = 1
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


class _Handle(ctypes.Structure):
    """What another process needs to open memory (CUipcMemHandle)."""

    _fields_ = [("data", ctypes.c_ubyte * _HANDLE_BYTES)]


class _CudaDriver:
    """The calls of CUDA's driver that share memory, on this process's first visible GPU."""

    def __init__(self, library: str) -> None:
        """Use the context that MLX uses too.

        Args:
            library: file name of the driver.

        Raises:
            OSError: there is no driver, or a call fails.
        """
        self._library = ctypes.CDLL(library)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory. Raises OSError, as all methods do."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def handle_of(self, address: int) -> bytes:
        """Return the 64 bytes with which another process opens memory."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.data)

    def open(self, handle: bytes) -> int:
        """Return the address here of another process's memory, given its handle."""
        address, given = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, _OPEN_WITH_PEER_ACCESS)
        return address.value

    def write(self, address: int, data: bytes) -> None:
        """Copy bytes to memory."""
        size = ctypes.c_size_t(len(data))
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_char_p(data), size)

    def read(self, address: int, count: int) -> bytes:
        """Return the first bytes of memory."""
        data = ctypes.create_string_buffer(count)
        self._call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(count))
        return data.raw

    def clear(self, address: int, nbytes: int) -> None:
        """Set memory to zero, and wait until it is."""
        size = ctypes.c_size_t(nbytes)
        self._call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(0), size)
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *args: Any) -> None:
        try:
            status = getattr(self._library, name)(*args)
        except AttributeError as error:
            raise OSError(f"the driver has no {name}") from error
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise OSError(f"{name} failed ({(text.value or b'').decode() or status})")


def open_peer_memory(
    world: Collectives, nbytes: int, library: str = _DRIVER
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


def _allocate(nbytes: int, library: str) -> tuple[_CudaDriver | None, int, bytes, str]:
    """Return the driver, and the address and handle of memory that holds its handle; or a fault."""
    try:
        driver = _CudaDriver(library)
        address = driver.allocate(nbytes)
        handle = driver.handle_of(address)
        driver.write(address, handle)
    except OSError as error:
        return None, 0, bytes(_HANDLE_BYTES), str(error)
    return driver, address, handle, ""


def _open(driver: _CudaDriver, handle: bytes) -> tuple[int, str]:
    """Return the address of the memory with a handle; or a fault."""
    try:
        address = driver.open(handle)
        found = driver.read(address, _HANDLE_BYTES)
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
