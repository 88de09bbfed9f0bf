"""Which type a weight gets."""

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map_with_path

from shared.configuration.settings import ModelConfig


def asked_dtype(settings: ModelConfig) -> mx.Dtype | None:
    """Return the type to cast to, or None for the checkpoint's."""
    if settings.dtype != "auto":
        found: mx.Dtype = getattr(mx, settings.dtype)
        return found
    # On the CPU only float32 goes through BLAS, and some operations exist for nothing else.
    return mx.float32 if mx.default_device().type == mx.DeviceType.cpu else None


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Cast floating-point parameters, except those that the model keeps in float32 on purpose."""
    keeps = getattr(model, "cast_predicate", None)

    def cast_one(path: str, value: Any) -> Any:
        if not isinstance(value, mx.array) or not mx.issubdtype(value.dtype, mx.floating):
            return value
        if dtype != mx.float32 and keeps is not None and not keeps(path):
            return value
        return value.astype(dtype)

    model.update(tree_map_with_path(cast_one, model.parameters()))
