"""Divides the head, and the token embedding, between ranks by rows: by token ids.

The family's own code stays: it calls its head as before and gets the logits of this rank's part,
because the matrix has only these rows. An embedding with some of the rows returns zeros for the
tokens of other ranks, and one sum over ranks completes it.

Shapes: V token ids in the vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from services.rank_worker.kv_cache.rows.kv_shapes import read_shape
from services.rank_worker.model.sharding.mlp_split import is_linear
from services.rank_worker.model.sharding.module_paths import OTHER_MODEL, is_in_layer
from services.rank_worker.peers.collectives import Collectives
from services.rank_worker.sampling.vocabulary import VocabularyPart, part_size
from shared.log import Log
from shared.messages.rank_link import VocabularySplit
from shared.model.sharding.shares import HEAD_BYTES_MIN

_log = Log("rank_worker.loading")

_ROW_ARRAYS = ("weight", "scales", "biases", "bias")
"""Arrays of a matrix with one row, or number, per token."""


class HeadSplit:
    """Which matrices of a model are divided by token ids, and how."""

    def __init__(self, vocabulary: VocabularyPart, paths: list[str]) -> None:
        """Note the division of a model whose matrices are divided by `divide`.

        Args:
            vocabulary: all tokens, and this rank's part.
            paths: of the modules with one row per token that are divided.
        """
        self.vocabulary = vocabulary
        self.paths = paths

    @property
    def division(self) -> str:
        """Parts and their matrices, in words; equal on all ranks."""
        one = self.vocabulary
        return f"{one.parts} x {one.part_size} tokens: {', '.join(self.paths)}"

    @property
    def description(self) -> str:
        """Which tokens this rank has, in words."""
        one = self.vocabulary
        return f"tokens {one.start} to {one.stop - 1} of {one.size} of {' and '.join(self.paths)}"

    def divide(self, model: nn.Module, collectives: Collectives) -> None:
        """Keep this rank's rows of the matrices.

        Args:
            model: the model with lazy parameters; changed in place.
            collectives: the world's collectives.
        """
        modules = dict(model.named_modules())
        for path in self.paths:
            _keep_rows(modules[path], self.vocabulary)
            if _is_embedding(modules[path]):
                _sum_lookups(modules[path], self.vocabulary, collectives)


def split_head(
    model: nn.Module, wanted: VocabularySplit, collectives: Collectives
) -> HeadSplit | None:
    """Divide a model's head and, where it is the same matrix or wanted, its embedding.

    Nothing is computed. The result is equal on all ranks but for the part.

    Args:
        model: the model with lazy parameters, its layers divided already; changed in place.
        wanted: what to divide. "auto": the head, if it has at least HEAD_BYTES_MIN.
        collectives: the world's collectives.

    Returns:
        The division; None where the model's head is not found or not worth it, and stays whole.
    """
    if wanted == "off" or collectives.world_size == 1:
        return None
    try:
        size = read_shape(model).vocab_size
    except Exception as error:  # noqa: BLE001 - the model's code ran; the executor reports it
        _log.debug("head_not_found", detail=repr(error))
        return None
    if not part_size(size, collectives.world_size):
        return None
    ranks = collectives.rank, collectives.world_size
    vocabulary = VocabularyPart(size, *ranks, collectives.gather_arrays)
    heads, embeddings = _matrices(model, size)
    for path in heads + embeddings:
        head = dict(model.named_modules())[path]
        if wanted == "auto" and _bytes(head) < HEAD_BYTES_MIN:
            continue
        others = embeddings if wanted == "all" and path in heads else []
        if _divides_logits(model, head, vocabulary):
            found = HeadSplit(vocabulary, [path, *others])
            found.divide(model, collectives)
            return found
    return None


def find_head(model: nn.Module, size: int) -> nn.Module | None:
    """Return the matrix that computes a model's logits; None if it is not found.

    Args:
        model: the model, or one rank's part of it.
        size: number of logits that it computes per token.
    """
    heads, embeddings = _matrices(model, size)
    path = next(iter(heads + embeddings), None)
    return None if path is None else dict(model.named_modules())[path]


def _divides_logits(model: nn.Module, head: nn.Module, vocabulary: VocabularyPart) -> bool:
    """Tell whether a model computes the logits of some tokens if a matrix has only their rows."""
    before = dict(head)
    _keep_rows(head, vocabulary)
    try:
        return read_shape(model).vocab_size == vocabulary.stop - vocabulary.start
    finally:
        head.update(before)


def _keep_rows(matrix: nn.Module, vocabulary: VocabularyPart) -> None:
    """Keep the rows of this rank's tokens."""
    for name in _ROW_ARRAYS:
        if matrix.get(name) is not None:
            matrix[name] = matrix[name][vocabulary.start : vocabulary.stop]


def _matrices(model: nn.Module, size: int) -> tuple[list[str], list[str]]:
    """Return the paths of the linear layers and of the embeddings that have a row per token.

    Layers of the model are not searched. Several linear layers, or embeddings, are ambiguous: none
    is returned.
    """
    heads, embeddings = [], []
    for path, module in _outer_modules(model):
        if module.get("weight") is None or len(module.weight) != size:
            continue
        if is_linear(module):
            heads.append(path)
        elif _is_embedding(module):
            embeddings.append(path)
    return heads if len(heads) == 1 else [], embeddings if len(embeddings) == 1 else []


def _outer_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in sorted(model.named_modules()):
        if path and not is_in_layer(path) and not OTHER_MODEL.search(path):
            yield path, module


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.QuantizedEmbedding)


def _bytes(module: nn.Module) -> int:
    arrays = (module.get(name) for name in _ROW_ARRAYS)
    return sum(one.nbytes for one in arrays if one is not None)


def _sum_lookups(
    embedding: nn.Module, vocabulary: VocabularyPart, collectives: Collectives
) -> None:
    """Make an embedding with this rank's rows return those of all ranks' tokens."""
    original = type(embedding)
    # Looked up, not computed: for each chain of arithmetic on token ids in a compiled forward MLX
    # compiles a CUDA kernel, which takes seconds.
    ids = np.arange(vocabulary.size, dtype=np.int32)
    own = (vocabulary.start <= ids) & (ids < vocabulary.stop)
    row_of, is_own = mx.array(np.where(own, ids - vocabulary.start, 0)), mx.array(own)

    def call(self: nn.Module, tokens: mx.array) -> mx.array:
        found = original.__call__(self, row_of[tokens])
        found = mx.where(is_own[tokens][..., None], found, mx.array(0, found.dtype))
        return collectives.sum_over_ranks(found)

    changed: Any = type(original.__name__, (original,), {"__call__": call})
    embedding.__class__ = changed
