"""Sampler of one rank. Owns the settings and token counts of its sequences; keeps no logits.

Shapes: R rows of logits (a sequence with k drafts has k + 1), V token ids in the vocabulary, P of
them in this rank's part; P is V where every rank computes all logits.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import mlx.core as mx
import numpy as np

from services.rank_worker.sampling.drafts import StepDrafts
from services.rank_worker.sampling.draws import draw_tokens
from services.rank_worker.sampling.logprobs import (
    PendingLogprobs,
    logprobs_of_part,
    pending_logprobs,
)
from services.rank_worker.sampling.penalties import TokenCounts, UncountedTokens, add_bias, penalize
from services.rank_worker.sampling.row_settings import RowSelection, RowSettings
from services.rank_worker.sampling.vocabulary import VocabularyPart
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

    def __init__(self, vocabulary: VocabularyPart, synchronize: SynchronizeIds) -> None:
        """Create a sampler without sequences.

        Args:
            vocabulary: all token ids, and the part whose logits this rank computes.
            synchronize: makes sampled ids, int32 [R], equal on all ranks, as part of the graph.
        """
        self.vocabulary = vocabulary
        self._synchronize = synchronize
        self._counts = TokenCounts(vocabulary.size)
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
        settings = RowSettings(sampling, self.vocabulary.size)
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
            logits: [R, P] in the model's dtype.
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
        logits, vocabulary = self._fit_part(logits, rows)
        if vocabulary.is_whole:
            self.vocabulary.gathered_steps += not self.vocabulary.is_whole
        else:
            self.vocabulary.candidate_steps += 1
        if vocabulary.is_whole and all(row.is_greedy_only for row in rows):
            tokens = mx.argmax(_mask(logits, exclusions), axis=-1).astype(mx.int32)
            top = logits.max(axis=-1).astype(mx.float32)
            return SampledTokens(self._synchronize(tokens), top, None)
        raw = logits.astype(mx.float32)
        uncounted = None
        if drafts is not None and any(row.is_penalized for row in rows):
            uncounted = _preceding_drafts(sequence_ids, drafts)
        adjusted = self._adjust(raw, rows, sequence_ids, uncounted, exclusions, vocabulary)
        own_logprobs = logprobs_of_part(raw, rows, vocabulary)
        drawn = draw_tokens(
            adjusted, raw, rows, positions, vocabulary, [raw.max(axis=-1), *own_logprobs]
        )
        tokens = drawn.tokens
        if vocabulary.is_whole or any(row.has_few_candidates for row in rows):
            tokens = self._synchronize(tokens)
        # Otherwise every rank has compared the same numbers, which no device does differently.
        self._count_new(tokens, rows, sequence_ids, drafts)
        top_logits, *logprobs = drawn.others
        return SampledTokens(
            tokens, top_logits.max(axis=0), pending_logprobs(drawn.raw, logprobs, rows)
        )

    def sample_drafts(
        self,
        logits: mx.array,
        sequence_ids: Sequence[int],
        positions: Sequence[int],
        uncounted: UncountedTokens | None = None,
        *,
        of_part: bool = False,
    ) -> mx.array:
        """Sample drafts from a drafter's logits, as `sample` does at these positions.

        Random keys, settings and token counts are the same, so the closer the logits are to the
        model's, the more drafts are accepted. The drafts are not counted and not made equal on all
        ranks.

        Args:
            logits: [R, any vocabulary size] in any float dtype, or [R, P].
            sequence_ids: the sequence of each row.
            positions: number of tokens before each row's draft in its sequence, prompt included.
            uncounted: the drafts before these, for penalties.
            of_part: whether the logits are those of this rank's part, from the model's own head.

        Returns:
            int32 [R].
        """
        rows = [self._settings[sequence_id] for sequence_id in sequence_ids]
        if of_part:
            logits, vocabulary = self._fit_part(logits, rows)
        else:
            vocabulary = self.vocabulary.whole()
            logits = _fit_vocabulary(logits, vocabulary.size)
        is_adjusted = any(row.is_random or row.is_penalized or row.bias for row in rows)
        if vocabulary.is_whole and not is_adjusted:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        logits = logits.astype(mx.float32)
        adjusted = self._adjust(logits, rows, sequence_ids, uncounted, None, vocabulary)
        return draw_tokens(adjusted, logits, rows, positions, vocabulary).tokens

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

    def _fit_part(
        self, logits: mx.array, rows: Sequence[RowSettings]
    ) -> tuple[mx.array, VocabularyPart]:
        """Gather all logits if a row needs them.

        Only settings decide, which all ranks have: what ranks compute may not choose their
        collectives.

        Returns:
            (logits [R, P] or [R, V], whose part of the vocabulary they are).
        """
        if not any(row.needs_whole_row for row in rows):
            return logits, self.vocabulary
        return self.vocabulary.gather(logits), self.vocabulary.whole()

    def _count_new(
        self,
        tokens: mx.array,
        rows: Sequence[RowSettings],
        sequence_ids: Sequence[int],
        drafts: StepDrafts | None,
    ) -> None:
        """Count the new tokens, int32 [R], of penalized sequences without drafts."""
        with_drafts = drafts.counts if drafts is not None else {}
        counted = RowSelection.where(
            [
                row.is_penalized and sequence_id not in with_drafts
                for row, sequence_id in zip(rows, sequence_ids, strict=True)
            ]
        )
        if len(counted):
            ids = [sequence_ids[index] for index in counted.indices]
            self._counts.add(ids, counted.take(tokens))

    def _adjust(
        self,
        logits: mx.array,
        rows: Sequence[RowSettings],
        sequence_ids: Sequence[int],
        uncounted: UncountedTokens | None,
        exclusions: mx.array | None,
        vocabulary: VocabularyPart,
    ) -> mx.array:
        """Return logits, float32 [R, P], with bias, penalties and masks.

        Args:
            logits: float32 [R, P].
            rows: the settings of each row.
            sequence_ids: the sequence of each row.
            uncounted: drafts that penalties count beside the table.
            exclusions: [R, V], as for `sample`.
            vocabulary: whose part the logits are.
        """
        biased = RowSelection.where([bool(row.bias) for row in rows])
        if len(biased):
            settings = [rows[index] for index in biased.indices]
            logits = biased.put(logits, add_bias(biased.take(logits), settings, vocabulary))
        penalized = RowSelection.where([row.is_penalized for row in rows])
        if len(penalized):
            settings = [rows[index] for index in penalized.indices]
            counts, seen = self._counts.read(
                [sequence_ids[index] for index in penalized.indices],
                uncounted.among(penalized.indices) if uncounted is not None else None,
            )
            counts, seen = vocabulary.own(counts), vocabulary.own(seen)
            penalized_logits = penalize(penalized.take(logits), settings, counts, seen)
            logits = penalized.put(logits, penalized_logits)
        return _mask(logits, None if exclusions is None else vocabulary.own(exclusions))


def _mask(logits: mx.array, exclusions: mx.array | None) -> mx.array:
    """Return logits plus exclusions, both [R, P], in the dtype of the logits."""
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
