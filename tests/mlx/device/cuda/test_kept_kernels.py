"""Kernels of ours that are compiled before MLX starts them, and the files in which MLX finds them.

The text and the name below are those that MLX 0.32.4 for CUDA writes for this kernel.
"""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from services.rank_worker.device.cuda.kept_kernels import compiler, kept_kernel, mlx_text
from services.rank_worker.device.cuda.kept_kernels.compiler import Compiler, DoesNotCompileError
from services.rank_worker.device.cuda.kept_kernels.kept_kernel import (
    KeptKernel,
    KernelFolder,
    code_path,
)
from services.rank_worker.device.cuda.kept_kernels.mlx_text import (
    Definition,
    KernelText,
    write_text,
)
from shared.os import private_files
from tests.mlx.execution.fast_path.kernels.metal_kernels import COMPILER

BODY = "scaled[0] = T(rows_ndim + rows_shape[0] + rows_strides[0]) * factor[0];\n"
DEFINITION = Definition(
    "scale", ["rows", "factor", "step"], ["scaled", "count"], BODY, "#define HALF 0.5f\n"
)
TEMPLATE = [("T", mx.float16), ("WIDTH", 64), ("GATED", True), ("HAS_BIAS", False)]
MODULE = "custom_kernel_scale_float16_t_64_t_f_aa598be06d95998c"
CODE = f"""#define HALF 0.5f
namespace mlx::core::cu {{

namespace cg = cooperative_groups;

__global__ void custom_kernel_scale_float16_t_64_t_f(
    const __nv_bfloat16* rows,
    const __grid_constant__ Shape rows_shape,
    const __grid_constant__ Strides rows_strides,
    const __grid_constant__ int rows_ndim,
    const float* factor,
    const uint32_t* step,
    __half* scaled,
    int32_t* count) {{
  using T = __half;
  constexpr int WIDTH = 64;
  constexpr bool GATED = true;
  constexpr bool HAS_BIAS = false;

{BODY}
}}

}} // namespace mlx::core::cu
"""
HASHES = """#include <functional>
#include <iostream>
#include <iterator>
#include <string>
#ifndef __GLIBCXX__
#error "not the library that MLX is linked with"
#endif
int main() {
  std::string text(std::istreambuf_iterator<char>(std::cin), {});
  std::cout << std::hex << std::hash<std::string>{}(text);
}
"""


class FakeFunction:
    """A function of a library. As that of ctypes it has its result checked by `errcheck`."""

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        self.__name__ = name
        self._call = call

    @staticmethod
    def errcheck(result: Any, _function: Any, _arguments: Any) -> Any:
        """Return the result unchecked, until `declare` replaces this check."""
        return result

    def __call__(self, *arguments: Any) -> Any:
        return self.errcheck(self._call(*arguments), self, arguments)


class FakeNvrtc:
    """Stands for NVIDIA's library: the machine code of a text tells what the library was given."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.options: list[str] = []
        self.open_programs = 0
        self._text = self._name = b""

    def __getattr__(self, name: str) -> Any:
        """Return the function of the library that a method stands for."""
        try:
            method = vars(type(self))[f"_{name.removeprefix('nvrtc').lower()}"]
        except KeyError:
            raise AttributeError(name) from None
        setattr(self, name, FakeFunction(name, method.__get__(self)))
        return getattr(self, name)

    def _createprogram(self, program: Any, text: bytes, *_: Any) -> int:
        program._obj.value = 1
        self.open_programs += 1
        self._text = text
        return 0

    def _addnameexpression(self, _program: Any, name: bytes) -> int:
        self._name = name
        return 0

    def _compileprogram(self, _program: Any, count: int, options: Any) -> int:
        self.options = [options[place].decode() for place in range(count)]
        self.compiled.append(self._name.decode())
        return 6 if b"nonsense" in self._text else 0

    def _getloweredname(self, _program: Any, name: bytes, symbol: Any) -> int:
        symbol._obj.value = b"_Z" + name
        return 0

    def _getcubinsize(self, _program: Any, size: Any) -> int:
        size._obj.value = len(self._text)
        return 0

    def _getcubin(self, _program: Any, data: Any) -> int:
        data.raw = self._text
        return 0

    def _getprogramlogsize(self, _program: Any, size: Any) -> int:
        size._obj.value = 20
        return 0

    def _getprogramlog(self, _program: Any, data: Any) -> int:
        data.raw = b"\nbad word\nmore\n".ljust(20, b"\0")
        return 0

    def _geterrorstring(self, code: int) -> bytes:
        return b"NVRTC_ERROR_%d" % code

    def _destroyprogram(self, _program: Any) -> int:
        self.open_programs -= 1
        return 0


def _compiler(library: Any, version: tuple[int, int] = (9, 0)) -> Compiler:
    return Compiler(library, version, [Path("/headers")])


def _folder(path: Path, library: Any) -> KernelFolder:
    return KernelFolder(path, _compiler(library))


def _text() -> KernelText:
    inputs = [mx.zeros((2, 3), dtype=mx.bfloat16), mx.array(1.0), mx.zeros((1,), dtype=mx.uint32)]
    return write_text(DEFINITION, inputs, [mx.float16, mx.int32], TEMPLATE)


def test_text_of_kernel_is_to_the_letter_the_one_that_mlx_writes() -> None:
    """Sizes of an input follow it where the body names them, but not those of a single number."""
    assert _text().body == CODE
    assert _text().function == "mlx::core::cu::custom_kernel_scale_float16_t_64_t_f"
    plain = write_text(
        Definition("one", ["a"], ["b"], "b[0] = a[0];"), [mx.array(1)], [mx.bool_], ()
    )
    assert plain.name == "custom_kernel_one"
    assert "(\n    const int32_t* a,\n    bool* b) {\nb[0] = a[0];\n}" in plain.body


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a hash on systems whose standard library is not that of MLX for CUDA."""
    try:
        ctypes.CDLL(mlx_text._HASH_LIBRARY)
    except OSError:
        monkeypatch.setattr(mlx_text, "_standard_hash", len)


def test_name_of_module_ends_with_the_hash_that_cpp_gives_its_text(tmp_path: Path) -> None:
    """The hash is that of the library to which MLX is linked; both C++ and MLX agree with it."""
    (tmp_path / "hashes.cpp").write_text(HASHES)
    command = [str(COMPILER), str(tmp_path / "hashes.cpp"), "-o", str(tmp_path / "hashes")]
    if COMPILER is None or subprocess.run(command, capture_output=True, check=False).returncode:
        return
    assert _text().module == MODULE
    for text in (mlx_text._MLX_INCLUDES + CODE, "", "seven b", "eight by", "nine byte"):
        shown = subprocess.check_output([tmp_path / "hashes"], input=text.encode()).decode()
        assert f"{mlx_text._standard_hash(text.encode()):x}" == shown


def test_without_library_of_mlxs_hash_there_is_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is missing, or has no such function, is one kind of error."""
    monkeypatch.setattr(mlx_text, "_HASH_LIBRARY", "libnone.so.1")
    with pytest.raises(OSError, match="libnone"):
        _ = _text().module
    monkeypatch.setattr(mlx_text, "_HASH_LIBRARY", None)
    monkeypatch.setattr(mlx_text, "_HASH_FUNCTION", "no_such_function")
    with pytest.raises(OSError, match="has no no_such_function"):
        _ = _text().module


@pytest.mark.parametrize(
    ("length", "parts"), [(53, [53]), (245, [245]), (246, [245, 1]), (490, [245, 245])]
)
def test_long_names_are_divided_into_folders_as_mlx_does(length: int, parts: list[int]) -> None:
    """A file's name may have 255 letters, and four are the ending."""
    path = code_path(Path("/kernels"), "k" * length)
    assert path.suffix == ".ptx"
    found = path.with_suffix("").relative_to("/kernels").parts
    assert [len(one) for one in found] == parts


@pytest.mark.usefixtures("hashes")
def test_compiled_kernel_is_complete_when_mlx_sees_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names are written first; the longest file name has room for a temporary one."""
    written: list[str] = []
    real = private_files.replace

    def noting(path: Path, content: str | bytes) -> None:
        written.append(path.suffix)
        real(path, content)

    monkeypatch.setattr(private_files, "replace", noting)
    long = Definition("k" * 300, ["a"], ["b"], "b[0] = a[0];")
    text = write_text(long, [mx.zeros((1,))], [mx.float32], ())
    library = FakeNvrtc()
    _folder(tmp_path / "kernels", library).add(text)

    assert written == [".txt", ".ptx"]
    code = code_path(tmp_path / "kernels", text.module)
    assert code.with_suffix(".txt").read_text() == f"{text.function}\t_Z{text.function}\n"
    assert code.read_bytes() == text.text_with_own_includes.encode()
    assert sorted(one.suffix for one in code.parent.iterdir()) == [".ptx", ".txt"]
    assert library.open_programs == 0


def _kernel(path: Path, library: Any, started: list[dict[str, Any]]) -> KeptKernel:
    def kernel(**given: Any) -> list[str]:
        started.append(given)
        return ["results"]

    definition = Definition("copy", ["a"], ["b"], "b[0] = a[0];\n")
    return KeptKernel(kernel, definition, _folder(path, library))


@pytest.mark.usefixtures("hashes")
def test_kernel_is_compiled_once_for_its_constants_and_types(tmp_path: Path) -> None:
    """Also over processes; MLX starts it each time, with all that it was given."""
    started: list[dict[str, Any]] = []
    first, second = FakeNvrtc(), FakeNvrtc()
    kernel = _kernel(tmp_path, first, started)
    a, others = mx.zeros((3,)), {"grid": (1, 1, 1), "stream": mx.cpu}
    for template in ([("WIDTH", 1)], [("WIDTH", 2)], [("WIDTH", 1)]):
        given: dict[str, Any] = {
            "inputs": [a],
            "output_dtypes": [mx.float32],
            "template": template,
            **others,
        }
        assert kernel(**given) == ["results"]
        assert started[-1] == given
    kernel(inputs=[a.astype(mx.int32)], output_dtypes=[mx.float32], template=[("WIDTH", 1)])
    names = [name.rpartition("copy")[2] for name in first.compiled]
    assert names == ["_1", "_2", "_1"]

    again = _kernel(tmp_path, second, started)
    again(inputs=[a], output_dtypes=[mx.float32], template=[("WIDTH", 2)])
    assert second.compiled == []
    assert len(started) == 5


@pytest.mark.usefixtures("hashes")
def test_refused_text_is_left_to_mlx_and_other_kernels_are_compiled(tmp_path: Path) -> None:
    """A GPU may have no instruction that one kernel uses."""
    library = FakeNvrtc()
    folder = _folder(tmp_path, library)
    for body in ("nonsense", "b[0] = a[0];"):
        folder.add(write_text(Definition("one", ["a"], ["b"], body), [mx.zeros(1)], [mx.int8], ()))
    assert len(library.compiled) == 2
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(DoesNotCompileError, match=r"^bad word$"):
        _compiler(library).compile("nonsense", "one")
    assert library.open_programs == 0


@pytest.mark.usefixtures("hashes")
def test_folder_that_cannot_be_written_is_not_tried_again(tmp_path: Path) -> None:
    """MLX compiles all kernels, as it does without this folder."""
    (tmp_path / "file").write_text("")
    library, started = FakeNvrtc(), list[dict[str, Any]]()
    kernel = _kernel(tmp_path / "file" / "kernels", library, started)
    for width in (1, 2):
        kernel(inputs=[mx.zeros(1)], output_dtypes=[mx.int8], template=[("WIDTH", width)])
    assert len(library.compiled) == 1
    assert len(started) == 2


def test_compiler_gets_mlxs_options_and_its_failed_calls_are_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPUs before Hopper have no instructions of their own; a library may lack a call."""
    library = FakeNvrtc()
    for version, name in (((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((12, 0), "sm_120a")):
        _compiler(library, version).compile("text", "one")
        assert f"--gpu-architecture={name}" in library.options
    assert "--device-as-default-execution-space" in library.options
    assert "--include-path=/headers" in library.options
    with pytest.raises(OSError, match="no attribute 'nvrtcCreateProgram'"):
        _compiler(object())
    monkeypatch.setattr(FakeNvrtc, "_getcubin", lambda *_: 7)
    library = FakeNvrtc()
    with pytest.raises(OSError, match=r"^nvrtcGetCUBIN failed \(NVRTC_ERROR_7\)$"):
        _compiler(library).compile("text", "one")
    assert library.open_programs == 0


def test_headers_are_those_of_nvidias_packages_beside_mlx_or_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are searched for where MLX searches for them."""
    library = FakeNvrtc()
    monkeypatch.setattr(ctypes, "CDLL", lambda *_names, **_modes: library)

    def found(**environment: str) -> str:
        opened = compiler.open_compiler((9, 0), tmp_path / "mlx", environment)
        opened.compile("text", "one")
        assert f"--include-path={tmp_path / 'mlx/include/cccl'}" in library.options
        return library.options[-1]

    assert found() == "--include-path=/usr/local/cuda/include"
    assert found(CUDA_PATH="/path", CUDA_HOME="/home") == "--include-path=/home/include"
    beside = tmp_path / "nvidia/cu13/include"
    beside.mkdir(parents=True)
    assert found(CUDA_HOME="/home") == f"--include-path={beside}"


def test_kernels_are_mlxs_own_where_none_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a folder, a known GPU or a compiler that MLX has loaded, nothing is compiled here."""
    facts = {"compute_capability_major": 9, "compute_capability_minor": 0}
    variable = {"MLX_PTX_CACHE_DIR": "/kernels"}
    with pytest.raises(OSError, match="MLX_PTX_CACHE_DIR is not set"):
        kept_kernel.open_folder({}, facts)
    with pytest.raises(OSError, match="compute capability"):
        kept_kernel.open_folder(variable, {})
    monkeypatch.setattr(compiler, "_LIBRARIES", {"libnone.so.1": "none"})
    with pytest.raises(OSError, match="no compiler that is known"):
        kept_kernel.open_folder(variable, facts)

    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **made: made)
    monkeypatch.setattr(kept_kernel, "_own_folder", lambda: None)
    made: dict[str, Any] = {
        "name": "one",
        "input_names": ["a"],
        "output_names": ["b"],
        "source": "b[0] = a[0];",
    }
    assert kept_kernel.kept_cuda_kernel(**made) == made
    monkeypatch.setattr(kept_kernel, "_own_folder", lambda: _folder(Path(), FakeNvrtc()))
    assert isinstance(kept_kernel.kept_cuda_kernel(**made), KeptKernel)
