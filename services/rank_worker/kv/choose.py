"""Which of the two ways to hold KV a model gets."""

import mlx.core as mx
from mlx import nn

from services.rank_worker.kv.batches import BatchStore
from services.rank_worker.kv.interface import KVStore
from services.rank_worker.kv.rows import RowStore
from services.rank_worker.kv.shapes import ModelShape
from shared.errors import ConfigError


def open_store(model: nn.Module, shape: ModelShape) -> KVStore:
    """Return rows for plain keys and values, mlx-lm's batch caches for everything else.

    Raises:
        ConfigError: the model cannot run sequences of different lengths in one batch.
    """
    if not shape.is_plain:
        return BatchStore(model, shape.caches)
    _check_ragged(model, RowStore(shape.layers()))
    return RowStore(shape.layers())


def _check_ragged(model: nn.Module, store: RowStore) -> None:
    """Build, but never compute, a decode of two rows of different lengths.

    A few families reckon with one offset or one mask for the whole batch: better said at load than
    by a world that ends when the second request comes.
    """
    store.resize(2, 4)
    for slot, count in ((0, 1), (1, 2)):
        model(mx.zeros((1, count), dtype=mx.int32), cache=store.prefill(slot, count))
    view = store.decode([0, 1], 1)
    try:
        rows = model(mx.zeros((2, 1), dtype=mx.int32), cache=view.caches).shape[0]
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise ConfigError(
            f"mlx-lm's {type(model).__module__} cannot batch sequences of different lengths "
            f"({error}): choose another model."
        ) from error
    if rows != len(view.input_slots):
        raise ConfigError(
            f"mlx-lm's {type(model).__module__} returned {rows} rows for 2: choose another model."
        )
