"""The text of the kernels in CUDA's dialect, compiled where its compiler is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from services.rank_worker.model.fast_path.kernels.dialects import CUDA, read_source
from services.rank_worker.model.fast_path.kernels.matrices import PACKED_HEADER
from services.rank_worker.model.fast_path.kernels.peer_sums import HEADER as SUMS_HEADER
from services.rank_worker.model.fast_path.kernels.tensor_cores import HEADER

NVCC = shutil.which("nvcc")

_BFLOAT16 = "__nv_bfloat16"
_TYPES = {"lengths": "int", "slots": "int", "rotations": "float", "constants": "float"}
_TYPES |= {"tile_sums": "float", "experts": "unsigned", "groups": "int", "chosen": "int"}
_TYPES |= {
    "weights": "float",
    "factor": "float",
    "arrived": "int",
    "blocks": "int",
    "counts": "unsigned",
    "counted": "unsigned",
    "written": "int",
    "peer_table": "uint64_t",
}
_TYPES |= {"places": "int", "real": "bool", "experts0": "unsigned", "experts1": "unsigned"}
_CONSTANTS = {
    "heads/decode_attention": (
        {"HEAD_DIM": 128, "HEADS": 4, "HEADS_PER_KEY": 4, "QUERY_HEADS": 32, "KV_HEADS": 8}
        | {"VECTOR_SIZE": 8, "THREADS": 128, "TILE": 256, "NORMALIZES": 1, "TRADITIONAL": 0}
        | {"ROTATED": 128}
    ),
    "add_tiles": {"HEAD_DIM": 128, "QUERY_HEADS": 32, "THREADS": 128, "TILE": 256},
    "add_norm": {"DIM": 2560, "THREADS": 320, "VECTOR_SIZE": 8},
    "silu_product": {"WIDTH": 9728, "THREADS": 256, "VECTOR_SIZE": 8},
    "few_rows": {"ROW_TILES": 2, "WARPS": 8, "GATED": 1, "HAS_BIAS": 0},
}
_ARGUMENTS = {
    "heads/decode_attention": (
        "qkv lengths slots rotations query_weight key_weight constants keys values",
        "attended tile_sums",
    ),
    "add_tiles": ("tile_sums lengths", "attended"),
    "add_norm": ("input change weight constants", "added normalized"),
    "silu_product": ("gate_up", "product"),
    "few_rows": ("rows weight bias", "product"),
}
_HEADS_INPUTS, _HEADS_OUTPUTS = _ARGUMENTS["heads/decode_attention"]
for _tokens in (1, 4):
    _CONSTANTS[f"heads/tensor_attention {_tokens}"] = _CONSTANTS["heads/decode_attention"] | {
        "TOKENS": _tokens
    }
    _ARGUMENTS[f"heads/tensor_attention {_tokens}"] = (f"{_HEADS_INPUTS} arrived", _HEADS_OUTPUTS)
_WRITING = {"HEADS": 0, "THREADS": 64}
for _bits in (8, 4):
    _of_bits = {"BITS": _bits, "GROUP": 64, "PER_WORD": 32 // _bits, "VECTOR_SIZE": 16}
    _CONSTANTS[f"heads/quantized_attention {_bits}"] = (
        _CONSTANTS["heads/decode_attention"] | _of_bits
    )
    _ARGUMENTS[f"heads/quantized_attention {_bits}"] = (
        f"{_HEADS_INPUTS} keys_scales keys_biases values_scales values_biases",
        _HEADS_OUTPUTS,
    )
    _CONSTANTS[f"heads/write_quantized_rows {_bits}"] = (
        _CONSTANTS[f"heads/quantized_attention {_bits}"] | _WRITING
    )
    _ARGUMENTS[f"heads/write_quantized_rows {_bits}"] = (
        _ARGUMENTS[f"heads/quantized_attention {_bits}"][0],
        "written",
    )
_CONSTANTS["heads/write_rows"] = _CONSTANTS["heads/decode_attention"] | _WRITING
_ARGUMENTS["heads/write_rows"] = (_HEADS_INPUTS, "written")
_CONSTANTS["heads/prepare_heads"] = _CONSTANTS["heads/decode_attention"] | {"THREADS": 192}
_ARGUMENTS["heads/prepare_heads"] = (
    "qkv rotations query_weight key_weight constants",
    "queries keys values",
)
_CONSTANTS["heads/write_prompts"] = _CONSTANTS["heads/prepare_heads"]
_ARGUMENTS["heads/write_prompts"] = (_HEADS_INPUTS, "queries")
_CONSTANTS["heads/prompt_attention"] = _CONSTANTS["heads/decode_attention"]
_ARGUMENTS["heads/prompt_attention"] = (
    "queries lengths slots blocks constants keys values",
    "attended",
)
_CONSTANTS["experts/expert_products"] = _CONSTANTS["few_rows"] | {"FIRST": 0, "SHARING": 8}
_ARGUMENTS["experts/expert_products"] = ("rows weight up experts groups", "product")
for _bits, _group, _words, _floats, _kind in (
    (4, 64, 4, 0, "bf16"),
    (8, 64, 4, 0, "bf16"),
    (4, 128, 1, 0, "f16"),
    (8, 32, 2, 0, "f16"),
    (4, 32, 4, 1, "bf16"),
    (8, 32, 4, 1, "f16"),
    (4, 16, 2, 1, "f16"),
):
    _name = f"experts/packed_expert_products {_kind} {_bits} {_group} {_floats}"
    _of_bits = {"BITS": _bits, "GROUP": _group, "WORDS": _words, "FLOATS": _floats}
    _CONSTANTS[_name] = _CONSTANTS["experts/expert_products"] | _of_bits
    _ARGUMENTS[_name] = (
        "rows weight scales biases up up_scales up_biases experts groups",
        "product",
    )
for _row_tiles, _warps, _gated in ((1, 8, 0), (4, 8, 0), (4, 4, 1)):
    _name = f"packed_few_rows {_row_tiles} {_gated}"
    _CONSTANTS[_name] = (
        _CONSTANTS["few_rows"]
        | {"ROW_TILES": _row_tiles, "WARPS": _warps, "GATED": _gated, "HAS_BIAS": 1}
        | {"BITS": 4, "GROUP": 64, "WORDS": 4, "FLOATS": 0}
    )
    _ARGUMENTS[_name] = ("rows weight scales biases bias", "product")
_CONSTANTS["experts/group_experts"] = {
    "FIRST": 0,
    "COUNT": 128,
    "ASSIGNMENTS_MAX": 2048,
    "THREADS": 1024,
}
_ARGUMENTS["experts/group_experts"] = ("experts", "groups")
_ROUTING = {"EXPERTS": 512, "TOP": 8, "SIGMOID": 1, "NORMALIZES": 1, "HAS_BIAS": 1}
_CONSTANTS["experts/route_sorted"] = _CONSTANTS["experts/group_experts"] | _ROUTING
_ARGUMENTS["experts/route_sorted"] = ("logits bias factor", "chosen weights groups")
_CONSTANTS["experts/route"] = {"THREADS": 128} | _ROUTING
_ARGUMENTS["experts/route"] = ("logits bias factor", "chosen weights")
_CONSTANTS["experts/add_experts"] = {
    "DIM": 2048,
    "TOP": 8,
    "VECTOR_SIZE": 8,
    "THREADS": 128,
    "HAS_SHARED": 1,
    "HAS_GATE": 1,
}
_ARGUMENTS["experts/add_experts"] = ("product weights shared gate", "added")
_CONSTANTS["experts/add_experts_norm"] = _CONSTANTS["experts/add_experts"] | {"THREADS": 256}
_ARGUMENTS["experts/add_experts_norm"] = (
    "product weights shared gate input weight constants",
    "added normalized",
)
_OF_RANKS = {"RANK": 1, "RANKS": 4, "ROWS_MAX": 256}
_CONSTANTS["peers/sum_norm"] = _CONSTANTS["add_norm"] | _OF_RANKS
_ARGUMENTS["peers/sum_norm"] = ("change input weight constants peer_table", "added normalized")
_CONSTANTS["peers/sum_experts_norm"] = _CONSTANTS["experts/add_experts_norm"] | _OF_RANKS
_ARGUMENTS["peers/sum_experts_norm"] = (
    f"{_ARGUMENTS['experts/add_experts_norm'][0]} peer_table",
    "added normalized",
)
_CONSTANTS["experts/count_experts"] = {"WIDTH": 128, "TOP": 8, "HAS_REAL": 1, "THREADS": 128}
_ARGUMENTS["experts/count_experts"] = ("counts places real experts0 experts1", "counted")
_CONSTANTS["latent/latent_attention"] = (
    {"QUERY_HEADS": 128, "HEADS": 8, "HEAD": 192, "LATENT": 512, "ROTATED": 64, "THREADS": 256}
    | {"VECTOR_SIZE": 8, "ROTATED_SIZE": 2, "VALUE_SIZE": 2, "TILE": 256, "TRADITIONAL": 1}
    | {"QUERY_STRIDE": 24_576, "PROJECTED_STRIDE": 2_112}
)
_ARGUMENTS["latent/latent_attention"] = (
    (
        "queries absorbed projected latents rotated_keys "
        "lengths slots rotations latent_weight constants"
    ),
    "attended tile_sums",
)
_CONSTANTS["latent/tensor_latent_attention"] = _CONSTANTS["latent/latent_attention"] | {"HEADS": 16}
_ARGUMENTS["latent/tensor_latent_attention"] = _ARGUMENTS["latent/latent_attention"]
_CONSTANTS["latent/head_products"] = {
    "ROW_TILES": 4,
    "WARPS": 4,
    "ROW_STRIDE": 24_576,
    "HEAD_STRIDE": 192,
}
_ARGUMENTS["latent/head_products"] = ("rows weight", "product")
_CONSTANTS["latent/write_latents"] = _CONSTANTS["latent/latent_attention"] | {"HEADS": 0}
_ARGUMENTS["latent/write_latents"] = (_ARGUMENTS["latent/latent_attention"][0], "written")
_CONSTANTS["norms/part_norm"] = {"DIM": 1536, "STRIDE": 2112, "THREADS": 192, "VECTOR_SIZE": 8}
_ARGUMENTS["norms/part_norm"] = ("input weight constants", "normalized")


@pytest.mark.proof
@pytest.mark.parametrize("name", list(_CONSTANTS))
def test_kernel_compiles_for_cuda_where_its_compiler_is_installed(
    name: str, tmp_path: Path
) -> None:
    """No registers are spilled to memory, which would make a kernel several times slower."""
    if NVCC is None:
        return
    inputs, outputs = _ARGUMENTS[name]
    body = CUDA.prologue + read_source(name.partition(" ")[0])
    words = {"keys": "unsigned", "values": "unsigned"} if "quantized" in name else {}
    types = _TYPES | words
    header = HEADER
    if "packed" in name:
        scale = "uint8_t" if _CONSTANTS[name]["FLOATS"] else _BFLOAT16
        types |= dict.fromkeys(("weight", "up"), "unsigned")
        types |= dict.fromkeys(("scales", "biases", "up_scales", "up_biases"), scale)
        body = f"using S = {scale};\n{body}"
        header = PACKED_HEADER
    if name.startswith("peers/"):
        header = SUMS_HEADER
    if name == "experts/count_experts":
        body = f"const unsigned* given[] = {{experts0, experts1}};\n{body}"
    of_cuda = (
        "experts/",
        "few_rows",
        "packed",
        "peers/",
        "heads/tensor",
        "heads/prompt",
        "heads/write_prompts",
        "latent/tensor",
    )
    is_of_cuda = name.startswith((*of_cuda, "latent/head"))
    is_of_cuda &= name not in ("experts/route", "experts/add_experts", "experts/add_experts_norm")
    arguments = []
    for one in inputs.split():
        arguments.append(f"const {types.get(one, _BFLOAT16)}* {one}")
        if f"{one}_shape" in body:
            arguments.append(f"const int* {one}_shape")
    arguments += [f"{types.get(one, _BFLOAT16)}* {one}" for one in outputs.split()]
    constants = "".join(
        f"constexpr int {key} = {value};\n" for key, value in _CONSTANTS[name].items()
    )
    source = tmp_path / "kernel.cu"
    function = (
        f"__global__ void kernel({', '.join(arguments)}) {{\n"
        f"using T = {_BFLOAT16};\nusing R = T;\n{constants}{body}\n}}\n"
    )
    if " f16" in name:
        function = function.replace(_BFLOAT16, "__half")
    source.write_text(
        "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#include <cstdint>\n"
        f"{header if is_of_cuda else CUDA.header}\n{function}"
    )
    command = [NVCC, "-arch=sm_90", "-cubin", "-Xptxas", "-v", "-o", "/dev/null", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr
