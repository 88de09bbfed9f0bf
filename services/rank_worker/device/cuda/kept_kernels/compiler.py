"""NVIDIA's compiler of kernels (NVRTC), in the library that MLX has loaded for its own use."""

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.rank_worker.device.cuda.library import declare

_LIBRARIES = {"libnvrtc.so.13": "cu13", "libnvrtc.so.12": "cuda_runtime"}
"""Files of the library, and the folder of its version's headers in the packages named nvidia."""
_PROGRAM, _TEXT = ctypes.c_void_p, ctypes.c_char_p
_TEXTS = ctypes.POINTER(_TEXT)
_FUNCTIONS: dict[str, list[Any]] = {
    "nvrtcCreateProgram": [ctypes.POINTER(_PROGRAM), _TEXT, _TEXT, ctypes.c_int, _TEXTS, _TEXTS],
    "nvrtcDestroyProgram": [ctypes.POINTER(_PROGRAM)],
    "nvrtcAddNameExpression": [_PROGRAM, _TEXT],
    "nvrtcCompileProgram": [_PROGRAM, ctypes.c_int, _TEXTS],
    "nvrtcGetLoweredName": [_PROGRAM, _TEXT, _TEXTS],
    "nvrtcGetCUBINSize": [_PROGRAM, ctypes.POINTER(ctypes.c_size_t)],
    "nvrtcGetCUBIN": [_PROGRAM, _TEXT],
    "nvrtcGetProgramLogSize": [_PROGRAM, ctypes.POINTER(ctypes.c_size_t)],
    "nvrtcGetProgramLog": [_PROGRAM, _TEXT],
}
_CUDA_FOLDER = "/usr/local/cuda"
_FIRST_WITH_EXTENSIONS = 9
"""Major compute capability from which architectures with "a" in their name exist: their code may
use instructions that later GPUs lack."""


class DoesNotCompileError(Exception):
    """Raised when the compiler refuses a text; says why."""


class Compiler:
    """Compiles texts for one kind of GPU."""

    def __init__(
        self, library: ctypes.CDLL, version: tuple[int, int], headers: Sequence[Path]
    ) -> None:
        """Prepare.

        Args:
            library: NVRTC.
            version: major and minor compute capability of the GPU.
            headers: folders with CUDA's headers.

        Raises:
            OSError: the library lacks a function.
        """
        declare(library, _FUNCTIONS, self._describe)
        self._library = library
        major, minor = version
        suffix = "a" if major >= _FIRST_WITH_EXTENSIONS else ""
        self._options = [
            "--device-as-default-execution-space",
            f"--gpu-architecture=sm_{major}{minor}{suffix}",
            *(f"--include-path={folder}" for folder in headers),
        ]
        """The options that MLX passes."""

    def compile(self, text: str, function: str) -> tuple[bytes, str]:
        """Compile a text; other threads run meanwhile.

        Args:
            text: in CUDA's language.
            function: name of a kernel in it, with its namespace.

        Returns:
            The machine code, and what the kernel is called in it.

        Raises:
            DoesNotCompileError: the compiler refuses the text.
            OSError: a call of the library fails.
        """
        program = ctypes.c_void_p()
        self._library.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None
        )
        try:
            self._library.nvrtcAddNameExpression(program, function.encode())
            self._compile(program)
            symbol = ctypes.c_char_p()
            self._library.nvrtcGetLoweredName(program, function.encode(), ctypes.byref(symbol))
            # The name's memory is freed with the program.
            return self._read("nvrtcGetCUBIN", program), (symbol.value or b"").decode()
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _compile(self, program: ctypes.c_void_p) -> None:
        options = (ctypes.c_char_p * len(self._options))(*(one.encode() for one in self._options))
        try:
            self._library.nvrtcCompileProgram(program, len(options), options)
        except OSError as error:
            log = self._read("nvrtcGetProgramLog", program).rstrip(b"\0").decode(errors="replace")
            reason = next((one for one in log.splitlines() if one), str(error))
            raise DoesNotCompileError(reason) from error

    def _read(self, name: str, program: ctypes.c_void_p) -> bytes:
        """Return bytes that the library hands out by a call for their number and one for them."""
        size = ctypes.c_size_t()
        getattr(self._library, f"{name}Size")(program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        getattr(self._library, name)(program, data)
        return data.raw

    def _describe(self, code: int) -> str:
        function = self._library.nvrtcGetErrorString
        function.argtypes, function.restype = [ctypes.c_int], ctypes.c_char_p
        return str(function(code).decode())


def open_compiler(
    version: tuple[int, int], mlx_folder: Path, environment: Mapping[str, str]
) -> Compiler:
    """Return the compiler that MLX uses, with the headers that MLX gives it.

    Args:
        version: major and minor compute capability of the GPU.
        mlx_folder: MLX's package.
        environment: variables of this process.

    Raises:
        OSError: MLX has loaded none, or none that is known here.
    """
    for name, folder in _LIBRARIES.items():
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        except OSError:
            continue
        headers = mlx_folder.parent / "nvidia" / folder / "include"
        if not headers.exists():
            home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH") or _CUDA_FOLDER
            headers = Path(home) / "include"
        return Compiler(library, version, [mlx_folder / "include" / "cccl", headers])
    raise OSError("MLX has loaded no compiler that is known")
