"""What MLX makes of a kernel of ours: the text that it compiles, and the name of the result.

MLX finds a compiled kernel by a name that ends with a hash of its text. So the text here is to the
letter the one that MLX writes (`build_kernel` in its `custom_kernel.cpp`). A version of MLX with
another text looks for another name, and compiles the kernel itself.
"""

import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

Template = Sequence[tuple[str, Any]]
"""Names and values of a kernel's constants: integers, booleans and dtypes."""

_NAMESPACE = "mlx::core::cu"
_HASH_LIBRARY, _HASH_FUNCTION, _HASH_SEED = "libstdc++.so.6", "_ZSt11_Hash_bytesPKvmm", 0xC70F6907

_CUDA_TYPES = {
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.float32: "float",
    mx.float64: "double",
    mx.complex64: "mlx::core::cu::complex64_t",
}
_TYPES_IN_NAMES = _CUDA_TYPES | {
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.complex64: "complex64_t",
}

INCLUDES_VERSION = "Lockstep's includes, version 1"
"""Raised with each change of `_OWN_INCLUDES`: the name of a kept kernel does not depend on them
otherwise."""
_MLX_INCLUDES = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

"""
"""How MLX's text begins."""
_OWN_INCLUDES = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
namespace cooperative_groups {}
namespace mlx::core::cu {
template <typename Number>
struct Sizes {
  Number numbers[10];
  __device__ Number operator[](int index) const { return numbers[index]; }
};
using Shape = Sizes<int32_t>;
using Strides = Sizes<int64_t>;
}
"""
"""All that our kernels use of it. Most of the time of a compilation goes into MLX's own includes,
which instantiate templates of the whole standard library."""


@dataclasses.dataclass(frozen=True, slots=True)
class Definition:
    """A kernel as `mx.fast.cuda_kernel` is told of it."""

    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    source: str
    """Body of its function."""
    header: str = ""
    """Definitions before its function."""


@dataclasses.dataclass(frozen=True, slots=True)
class KernelText:
    """The text of a kernel for certain constants and types."""

    name: str
    """The function's name, which ends with the values of its constants."""
    body: str
    """The text after the includes."""

    @property
    def function(self) -> str:
        """The function's name with its namespace."""
        return f"{_NAMESPACE}::{self.name}"

    @property
    def module(self) -> str:
        """What MLX calls the compiled kernel.

        Raises:
            OSError: there is no library with MLX's hash.
        """
        return f"{self.name}_{_standard_hash((_MLX_INCLUDES + self.body).encode()):x}"

    @property
    def text_with_own_includes(self) -> str:
        """The text to compile.

        It has a few definitions in place of MLX's includes, which take most of a compilation; the
        machine code is the same.
        """
        return _OWN_INCLUDES + self.body


def write_text(
    definition: Definition,
    inputs: Sequence[mx.array],
    output_dtypes: Sequence[mx.Dtype],
    template: Template,
) -> KernelText:
    """Return the text that MLX compiles when it starts a kernel.

    Args:
        definition: of the kernel.
        inputs: arrays that it reads; their types and numbers of dimensions count.
        output_dtypes: of the arrays that it writes.
        template: its constants.
    """
    name = f"custom_kernel_{definition.name}{''.join(map(_in_name, template))}"
    outputs = zip(definition.output_names, output_dtypes, strict=True)
    parameters = ",\n".join(
        [
            *_input_parameters(definition, inputs),
            *(f"    {_CUDA_TYPES[dtype]}* {output}" for output, dtype in outputs),
        ]
    )
    constants = "".join(map(_constant, template)) + "\n" if template else ""
    body = (
        f"{definition.header}namespace {_NAMESPACE} {{\n\n"
        "namespace cg = cooperative_groups;\n\n"
        f"__global__ void {name}(\n{parameters}) {{\n"
        f"{constants}{definition.source}\n}}\n\n}} // namespace {_NAMESPACE}\n"
    )
    return KernelText(name, body)


def _input_parameters(definition: Definition, inputs: Sequence[mx.array]) -> Iterator[str]:
    """Yield the parameters of inputs, and of their sizes where the kernel names them."""
    for name, array in zip(definition.input_names, inputs, strict=True):
        yield f"    const {_CUDA_TYPES[array.dtype]}* {name}"
        for kind, ending in (("Shape", "shape"), ("Strides", "strides"), ("int", "ndim")):
            if array.ndim and f"{name}_{ending}" in definition.source:
                yield f"    const __grid_constant__ {kind} {name}_{ending}"


def _in_name(constant: tuple[str, Any]) -> str:
    _, value = constant
    if isinstance(value, bool):
        return "_t" if value else "_f"
    return f"_{_TYPES_IN_NAMES[value] if isinstance(value, mx.Dtype) else value}"


def _constant(constant: tuple[str, Any]) -> str:
    name, value = constant
    if isinstance(value, mx.Dtype):
        return f"  using {name} = {_CUDA_TYPES[value]};\n"
    if isinstance(value, bool):
        return f"  constexpr bool {name} = {str(value).lower()};\n"
    return f"  constexpr int {name} = {value};\n"


def _standard_hash(data: bytes) -> int:
    """Return what C++'s `std::hash` returns for a text, by the library that MLX calls for it."""
    library = ctypes.CDLL(_HASH_LIBRARY)
    try:
        function = getattr(library, _HASH_FUNCTION)
    except AttributeError as error:
        raise OSError(f"{_HASH_LIBRARY} has no {_HASH_FUNCTION}") from error
    function.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t)
    function.restype = ctypes.c_size_t
    return int(function(data, len(data), _HASH_SEED))
