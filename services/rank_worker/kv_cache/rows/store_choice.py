"""Chooses between the two implementations of `KVStore` for a model."""

import dataclasses

import mlx.core as mx
from mlx import nn

from services.rank_worker.device.execution_profile import RESIZE_AT_ONCE_BYTES_MAX
from services.rank_worker.kv_cache.rows.batch_cache_store import BatchCacheStore, needs_state
from services.rank_worker.kv_cache.rows.interface import KVStore
from services.rank_worker.kv_cache.rows.kv_shapes import ModelShape
from services.rank_worker.kv_cache.rows.row_store import RowStore
from shared.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class RowKind:
    """Whether a model's KV rows are plain keys and values, can be shortened, and need checkpoints.

    Equal on all ranks of a world.
    """

    is_plain: bool
    """All layers keep plain keys and values."""
    can_roll_back: bool
    """Rows can be shortened, and the model can decode several tokens per row."""
    needs_state: bool
    """A row can be rebuilt from blocks only together with the state at their end."""


def row_kind(model: nn.Module, shape: ModelShape) -> RowKind:
    """Return the properties of a model's rows; nothing is computed.

    Args:
        model: the whole model, because a rank's part may lack layers of some kind.
        shape: the result of `read_shape`.
    """
    if not shape.is_plain:
        return RowKind(is_plain=False, can_roll_back=False, needs_state=needs_state(shape.caches))
    # Only speculation needs several tokens per row; the model can be served without it.
    can_roll_back = _ragged_error(model, RowStore(shape.layers()), 2) is None
    return RowKind(is_plain=True, can_roll_back=can_roll_back, needs_state=False)


def open_store(
    model: nn.Module,
    shape: ModelShape,
    bits: int = 0,
    kind: RowKind | None = None,
    *,
    resize_at_once_bytes_max: int = RESIZE_AT_ONCE_BYTES_MAX,
) -> KVStore:
    """Return a `RowStore` for plain keys and values, a `BatchCacheStore` for anything else.

    Args:
        model: the model, or this rank's part of it.
        shape: the result of `read_shape`.
        bits: bits per stored number, 4 or 8; 0: the type that the model computes.
        kind: `row_kind` of the whole model; None: `model` has all layers, so it is found here.
        resize_at_once_bytes_max: see `RowStore`.

    Raises:
        ConfigError: when the model cannot batch sequences of different lengths, or its KV cannot be
            quantized.
    """
    kind = kind or row_kind(model, shape)
    if not kind.is_plain:
        if bits:
            raise _not_quantizable(model, "it keeps sliding windows or recurrent state")
        return BatchCacheStore(model, shape.caches, needs_state=kind.needs_state)
    error = _ragged_error(model, RowStore(shape.layers()), 1)
    if error is not None:
        raise ConfigError(
            f"mlx-lm's {type(model).__module__} cannot batch sequences of different lengths "
            f"({error}): choose another model."
        )
    return _row_store(model, shape, bits, kind, resize_at_once_bytes_max)


def _row_store(
    model: nn.Module, shape: ModelShape, bits: int, kind: RowKind, resize_at_once_bytes_max: int
) -> RowStore:
    try:
        store = RowStore(
            shape.layers(),
            bits,
            can_roll_back=kind.can_roll_back,
            resize_at_once_bytes_max=resize_at_once_bytes_max,
        )
    except ValueError as error:
        raise _not_quantizable(model, str(error)) from error
    # Attention that does not use mlx-lm's own function would receive packed numbers. It is refused
    # on CUDA too, where attention reads copies, because ranks on other devices must agree.
    for count in ((1, 2) if kind.can_roll_back else (1,)) if bits else ():
        packed = RowStore(shape.layers(), bits, reads_packed=True)
        cause = _ragged_error(model, packed, count)
        if cause is not None:
            raise _not_quantizable(model, cause)
    return store


def _not_quantizable(model: nn.Module, cause: str) -> ConfigError:
    return ConfigError(
        f"rank_worker.kv_bits: mlx-lm's {type(model).__module__} cannot keep its KV in fewer bits "
        f"({cause}): set it to 0."
    )


def _ragged_error(model: nn.Module, store: RowStore, count: int) -> str | None:
    """Return why the model cannot decode `count` tokens of rows of different lengths.

    Builds such a decode without computing it. A few families use one offset or one mask for the
    whole batch; this must be known at load, not when the second request arrives.

    Returns:
        The cause; None when the decode can be built.
    """
    lengths = (1, 2, 3)
    store.resize(len(lengths), 8)
    tokens = mx.zeros((len(lengths), count), dtype=mx.int32)
    try:
        for slot, length in enumerate(lengths):
            model(mx.zeros((1, length), dtype=mx.int32), cache=store.prefill(slot, length))
        view = store.decode(list(range(len(lengths))), count)
        shape = model(tokens, cache=view.caches).shape
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        return str(error)
    if shape[:2] != tokens.shape:
        return f"it returned logits of {list(shape[:2])} tokens for {list(tokens.shape)}"
    return None
