"""The vocabulary, divided between ranks. Owns the part of this rank; computes no logits.

Each rank computes the logits of consecutive token ids. Exchanges with the other ranks are part of
the graph, and have the same shape on every rank.

Shapes: R rows of logits, V token ids in the vocabulary, P of them in this rank's part, N ranks.
"""

import math
from collections.abc import Callable, Sequence

import mlx.core as mx

from shared.errors import InvariantBroken

ALIGNMENT = 64
"""Parts begin at multiples of this where possible: MLX's fast kernels need rows in such groups."""

GatherArrays = Callable[[mx.array], mx.array]
"""Puts the arrays of all ranks, [n] of one dtype each, behind one another in rank order, [N n]."""


class VocabularyPart:
    """The token ids whose logits this rank computes, out of all."""

    def __init__(
        self,
        size: int,
        rank: int = 0,
        parts: int = 1,
        gather_arrays: GatherArrays | None = None,
    ) -> None:
        """Divide a vocabulary.

        Args:
            size: V.
            rank: this rank.
            parts: N; with 1 the part is the whole vocabulary, and nothing is exchanged.
            gather_arrays: exchanges arrays with the other ranks; None with one part.

        Raises:
            InvariantBroken: a rank would get no token, or ranks cannot exchange arrays.
        """
        self.size = size
        """V."""
        self.rank = rank
        self.parts = parts
        """N."""
        self.part_size = part_size(size, parts)
        """Token ids of each part but the last, which may have fewer."""
        if not self.part_size or (parts > 1 and gather_arrays is None):
            raise InvariantBroken(f"{size} tokens cannot be divided between {parts} ranks")
        self.start = rank * self.part_size
        """The first token id of this rank's part."""
        self.stop = min(self.start + self.part_size, size)
        """The token id after the last of this rank's part."""
        self._gather_arrays = gather_arrays
        self.candidate_steps = 0
        """Steps that were sampled from candidates of each part, since the start."""
        self.gathered_steps = 0
        """Steps for which all logits were gathered, because a row needs them."""
        self.sent_bytes = 0
        """Bytes that this rank has given to exchanges."""

    @property
    def is_whole(self) -> bool:
        """Whether this rank computes the logits of all tokens."""
        return self.parts == 1

    def whole(self) -> "VocabularyPart":
        """Return the same vocabulary, undivided: for logits that all ranks have."""
        return self if self.is_whole else VocabularyPart(self.size)

    def own(self, columns: mx.array) -> mx.array:
        """Return this rank's columns, [..., P], of an array [..., V]."""
        return columns if self.is_whole else columns[..., self.start : self.stop]

    def gather(self, logits: mx.array) -> mx.array:
        """Return the logits of all tokens, [R, V], on every rank.

        Args:
            logits: [R, P] in any dtype, of this rank's part.
        """
        if self.is_whole:
            return logits
        rows = logits.shape[0]
        # The last part may have fewer columns, but all ranks must give arrays of one shape.
        padded = mx.pad(logits, [(0, 0), (0, self.part_size - logits.shape[1])])
        parts = self._gather(padded.reshape(-1)).reshape(self.parts, rows, self.part_size)
        return parts.transpose(1, 0, 2).reshape(rows, -1)[:, : self.size]

    def exchange(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """Return these arrays of every rank, [N, ...] each, in one exchange.

        Args:
            arrays: of any shapes, with items of four bytes.
        """
        if self.is_whole:
            return [array[None] for array in arrays]
        words = [array.reshape(-1).view(mx.uint32) for array in arrays]
        ends = [0]
        for one in words:
            ends.append(ends[-1] + one.size)
        everything = self._gather(mx.concatenate(words)).reshape(self.parts, -1)
        return [
            everything[:, begin:end].view(array.dtype).reshape(self.parts, *array.shape)
            for array, begin, end in zip(arrays, ends, ends[1:], strict=False)
        ]

    def _gather(self, flat: mx.array) -> mx.array:
        assert self._gather_arrays is not None
        self.sent_bytes += flat.nbytes
        return self._gather_arrays(flat)


def part_size(size: int, parts: int) -> int:
    """Return how many tokens each part but the last has; 0: some part would have none.

    Args:
        size: number of tokens.
        parts: number of parts.
    """
    even = -(-size // parts)
    aligned = math.ceil(even / ALIGNMENT) * ALIGNMENT
    fitting = (one for one in (aligned, even) if one > 0 and (parts - 1) * one < size)
    return next(fitting, 0) if parts > 1 else size
