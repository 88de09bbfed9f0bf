"""All kernels for layers of a known form, tried together.

Owns those of norms and activations, and which kernels are left where they or other ranks fail.
"""

from collections.abc import Callable, Collection

import mlx.core as mx

from services.rank_worker.model.fast_path.kernels.attention.head_kernels import (
    AttentionShape,
    HeadAttentionKernels,
)
from services.rank_worker.model.fast_path.kernels.attention.latent_kernels import (
    LatentAttentionKernels,
    LatentShape,
)
from services.rank_worker.model.fast_path.kernels.attention.prompt_attention import PromptAttention
from services.rank_worker.model.fast_path.kernels.dialects import (
    Gpu,
    make_kernel,
    start_norm,
    vector_size,
)
from services.rank_worker.model.fast_path.kernels.faults import first_error
from services.rank_worker.model.fast_path.kernels.few_rows import FewRows
from shared.log import Log

_log = Log("rank_worker.fast_path")

Shape = AttentionShape | LatentShape
"""Of one layer's attention."""

_ROW_THREADS = 256
"""Threads of a group that computes an activation."""


class Kernels:
    """Starts kernels on one kind of GPU. Compiled kernels are kept by MLX."""

    def __init__(self, device: Gpu, kv_bits: int = 0, *, prompts_in_place: bool = False) -> None:
        """Prepare for a kind of device; nothing is compiled yet.

        Args:
            device: the kind.
            kv_bits: as for `HeadAttentionKernels`.
            prompts_in_place: write the rows of prompts too, where that is possible.
        """
        self.head_attention = HeadAttentionKernels(device, kv_bits)
        self.latent_attention = LatentAttentionKernels(device)
        can_prefill = prompts_in_place and device == "cuda" and not kv_bits
        self.prompt_attention = PromptAttention() if can_prefill else None
        """Attention of prompts in place; None: MLX attends, chunk by chunk."""
        names = ["input", "change", "weight", "constants"]
        self._add_norm = make_kernel(device, "add_norm", names, ["added", "normalized"])
        self._silu_product = make_kernel(device, "silu_product", ["gate_up"], ["product"])
        self.few_rows = FewRows() if device == "cuda" else None
        """Products of few rows; None: MLX's are used."""

    def find_fault(
        self,
        shapes: Collection[Shape],
        dtype: mx.Dtype,
        dim: int = 0,
        bits: Collection[int] = (),
    ) -> str:
        """Compile and run all kernels once; return why they cannot serve, "" if they can.

        Without a kernel for products of few rows, or for the heads or the attention of prompts, the
        others still serve, and MLX computes these.

        Args:
            shapes: of the attentions, each once.
            dtype: of the model.
            dim: width of hidden states; 0: kernels compute no norms and no activations.
            bits: of the model's affine packed matrices.
        """
        of_heads = [one for one in shapes if isinstance(one, AttentionShape)]
        of_latents = [one for one in shapes if isinstance(one, LatentShape)]
        fault = self.head_attention.find_fault(of_heads, dtype)
        if fault := fault or self.latent_attention.find_fault(of_latents, dtype):
            return fault
        if fault := self._find_fault_of_norms(dtype, dim) if dim else "":
            return fault
        if fault := self.head_attention.find_fault_of_prepare(of_heads, dtype) if dim else "":
            _log.info("mlx_prepares_prompts", detail=fault)
            self.head_attention.can_prepare = False
        self._try_prompts(of_heads, dtype, is_known=bool(dim) and not of_latents)
        if self.few_rows is not None and (fault := self.few_rows.find_fault(dtype, bits)):
            _log.info("mlx_products", detail=fault)
            self.few_rows = None
        return ""

    def _try_prompts(
        self, shapes: Collection[AttentionShape], dtype: mx.Dtype, *, is_known: bool
    ) -> None:
        """Leave the attention of prompts if it cannot serve, or the layers are of another form."""
        if self.prompt_attention is None:
            return
        fault = (
            self.prompt_attention.find_fault(shapes, dtype)
            if is_known
            else "layers are not of a known form, or have latent attention"
        )
        if fault:
            self.leave_prompts(fault)

    def leave_prompts(self, reason: str) -> None:
        """Have MLX attend to prompts, and log the reason."""
        _log.info("mlx_attends_to_prompts", detail=reason)
        self.prompt_attention = None

    def _find_fault_of_norms(self, dtype: mx.Dtype, dim: int) -> str:
        fault = first_error(self._normalize_once, [mx.ones((1, dim), dtype=dtype)])
        return f"a kernel does not run ({fault})" if fault else ""

    def _normalize_once(self, hidden: mx.array) -> None:
        epsilon = mx.zeros((1,), dtype=mx.float32)
        mx.eval(self.add_norm(hidden, hidden, hidden[0], epsilon), self.silu_product(hidden))

    def keep_common(self, all_agree: Callable[[bool], bool]) -> None:
        """Leave the kernels for few rows, prompts or tensor cores if another rank has none.

        Other kernels round differently, and ranks that hold the same tokens must route them to the
        same experts.

        Args:
            all_agree: tells whether a statement holds on all ranks; a collective.
        """
        if not all_agree(self.few_rows is not None):
            self.few_rows = None
        if not all_agree(self.head_attention.can_prepare):
            self.head_attention.can_prepare = False
        if not all_agree(self.prompt_attention is not None):
            self.prompt_attention = None
        attentions = (self.head_attention, self.latent_attention)
        if not all_agree(all(one.has_tensor_cores for one in attentions)):
            for one in attentions:
                one.leave_tensor_cores()

    def add_norm(
        self, hidden: mx.array, change: mx.array, weight: mx.array, epsilon: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Add a layer's output to its input, and normalize the sum (RMS norm).

        Args:
            hidden: [..., dim].
            change: like `hidden`.
            weight: [dim], of the norm.
            epsilon: `device_numbers`, of the norm.

        Returns:
            (sum, normalized sum), both like `hidden`.
        """
        dim = hidden.shape[-1]
        vector = vector_size(dim, hidden.dtype)
        template = [("T", hidden.dtype), ("DIM", dim), ("VECTOR_SIZE", vector)]
        inputs = [hidden, change, weight, epsilon]
        return start_norm(self._add_norm, inputs, template, hidden)

    def silu_product(self, gate_up: mx.array) -> mx.array:
        """Compute silu(gate) * up.

        Args:
            gate_up: [..., 2 * width]: gate, then up.

        Returns:
            [..., width].
        """
        width = gate_up.shape[-1] // 2
        vector = vector_size(width, gate_up.dtype)
        template = [("T", gate_up.dtype), ("WIDTH", width), ("VECTOR_SIZE", vector)]
        groups = -(-width // (_ROW_THREADS * vector))
        product: mx.array
        (product,) = self._silu_product(
            inputs=[gate_up],
            template=[*template, ("THREADS", _ROW_THREADS)],
            grid=(groups * _ROW_THREADS, gate_up.size // (2 * width), 1),
            threadgroup=(_ROW_THREADS, 1, 1),
            output_shapes=[(*gate_up.shape[:-1], width)],
            output_dtypes=[gate_up.dtype],
        )
        return product
