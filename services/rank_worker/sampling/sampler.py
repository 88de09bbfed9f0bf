"""Sampler of one rank. Owns the settings and token counts of its sequences; keeps no logits.

Shapes: R rows of logits (a sequence with k drafts has k + 1), V token ids in the vocabulary.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import mlx.core as mx
import numpy as np

from services.rank_worker.sampling.drafts import StepDrafts
from services.rank_worker.sampling.gumbel_max import sample_gumbel_max
from services.rank_worker.sampling.logprobs import PendingLogprobs, pending_logprobs
from services.rank_worker.sampling.penalties import TokenCounts, UncountedTokens, add_bias, penalize
from services.rank_worker.sampling.row_settings import RowSelection, RowSettings
from shared.errors import InvariantBroken
from shared.messages import Sampling

SynchronizeIds = Callable[[mx.array], mx.array]
"""Makes int32 token ids of any shape equal on all ranks, as part of the graph."""


@dataclasses.dataclass(frozen=True, slots=True)
class SampledTokens:
    """Tokens sampled in one step. The arrays may not be computed yet."""

    tokens: mx.array
    """int32 [R], equal on all ranks."""
    top_logits: mx.array
    """float32 [R], the highest raw logit of each row; NaN when any logit of the row is NaN."""
    logprobs: PendingLogprobs | None
    """Of the rows that ask for them; None if no row does."""

    def arrays(self) -> list[mx.array]:
        """Return all arrays to evaluate: `tokens`, `top_logits`, and those of `logprobs` if any."""
        more = self.logprobs.arrays() if self.logprobs else []
        return [self.tokens, self.top_logits, *more]


class Sampler:
    """Samples tokens. Keeps the settings of each sequence and, for penalties, its token counts."""

    def __init__(self, vocab_size: int, synchronize: SynchronizeIds) -> None:
        """Create a sampler without sequences.

        Args:
            vocab_size: V, logits per row.
            synchronize: makes sampled ids, int32 [R], equal on all ranks, as part of the graph.
        """
        self.vocab_size = vocab_size
        """V."""
        self._synchronize = synchronize
        self._counts = TokenCounts(vocab_size)
        self._settings: dict[int, RowSettings] = {}

    def admit(
        self, sequence_id: int, sampling: Sampling, prompt: np.ndarray, completion: np.ndarray
    ) -> None:
        """Add a sequence.

        Args:
            sequence_id: id of the new sequence.
            sampling: its settings.
            prompt: token ids, int32 [prompt tokens].
            completion: token ids known so far, int32 [completion tokens].
        """
        settings = RowSettings(sampling, self.vocab_size)
        self._settings[sequence_id] = settings
        if settings.is_penalized:
            self._counts.admit(sequence_id, prompt, completion)

    def drop(self, sequence_id: int) -> None:
        """Remove a sequence, its settings and its token counts."""
        del self._settings[sequence_id]
        self._counts.drop(sequence_id)

    def sample(
        self,
        logits: mx.array,
        sequence_ids: Sequence[int],
        positions: Sequence[int],
        drafts: StepDrafts | None = None,
        exclusions: mx.array | None = None,
    ) -> SampledTokens:
        """Build the sampling of one token per row.

        For penalties, the new tokens of sequences without drafts are counted here. `count` counts
        those of sequences with drafts, when a plan says how many are accepted.

        Args:
            logits: [R, V] in the model's dtype.
            sequence_ids: the sequence of each row. The k + 1 rows of a sequence with k drafts are
                adjacent.
            positions: number of tokens before each row's new token in its sequence, prompt
                included.
            drafts: the drafts of these sequences. A row's penalties count the drafts before it.
            exclusions: [R, V], minus infinity for tokens that a row may not get, else 0; None: all
                are allowed. Highest logits and log probabilities are of all tokens in any case.

        Returns:
            Token ids, highest logits and log probabilities, not computed yet.
        """
        rows = [self._settings[sequence_id] for sequence_id in sequence_ids]
        if all(row.is_greedy_only for row in rows):
            tokens = mx.argmax(_mask(logits, exclusions), axis=-1).astype(mx.int32)
            top = logits.max(axis=-1).astype(mx.float32)
            return SampledTokens(self._synchronize(tokens), top, None)
        raw = logits.astype(mx.float32)
        with_drafts = drafts.counts if drafts is not None else {}
        uncounted = None
        if drafts is not None and any(row.is_penalized for row in rows):
            uncounted = _preceding_drafts(sequence_ids, drafts)
        tokens = self._synchronize(
            self._select_tokens(raw, rows, sequence_ids, positions, uncounted, exclusions)
        )
        counted = RowSelection.where(
            [
                row.is_penalized and sequence_id not in with_drafts
                for row, sequence_id in zip(rows, sequence_ids, strict=True)
            ]
        )
        if len(counted):
            ids = [sequence_ids[index] for index in counted.indices]
            self._counts.add(ids, counted.take(tokens))
        return SampledTokens(tokens, raw.max(axis=-1), pending_logprobs(raw, tokens, rows))

    def sample_drafts(
        self,
        logits: mx.array,
        sequence_ids: Sequence[int],
        positions: Sequence[int],
        uncounted: UncountedTokens | None = None,
    ) -> mx.array:
        """Sample drafts from a drafter's logits, as `sample` does at these positions.

        Random keys, settings and token counts are the same, so the closer the logits are to the
        model's, the more drafts are accepted. The drafts are not counted and not made equal on all
        ranks.

        Args:
            logits: [R, any vocabulary size] in any float dtype.
            sequence_ids: the sequence of each row.
            positions: number of tokens before each row's draft in its sequence, prompt included.
            uncounted: the drafts before these, for penalties.

        Returns:
            int32 [R].
        """
        rows = [self._settings[sequence_id] for sequence_id in sequence_ids]
        logits = _fit_vocabulary(logits, self.vocab_size)
        if not any(row.is_random or row.is_penalized or row.bias for row in rows):
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        return self._select_tokens(
            logits.astype(mx.float32), rows, sequence_ids, positions, uncounted
        )

    def penalizes(self, sequence_ids: Sequence[int]) -> bool:
        """Tell whether any of these sequences has a penalty, which needs token counts."""
        return any(self._settings[sequence_id].is_penalized for sequence_id in sequence_ids)

    def count(self, generated: Sequence[tuple[int, mx.array]]) -> None:
        """Count, for penalties, the tokens of sequences whose drafts were verified.

        Args:
            generated: for each sequence its id, and the ids of its accepted drafts and of the token
                sampled after them, int32 [tokens].
        """
        penalized = [
            (sequence_id, tokens)
            for sequence_id, tokens in generated
            if self._settings[sequence_id].is_penalized
        ]
        if penalized:
            ids = [sequence_id for sequence_id, tokens in penalized for _ in range(tokens.shape[0])]
            self._counts.add(ids, mx.concatenate([tokens for _, tokens in penalized]))

    def _select_tokens(
        self,
        logits: mx.array,
        rows: Sequence[RowSettings],
        sequence_ids: Sequence[int],
        positions: Sequence[int],
        uncounted: UncountedTokens | None,
        exclusions: mx.array | None = None,
    ) -> mx.array:
        """Return the token of each row, int32 [R].

        Args:
            logits: float32 [R, V].
            rows: the settings of each row.
            sequence_ids: the sequence of each row.
            positions: of the new token of each row in its sequence.
            uncounted: drafts that penalties count beside the table.
            exclusions: [R, V], as for `sample`.
        """
        biased = RowSelection.where([bool(row.bias) for row in rows])
        if len(biased):
            settings = [rows[index] for index in biased.indices]
            logits = biased.put(logits, add_bias(biased.take(logits), settings))
        penalized = RowSelection.where([row.is_penalized for row in rows])
        if len(penalized):
            settings = [rows[index] for index in penalized.indices]
            counts, seen = self._counts.read(
                [sequence_ids[index] for index in penalized.indices],
                uncounted.among(penalized.indices) if uncounted is not None else None,
            )
            penalized_logits = penalize(penalized.take(logits), settings, counts, seen)
            logits = penalized.put(logits, penalized_logits)
        logits = _mask(logits, exclusions)
        random = RowSelection.where([row.is_random for row in rows])
        if len(random) == len(rows):
            return sample_gumbel_max(logits, rows, positions)
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        if len(random):
            settings = [rows[index] for index in random.indices]
            some_positions = [positions[index] for index in random.indices]
            random_tokens = sample_gumbel_max(random.take(logits), settings, some_positions)
            tokens = random.put(tokens, random_tokens)
        return tokens


def _mask(logits: mx.array, exclusions: mx.array | None) -> mx.array:
    """Return logits plus exclusions, both [R, V], in the dtype of the logits."""
    return logits if exclusions is None else logits + exclusions.astype(logits.dtype)


def _preceding_drafts(sequence_ids: Sequence[int], drafts: StepDrafts) -> UncountedTokens:
    """Return, for each row, the drafts of its sequence before its new token."""
    row_counts: dict[int, int] = {}
    rows: list[int] = []
    indices: list[int] = []
    for row, sequence_id in enumerate(sequence_ids):
        preceding_count = row_counts.get(sequence_id, 0)
        row_counts[sequence_id] = preceding_count + 1
        preceding = drafts.index_range(sequence_id, min(preceding_count, drafts.count(sequence_id)))
        rows += [row] * len(preceding)
        indices += preceding
    return UncountedTokens(rows, drafts.ids[mx.array(indices, dtype=mx.int32)])


def _fit_vocabulary(logits: mx.array, vocab_size: int) -> mx.array:
    """Pad or cut logits [R, any size] to [R, V]: both models may pad their vocabularies."""
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        return mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
    return logits[:, :vocab_size] if missing else logits


def id_synchronizer(
    rank: int,
    world_size: int,
    synchronization: Literal["broadcast", "independent"],
    sum_ids: Callable[[mx.array], mx.array] | None,
) -> SynchronizeIds:
    """Return the function that makes sampled ids equal on all ranks.

    Args:
        rank: this rank.
        world_size: number of ranks.
        synchronization: "broadcast": all ranks take the ids of rank 0. "independent": each rank
            keeps its own ids; a difference between ranks changes the digest of the step.
        sum_ids: sums an int32 array over all ranks, as part of the graph; None with one rank.

    Raises:
        InvariantBroken: ids are to be broadcast, but there is no `sum_ids`.
    """
    if world_size == 1 or synchronization == "independent":
        return lambda ids: ids
    if sum_ids is None:
        raise InvariantBroken(
            f"{world_size} ranks broadcast sampled ids, but no sum over ranks was given"
        )
    # Multiplying instead of using zeros keeps the graphs alike: the sum depends on the forward on
    # every rank, so all ranks run their collectives in the same order.
    factor = mx.array(1 if rank == 0 else 0, dtype=mx.int32)
    return lambda ids: sum_ids(ids * factor)
