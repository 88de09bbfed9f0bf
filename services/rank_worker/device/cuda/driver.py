"""CUDA's driver: memory that ranks share, and page-locked memory of the host. No MLX.

MLX contains the CUDA runtime, but does not export it. The driver is a library of the system.
"""

import ctypes
from typing import Any

from services.rank_worker.device.cuda.library import declare

LIBRARY = "libcuda.so.1"
"""File name of the driver."""
HANDLE_BYTES = 64
"""Size of a handle, by which another process finds memory."""
_OPEN_WITH_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""
_FOR_ALL_CONTEXTS = 1
"""CU_MEMHOSTALLOC_PORTABLE."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("data", ctypes.c_ubyte * HANDLE_BYTES)]


_ADDRESS = ctypes.c_uint64
"""CUdeviceptr."""
_FUNCTIONS: dict[str, list[Any]] = {
    "cuInit": [ctypes.c_uint],
    "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int],
    "cuCtxSetCurrent": [ctypes.c_void_p],
    "cuCtxSynchronize": [],
    "cuMemAlloc_v2": [ctypes.POINTER(_ADDRESS), ctypes.c_size_t],
    "cuMemsetD8_v2": [_ADDRESS, ctypes.c_ubyte, ctypes.c_size_t],
    "cuMemcpyHtoD_v2": [_ADDRESS, ctypes.c_void_p, ctypes.c_size_t],
    "cuMemcpyDtoH_v2": [ctypes.c_void_p, _ADDRESS, ctypes.c_size_t],
    "cuIpcGetMemHandle": [ctypes.POINTER(_Handle), _ADDRESS],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(_ADDRESS), _Handle, ctypes.c_uint],
    "cuMemHostAlloc": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_uint],
    "cuMemFreeHost": [ctypes.c_void_p],
}


class Driver:
    """Allocates memory in the context that MLX uses, on this process's first visible GPU.

    A context is current in one thread, so a thread calls only the drivers that it has opened.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        """Open the driver, and make the context current in this thread.

        Args:
            library: file name of the driver.

        Raises:
            OSError: there is no driver, or a call fails. The methods raise it too.
        """
        self._calls = ctypes.CDLL(library)
        declare(self._calls, _FUNCTIONS, self._describe)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._calls.cuInit(0)
        self._calls.cuDeviceGet(ctypes.byref(device), 0)
        # MLX uses the primary context of a device.
        self._calls.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        self._calls.cuCtxSetCurrent(context)

    def allocate(self, size_bytes: int) -> int:
        """Return the address of new memory of the GPU."""
        address = _ADDRESS()
        self._calls.cuMemAlloc_v2(ctypes.byref(address), size_bytes)
        return address.value

    def clear(self, address: int, size_bytes: int) -> None:
        """Set memory of the GPU to zero, and wait until it is."""
        self._calls.cuMemsetD8_v2(address, 0, size_bytes)
        self._calls.cuCtxSynchronize()

    def write(self, address: int, data: bytes) -> None:
        """Copy bytes to memory of the GPU."""
        self._calls.cuMemcpyHtoD_v2(address, data, len(data))

    def read(self, address: int, size_bytes: int) -> bytes:
        """Return the first bytes of memory of the GPU."""
        data = ctypes.create_string_buffer(size_bytes)
        self._calls.cuMemcpyDtoH_v2(data, address, size_bytes)
        return data.raw

    def handle_of(self, address: int) -> bytes:
        """Return the `HANDLE_BYTES` with which another process opens memory of the GPU."""
        handle = _Handle()
        self._calls.cuIpcGetMemHandle(ctypes.byref(handle), address)
        return bytes(handle.data)

    def open(self, handle: bytes) -> int:
        """Return the address here of another process's memory, given its handle."""
        address, given = _ADDRESS(), _Handle.from_buffer_copy(handle)
        self._calls.cuIpcOpenMemHandle_v2(ctypes.byref(address), given, _OPEN_WITH_PEER_ACCESS)
        return address.value

    def allocate_page_locked(self, size_bytes: int) -> int:
        """Return the address of new memory of the host that the GPU can write to."""
        address = ctypes.c_void_p()
        self._calls.cuMemHostAlloc(ctypes.byref(address), size_bytes, _FOR_ALL_CONTEXTS)
        assert address.value is not None
        return address.value

    def free_page_locked(self, address: int) -> None:
        """Free memory of the host that `allocate_page_locked` has returned."""
        self._calls.cuMemFreeHost(address)

    def _describe(self, code: int) -> str:
        """Return CUDA's name and text for an error code; the number if CUDA has no words for it."""
        words = []
        for function in (self._calls.cuGetErrorName, self._calls.cuGetErrorString):
            function.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
            text = ctypes.c_char_p()
            function(code, ctypes.byref(text))
            words.append((text.value or b"").decode())
        return ": ".join(filter(None, words)) or str(code)
