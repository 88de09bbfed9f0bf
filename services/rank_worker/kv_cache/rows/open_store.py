"""Which of the two ways to hold KV a model gets."""

import dataclasses

import mlx.core as mx
from mlx import nn

from services.rank_worker.kv_cache.rows.batch_store import BatchStore, needs_state
from services.rank_worker.kv_cache.rows.interface import KVStore
from services.rank_worker.kv_cache.rows.kv_shapes import ModelShape
from services.rank_worker.kv_cache.rows.row_store import RowStore
from shared.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class RowKind:
    """How rows of a model are held. Ranks with parts of one model hold them in one way."""

    is_plain: bool
    """All of its layers keep plain keys and values."""
    can_roll_back: bool
    """Rows can be shortened, and a decode of several tokens per row is understood."""
    needs_state: bool
    """A row is rebuilt from blocks only together with a state at their end."""


def row_kind(model: nn.Module, shape: ModelShape) -> RowKind:
    """Tell how the rows of a model are to be held; nothing is computed.

    Args:
        model: whole, not a rank's part of one: that may lack layers of some kind.
        shape: what a forward showed of it.
    """
    if not shape.is_plain:
        return RowKind(is_plain=False, can_roll_back=False, needs_state=needs_state(shape.caches))
    # Only drafts need several tokens per row: without them the model is served all the same.
    rolls_back = _ragged_error(model, RowStore(shape.layers()), 2) is None
    return RowKind(is_plain=True, can_roll_back=rolls_back, needs_state=False)


def open_store(
    model: nn.Module, shape: ModelShape, bits: int = 0, kind: RowKind | None = None
) -> KVStore:
    """Return rows for plain keys and values, mlx-lm's batch caches for everything else.

    Args:
        model: whose KV it is.
        shape: what a forward showed of it.
        bits: per number that is kept, 4 or 8; 0: as computed.
        kind: of the whole model; None: `model` has all of its layers.

    Raises:
        ConfigError: the model cannot run sequences of different lengths in one batch, or its KV
            cannot be quantized.
    """
    kind = kind or row_kind(model, shape)
    if not kind.is_plain:
        if bits:
            raise _not_quantizable(model, "it keeps sliding windows or recurrent state")
        return BatchStore(model, shape.caches, needs_state=kind.needs_state)
    error = _ragged_error(model, RowStore(shape.layers()), 1)
    if error is not None:
        raise ConfigError(
            f"mlx-lm's {type(model).__module__} cannot batch sequences of different lengths "
            f"({error}): choose another model."
        )
    store = _rows(model, shape, bits, kind)
    store.can_roll_back = kind.can_roll_back
    return store


def _rows(model: nn.Module, shape: ModelShape, bits: int, kind: RowKind) -> RowStore:
    try:
        store = RowStore(shape.layers(), bits)
    except ValueError as error:
        raise _not_quantizable(model, str(error)) from error
    # Attention that does not go through mlx-lm's own function finds packed numbers.
    for count in (1, 2) if kind.can_roll_back else (1,):
        why = _ragged_error(model, RowStore(shape.layers(), bits), count) if bits else None
        if why is not None:
            raise _not_quantizable(model, why)
    return store


def _not_quantizable(model: nn.Module, why: str) -> ConfigError:
    return ConfigError(
        f"rank_worker.kv_bits: mlx-lm's {type(model).__module__} cannot keep its KV in fewer bits "
        f"({why}): set it to 0."
    )


def _ragged_error(model: nn.Module, store: RowStore, count: int) -> str | None:
    """Build, but never compute, a decode of `count` tokens for rows of different lengths.

    A few families reckon with one offset or one mask for the whole batch: better said at load than
    by a world that ends when the second request comes.

    Returns:
        What is wrong; None: nothing.
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
