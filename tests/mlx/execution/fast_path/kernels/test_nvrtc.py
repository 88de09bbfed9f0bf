"""The kernels that a rank compiles for CUDA, by NVIDIA's library for it where that is installed."""

import ctypes
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.switch_layers import SwitchGLU

from services.rank_worker.device.cuda.kept_kernels import kept_kernel
from services.rank_worker.device.cuda.kept_kernels.compiler import Compiler
from services.rank_worker.device.cuda.kept_kernels.kept_kernel import KernelFolder
from services.rank_worker.kv_cache.blocks import host_copier
from services.rank_worker.model.fast_path.kernels import expert_counts
from services.rank_worker.model.fast_path.kernels.attention.head_kernels import AttentionShape
from services.rank_worker.model.fast_path.kernels.attention.latent_kernels import LatentShape
from services.rank_worker.model.fast_path.kernels.expert_counts import ExpertCounts
from services.rank_worker.model.fast_path.kernels.few_experts import FewExperts
from services.rank_worker.model.fast_path.kernels.kernels import Kernels, Shape
from services.rank_worker.model.fast_path.kernels.peer_sums import PeerSums
from services.rank_worker.model.fast_path.kernels.routing import (
    ExpertResults,
    RoutingKernels,
    RoutingRule,
)
from services.rank_worker.peers.peer_memory import PeerMemory

CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
HEADS = AttentionShape(32, 8, 128, 128, is_traditional=False, normalizes=True)
LATENT = LatentShape(16, 512, 64, 128, is_traditional=True)
DIM, TOKENS, EXPERTS, TOP = 1_024, 9, 16, 2


class NotStarted:
    """A kernel that gives zeros."""

    def __init__(self, **_: Any) -> None:
        pass

    def __call__(
        self, *, output_shapes: list[Any], output_dtypes: list[mx.Dtype], **_: Any
    ) -> list[mx.array]:
        kinds = zip(output_shapes, output_dtypes, strict=True)
        return [mx.zeros(shape, dtype=dtype) for shape, dtype in kinds]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path | None:
    """Return where kernels are compiled; an error of the compiler ends the test."""
    try:
        library = ctypes.CDLL("libnvrtc.so.13")
    except OSError:
        return None
    headers = [CUDA / "include/cccl", CUDA / "include"]
    kept = KernelFolder(tmp_path, Compiler(library, (9, 0), headers))
    monkeypatch.setattr(KernelFolder, "add", KernelFolder._add)
    monkeypatch.setattr(kept_kernel, "_own_folder", lambda: kept)
    monkeypatch.setattr(mx.fast, "cuda_kernel", NotStarted)
    # Not for the other tests of this process.
    monkeypatch.setattr(expert_counts, "_kernel", expert_counts._kernel.__wrapped__)
    return tmp_path


def _names(folder: Path) -> set[str]:
    """Return the names of the compiled kernels, with their constants."""
    return {path.name.removeprefix("custom_kernel_lockstep_") for path in folder.glob("*.ptx")}


def _missing(folder: Path, *kernels: str) -> list[str]:
    found = _names(folder)
    return [name for name in kernels if not any(one.startswith(name) for one in found)]


@pytest.mark.proof
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_kernels_of_layers_compile_for_each_type_of_numbers(
    folder: Path | None, dtype: mx.Dtype
) -> None:
    """With all that a kernel needs of MLX's includes, which they do not have."""
    if folder is None:
        return
    cases: list[tuple[int, list[Shape]]] = [
        (0, [HEADS, LATENT]),
        (0, [HEADS]),
        (8, [HEADS]),
        (4, [HEADS]),
    ]
    for bits, shapes in cases:
        kernels = Kernels("cuda", bits, prompts_in_place=True)
        assert not kernels.find_fault(shapes, dtype, DIM, {4, 8})
    assert not _missing(
        folder, "quantized_attention", "write_quantized_rows", "add_tiles", "add_norm"
    )
    is_half = dtype != mx.float32
    names = ["tensor_attention", "tensor_latent_attention", "few_rows", "packed_few_rows"]
    names += ["write_prompts", "prompt_attention"]
    assert not _missing(folder, *(names if is_half else ["decode_attention", "latent_attention"]))


@pytest.mark.proof
@pytest.mark.parametrize("bits", [0, 4])
def test_kernels_of_experts_and_over_ranks_compile(folder: Path | None, bits: int) -> None:
    """Routing, products, counts and sums, and the kernel that copies to the host."""
    if folder is None:
        return
    dtype = mx.bfloat16
    x, epsilon = mx.zeros((TOKENS, DIM), dtype=dtype), mx.zeros((1,))
    layer = SwitchGLU(DIM, DIM, EXPERTS)
    layer.set_dtype(dtype)
    if bits:
        nn.quantize(layer, 64, bits)
    routing, rule = RoutingKernels("cuda"), RoutingRule(TOP, is_sigmoid=True, normalizes=True)
    logits = mx.zeros((TOKENS, EXPERTS), dtype=dtype)
    for local in (None, range(EXPERTS)):
        routed = routing.route(logits, None, epsilon, rule, local)
    product = FewExperts()(layer, x, routed.experts, range(EXPERTS))
    results = ExpertResults(product, routed.weights, x, None)
    routing.add_experts(results)
    routing.add_experts_norm(x, results, x[0], epsilon)
    counts = mx.zeros((2 * EXPERTS,), dtype=mx.uint32)
    ExpertCounts().add(counts, EXPERTS, [(0, routed.experts), (1, routed.experts)], None)
    sums = PeerSums(PeerMemory(1, (8, 16)), DIM, dtype)
    sums.add_norm(x, x, x[0], epsilon)
    sums.add_experts_norm(x, results, x[0], epsilon)
    names = ["source", "about"]
    to_host = kept_kernel.kept_cuda_kernel(
        "lockstep_to_host", names, output_names=["done"], source=host_copier._SOURCE
    )
    to_host(
        inputs=[mx.zeros(1, dtype=mx.uint8), mx.zeros(2, dtype=mx.int64)],
        output_shapes=[(1,)],
        output_dtypes=[mx.uint8],
    )
    names = [
        "to_host",
        "route_16",
        "route_sorted",
        "group_experts",
        "add_experts_bfloat16",
        "add_experts_norm",
    ]
    names += ["packed_expert_products" if bits else "expert_products", "count_experts_2"]
    assert not _missing(folder, *names, "sum_norm", "sum_experts_norm")
