"""CUDA's text that unpacks packed numbers, compiled as C++ with stand-ins for what only a GPU has.

Other tests run the experts' kernels with `metal_on_cpu.h`, which unpacks in its own way.
"""

import ctypes
import re
import subprocess
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from services.rank_worker.model.fast_path.kernels.dialects import read_source
from tests.mlx.execution.fast_path.kernels.metal_kernels import COMPILER

_STAND_INS = """
#include <cmath>
#include <cstdint>
#include <cstring>
#define __device__
#define __forceinline__ inline
#define UNROLL
struct uint4 { unsigned x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static unsigned __float_as_uint(float f) { unsigned bits; memcpy(&bits, &f, 4); return bits; }
static float __uint_as_float(unsigned bits) { float f; memcpy(&f, &bits, 4); return f; }
static unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  unsigned chosen = 0;
  for (int i = 0; i < 4; ++i)
    chosen |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return chosen;
}
static unsigned lop3(unsigned a, unsigned b, unsigned c, unsigned table) {
  unsigned result = 0;
  for (int i = 0; i < 32; ++i)
    result |= (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i;
  return result;
}
// A float of 16 bits, as its bits.
template <int MANTISSA, int BIAS> struct Float16 {
  uint16_t bits;
  static double value(unsigned bits) {
    const int exponent = (bits & 0x7fff) >> MANTISSA, one = 1 << MANTISSA;
    const int digits = (bits & (one - 1)) | (exponent ? one : 0);
    return ldexp(bits >> 15 ? -digits : digits, (exponent ? exponent : 1) - BIAS - MANTISSA);
  }
  static unsigned rounded(double value) {
    const int exponent = value ? fmax(ilogb(value), 1 - BIAS) : 1 - BIAS;
    const int digits = nearbyint(ldexp(fabs(value), MANTISSA - exponent));
    return unsigned(std::signbit(value)) << 15 | (((exponent + BIAS - 1) << MANTISSA) + digits);
  }
};
using __nv_bfloat16 = Float16<7, 127>;
using __half = Float16<10, 15>;
template <typename Type> unsigned fma_pair(unsigned a, unsigned b, unsigned c) {
  unsigned pair = 0;
  for (int i = 0; i < 32; i += 16) {
    const auto of = [i](unsigned pair) { return Type::value(pair >> i & 0xffff); };
    pair |= Type::rounded(of(a) * of(b) + of(c)) << i;
  }
  return pair;
}
"""
_FUNCTION = """
extern "C" void {type}_{bits}_{floats}(
    const unsigned* words, uint4* unpacked, int vectors, uint16_t scale, uint16_t bias) {{
  for (int i = 0; i < vectors; ++i)
    unpacked[i] = lockstep_unpack<{bits}, {floats}>(
        words + i * {bits} / 4, {type}{{scale}}, {type}{{bias}});
}}
"""
_MULTIPLY_ADD = (
    r'asm\("fma\.rn\." name "x2 %0, %0, %1, %2;" '
    r': "\+r"\((\w+)\) : "r"\((\w+)\), "r"\((\w+)\)\);'
)
_LOGIC = (
    r'asm\("lop3\.b32 %0, %1, %2, %3, (\w+);"\s+'
    r': "=r"\((\w+)\) : "r"\((\w+)\), "n"\((.+)\), "n"\((\w+)\)\);'
)
_CALLS = {_MULTIPLY_ADD: r"\1 = fma_pair<type>(\1, \2, \3);", _LOGIC: r"\2 = lop3(\3, \4, \5, \1);"}
"""Pattern of a GPU's instruction -> a call of its stand-in."""
_TYPES = {"__nv_bfloat16": mx.bfloat16, "__half": mx.float16}


@pytest.fixture(scope="module")
def unpacking(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Return the compiled text: a function for each type, number of bits, and kind of numbers."""
    text = read_source("products/unpack")
    text = text[text.index("template <typename Type> struct LockstepType;") :]
    for instruction, call in _CALLS.items():
        text, count = re.subn(instruction, call, text)
        assert count == 1
    functions = [
        _FUNCTION.format(type=one, bits=bits, floats=floats)
        for one in _TYPES
        for bits in (4, 8)
        for floats in (0, 1)
    ]
    folder = tmp_path_factory.mktemp("unpacking")
    (folder / "unpack.cpp").write_text("".join([_STAND_INS, text, *functions]))
    options = ["-O1", "-shared", "-fPIC", "-std=c++17", "-w", "-ffp-contract=off"]
    command = [str(COMPILER), *options, "unpack.cpp", "-o", "unpack.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "unpack.so"))


def _bits_of(number: float, dtype: mx.Dtype) -> int:
    bits: Any = mx.array(number, dtype).view(mx.uint16).item()
    return int(bits)


def _packed(codes: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Return the codes in words of 32 bits, the first ones in the lowest bits."""
    shifts = np.arange(0, 32, bits, dtype=np.uint64)
    in_words = codes.reshape(-1, 32 // bits).astype(np.uint64)
    words: np.ndarray[Any, Any] = np.sum(in_words << shifts, axis=-1).astype(np.uint32)
    return words


def _numbers(words: np.ndarray[Any, Any], mode: Any, bits: int) -> mx.array:
    """Return the numbers of packed words, as MLX unpacks them with a scale of 1."""
    groups = mx.array(words).reshape(-1, bits)
    shape = (len(groups), 1)
    if mode == "affine":
        return mx.dequantize(groups, mx.ones(shape), mx.zeros(shape), 32, bits)
    # Such scales are exponents.
    scales = mx.full(shape, 127, dtype=mx.uint8)
    found = mx.dequantize(groups, scales, group_size=32, bits=bits, mode=mode)
    return found.astype(mx.float32)


@pytest.mark.parametrize("type_name", _TYPES)
@pytest.mark.parametrize(
    ("mode", "bits", "scale", "bias"),
    [
        ("affine", 4, 1.0, 0.0),
        ("affine", 4, 0.013, -0.11),
        ("affine", 8, 1.0, 0.0),
        ("affine", 8, 0.0071, -0.93),
        ("mxfp4", 4, 1.0, 0.0),
        ("mxfp4", 4, 0.0625, 0.0),
        ("mxfp8", 8, 1.0, 0.0),
        ("mxfp8", 8, 0.03125, 0.0),
    ],
)
def test_all_numbers_are_unpacked_as_mlx_unpacks_them(
    unpacking: ctypes.CDLL, type_name: str, mode: Any, bits: int, scale: float, bias: float
) -> None:
    """Every code at every place of its word, beside random ones; scaled values are rounded once."""
    dtype = _TYPES[type_name]
    codes = np.random.default_rng(bits).integers(0, 2**bits, (2**bits, 8, 8))
    for code, place in np.ndindex(2**bits, 8):
        codes[code, place, place] = code
    if mode == "mxfp8":
        # Two codes stand for no number; no checkpoint has them.
        codes[codes % 128 == 127] = 0
    words, found = _packed(codes, bits), np.zeros(codes.size, dtype=np.uint16)
    unpack = getattr(unpacking, f"{type_name}_{bits}_{int(mode != 'affine')}")
    pointers = [ctypes.c_void_p(one.ctypes.data) for one in (words, found)]
    unpack(*pointers, codes.size // 8, _bits_of(scale, dtype), _bits_of(bias, dtype))

    # Their products and sums are exact in 32 bits.
    factor, added = (mx.array(one, dtype).astype(mx.float32) for one in (scale, bias))
    expected = (_numbers(words, mode, bits) * factor + added).astype(dtype).flatten()
    assert mx.array_equal(mx.array(found).view(dtype), expected)
