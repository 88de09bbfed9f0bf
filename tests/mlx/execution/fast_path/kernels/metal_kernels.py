"""Runs the text of kernels on a CPU, compiled as C++ with `metal_on_cpu.h`.

A kernel that only CUDA has gets Metal's words for what the languages call differently, and C++ for
what only CUDA can do.

It proves the arithmetic and the barriers of a kernel. Threads run in turn, so it cannot prove that
a race does no harm; nor does it show how 16 bits round, and how arrays are aligned.
"""

import ctypes
import hashlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from services.rank_worker.model.fast_path.kernels.dialects import CUDA, METAL

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
_KINDS = {
    mx.float32: "float",
    mx.int32: "int",
    mx.uint32: "unsigned",
    mx.uint8: "unsigned char",
    mx.uint64: "uint64_t",
    mx.bool_: "bool",
}
_NUMPY: dict[mx.Dtype, Any] = {
    mx.float32: np.float32,
    mx.int32: np.int32,
    mx.uint32: np.uint32,
}
_SHIM = Path(__file__).with_name("metal_on_cpu.h")


class KernelOnCpu:
    """A kernel as `mx.fast.metal_kernel` and `mx.fast.cuda_kernel` return it."""

    folder: Path
    """Where kernels are compiled; set by the fixture."""

    def __init__(self, **made: Any) -> None:
        source: str = made["source"]
        if source.startswith(CUDA.prologue):
            source = METAL.prologue + source.removeprefix(CUDA.prologue)
            made |= {"header": METAL.header, "source": source}
        self._made = made

    def __call__(
        self,
        *,
        inputs: list[mx.array],
        template: list[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
    ) -> list[mx.array]:
        """Run the kernel; inputs that it writes are changed in place."""
        function = self._compile(inputs, template, output_dtypes)
        may_copy = self._made.get("ensure_row_contiguous", True)
        given = [_view(one, may_copy=may_copy) for one in inputs]
        results = [
            np.full(shape, np.nan if kind == mx.float32 else 99, dtype=_NUMPY[kind])
            for shape, kind in zip(output_shapes, output_dtypes, strict=True)
        ]
        groups = [-(-size // width) for size, width in zip(grid, threadgroup, strict=True)]
        pointers = [one.ctypes.data_as(ctypes.c_void_p) for one in (*given, *results)]
        shapes = [(ctypes.c_int * one.ndim)(*one.shape) for one, name in self._with_shape(inputs)]
        function(*pointers, *shapes, *map(ctypes.c_int, (*groups, threadgroup[0])))
        return [mx.array(one) for one in results]

    def _with_shape(self, inputs: list[mx.array]) -> list[tuple[mx.array, str]]:
        """Return the inputs whose shapes the kernel reads, as MLX finds them."""
        names, source = self._made["input_names"], self._made["source"]
        pairs = zip(inputs, names, strict=True)
        return [(one, name) for one, name in pairs if f"{name}_shape" in source]

    def _compile(
        self, inputs: list[mx.array], template: list[tuple[str, Any]], dtypes: list[mx.Dtype]
    ) -> Any:
        made = self._made
        pointers = [
            f"const {_KINDS[one.dtype]}* {name}"
            for one, name in zip(inputs, made["input_names"], strict=True)
        ]
        pointers += [
            f"{_KINDS[one]}* {name}" for one, name in zip(dtypes, made["output_names"], strict=True)
        ]
        shapes = [f"const int* {name}_shape" for _, name in self._with_shape(inputs)]
        constants = "".join(map(_constant, template))
        places = {
            "threadgroup_position_in_grid": "group::id",
            "threadgroups_per_grid": "group::count",
            "thread_position_in_threadgroup.x": "group::current",
        }
        # MLX's arrays begin at multiples of 8 bytes on a CPU.
        body = re.sub(r"alignas\([A-Z_]+ \*[^)]*\)+", "", made["source"])
        for name, place in places.items():
            body = body.replace(name, place)
        parameters = ", ".join([*pointers, *shapes, "int gx, int gy, int gz, int threads"])
        text = f"""#include "{_SHIM}"
{made["header"]}
extern "C" void run({parameters}) {{
{constants}
  group::count = {{gx, gy, gz}};
  for (int z = 0; z < gz; ++z)
    for (int y = 0; y < gy; ++y)
      for (int x = 0; x < gx; ++x) {{
        group::id = {{x, y, z}};
        group::run(threads, [&] {{
{body}
        }});
      }}
}}
"""
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        library = self.folder / f"{name}.so"
        if not library.exists():
            source = library.with_suffix(".cpp")
            source.write_text(text)
            command = [str(COMPILER), "-O1", "-shared", "-fPIC", "-std=c++17", "-w"]
            # Otherwise longjmp to another stack ends the process where a compiler checks it.
            command += ["-U_FORTIFY_SOURCE"]
            subprocess.run([*command, str(source), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library)).run


def _view(array: mx.array, *, may_copy: bool) -> np.ndarray[Any, Any]:
    """Return the memory of an array, which the kernel may change; of a copy if it has gaps.

    Raises:
        AssertionError: it has gaps, and MLX would not copy it for the kernel.
    """
    mx.eval(array)
    seen = np.asarray(memoryview(array))  # type: ignore[arg-type]
    assert may_copy or seen.flags.c_contiguous, f"an array of shape {array.shape} has gaps"
    return np.ascontiguousarray(seen)


def _constant(pair: tuple[str, Any]) -> str:
    name, value = pair
    if isinstance(value, mx.Dtype):
        return f"  using {name} = {_KINDS[value]};\n"
    kind = "bool" if isinstance(value, bool) else "int"
    return f"  constexpr {kind} {name} = {str(value).lower()};\n"
