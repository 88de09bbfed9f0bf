"""Traits that all ranks must share, read from the model before its layers are divided.

In a pipeline each rank has some of the layers, and their kinds may differ between ranks. The row
format, the order of a batch and the grouping of prompts must follow from the whole model. Otherwise
ranks would exchange rows in different orders, and no receipt would show it.
"""

import dataclasses

from mlx import nn

from services.rank_worker.kv_cache.rows.kv_shapes import read_shape
from services.rank_worker.kv_cache.rows.store_choice import RowKind, row_kind
from services.rank_worker.model.forward import can_select_positions


@dataclasses.dataclass(frozen=True, slots=True)
class UnshardedTraits:
    """Properties of the whole model by which all ranks arrange rows and batches in the same way."""

    row_kind: RowKind
    """Kind of KV rows: plain or not, and whether they can be shortened or need checkpoints."""
    can_select: bool
    """The head can be computed for selected positions only; see `Forward`."""


def read_traits(model: nn.Module) -> UnshardedTraits:
    """Return a model's kind of KV rows, and whether its head can compute selected positions.

    Both are found by building forwards that are never computed.

    Args:
        model: the model with all of its layers and lazy parameters; not changed.
    """
    return UnshardedTraits(row_kind(model, read_shape(model)), can_select_positions(model))
