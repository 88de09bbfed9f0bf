"""Sampling settings of one row, and selection of the rows that need a step of the sampling."""

from collections.abc import Sequence

import mlx.core as mx

from services.rank_worker.sampling import keys
from shared.messages import Sampling

GREEDY_TEMPERATURE_MAX = 1e-5
"""Below this, dividing by the temperature in float32 loses differences between logits, so these
rows take the highest logit."""

CANDIDATES = 64
"""Likeliest tokens of a row, or of a rank's part of it, that are looked at where top_k is not
larger. A constant, because a sum over more of them could round differently."""


class RowSettings:
    """Sampling settings of one sequence, with flags for the parts of sampling that they need."""

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        """Derive a row's settings from a request's.

        Args:
            sampling: the request's sampling settings.
            vocab_size: number of token ids; a bias for higher ids is dropped.
        """
        self.sampling = sampling
        self.key_state = keys.initial_state(sampling.seed)
        self.is_random = sampling.temperature >= GREEDY_TEMPERATURE_MAX
        """Whether the token is drawn at random; otherwise it is the one with the highest logit."""
        has_top_k = self.is_random and 0 < sampling.top_k < vocab_size
        self.has_few_candidates = has_top_k and sampling.top_k <= CANDIDATES
        """Whether the draw is among the likeliest CANDIDATES tokens, because of top_k."""
        self.needs_whole_row = (
            self.is_random and not self.has_few_candidates and (has_top_k or sampling.top_p < 1.0)
        )
        """Whether top_k or top_p may keep any number of tokens: they need a sort of all logits."""
        self.is_penalized = (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )
        """Whether a repetition, presence or frequency penalty is set, which needs token counts."""
        self.bias = [(token, addend) for token, addend in sampling.logit_bias if token < vocab_size]
        """(token id, addend), without ids outside the vocabulary."""
        self.alternatives = sampling.top_logprobs
        """Number of likeliest tokens whose log probabilities are returned beside the sampled
        token's; None: no log probability is returned."""
        self.is_greedy_only = not (
            self.is_random or self.is_penalized or self.bias or self.alternatives is not None
        )
        """Whether the row only takes the highest raw logit and returns no log probabilities."""


class RowSelection:
    """Ascending indices of some rows of arrays, which `take` reads and `put` replaces.

    If all rows are selected, nothing is copied.
    """

    def __init__(self, indices: Sequence[int], total: int) -> None:
        """Select `indices`, ascending, out of `total` rows."""
        self.indices = list(indices)
        selects_all = len(self.indices) == total
        self._array = None if selects_all else mx.array(self.indices, dtype=mx.int32)

    @classmethod
    def where(cls, flags: Sequence[bool]) -> "RowSelection":
        """Select the rows whose flag is True; there is one flag per row."""
        return cls([index for index, flag in enumerate(flags) if flag], len(flags))

    def __len__(self) -> int:
        """Return the number of selected rows."""
        return len(self.indices)

    def take(self, batch: mx.array) -> mx.array:
        """Return the selected rows of a batch.

        Args:
            batch: [total, ...].

        Returns:
            [selected, ...] in the same order.
        """
        return batch if self._array is None else batch[self._array]

    def put(self, batch: mx.array, rows: mx.array) -> mx.array:
        """Return a copy of a batch in which the selected rows are replaced.

        Args:
            batch: [total, ...].
            rows: [selected, ...], the new contents.
        """
        if self._array is None:
            return rows
        result = batch[:]
        result[self._array] = rows
        return result
