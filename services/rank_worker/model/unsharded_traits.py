"""What a model decides for all ranks alike, read off it before its layers are divided.

A rank of a pipeline has some of the layers, and these may be of another kind than its neighbours'.
How rows are held, in which order a batch stands, which prompts share a forward: all that must
follow from the whole model. Ranks that took it from their own layers would hand each other rows in
other orders or of other numbers, and nobody would see it: receipts hold what plans say.
"""

import dataclasses

from mlx import nn

from services.rank_worker.kv_cache.rows import RowKind, row_kind
from services.rank_worker.kv_cache.rows.shapes import read_shape
from services.rank_worker.model.forward import narrows


@dataclasses.dataclass(frozen=True, slots=True)
class UnshardedTraits:
    """Equal on all ranks."""

    rows: RowKind
    narrows: bool
    """Whether the head is computed for chosen positions only; see `Forward`."""


def read_whole(model: nn.Module) -> UnshardedTraits:
    """Build some forwards of a model; nothing is computed and no collective runs.

    Args:
        model: with all of its layers; its parameters may be lazy. It stays as it is.
    """
    return UnshardedTraits(row_kind(model, read_shape(model)), narrows(model))
