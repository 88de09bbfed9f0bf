"""One decoder layer of known form, in few operations.

Between the layers all tokens stand in one matrix [tokens, dim]: MLX multiplies it as it is, while a
third axis costs two operations per product.
"""

import mlx.core as mx

from services.rank_worker.kv_cache.rows.row_layers import RowLayer
from services.rank_worker.model.fast_path.compiled_forwards import RowArrays
from services.rank_worker.model.fast_path.gated_mlp import GatedMlp
from services.rank_worker.model.fast_path.kernels.kernels import Kernels
from services.rank_worker.model.fast_path.known_form.attention.interface import NewTokens
from services.rank_worker.model.fast_path.known_form.forms import LayerForm


class DecoderLayer:
    """One decoder layer."""

    def __init__(self, form: LayerForm, kernels: Kernels | None, *, on_cpu: bool) -> None:
        """Merge the layer's weights; arguments as those of `LayerStack`."""
        self.form = form
        self._attention = form.attention.open(kernels, on_cpu=on_cpu)
        self._mlp = GatedMlp(form.mlp, kernels) if form.has_gated_mlp else None

    def compile_products(self, *, invariant: bool) -> None:
        """Have the kernels of all products compiled, so that no step waits for it.

        Args:
            invariant: as for `Product`.
        """
        self._attention.compile_products(invariant=invariant)
        if self._mlp is not None:
            self._mlp.compile(invariant=invariant)

    @property
    def has_plain_matrices(self) -> bool:
        """See `LayerStack`."""
        has_plain_mlp = self._mlp is not None and self._mlp.has_plain_matrices
        return has_plain_mlp and self._attention.has_plain_matrices

    def attend(
        self, normalized: mx.array, cache: RowLayer | RowArrays, tokens: NewTokens
    ) -> mx.array:
        """Compute the layer's attention; see `Attention.attend`."""
        return self._attention.attend(normalized, cache, tokens)

    def transform(self, normalized: mx.array, tokens: NewTokens) -> mx.array:
        """Compute the layer's MLP: [tokens, dim] -> [tokens, dim]; see `GatedMlp`."""
        assert self._mlp is not None
        return self._mlp(
            normalized, invariant=tokens.invariant, leaves_summand=tokens.leaves_summand
        )

    @property
    def attention_is_divided(self) -> bool:
        """Whether the result of `attend` is a sum over ranks."""
        return self._attention.is_divided

    @property
    def mlp_is_divided(self) -> bool:
        """Whether the result of `transform` is a sum over ranks."""
        return self._mlp is not None and self._mlp.is_divided
