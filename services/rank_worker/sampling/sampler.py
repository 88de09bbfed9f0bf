"""From the logits of one step to its tokens: rows pay only for what they ask for."""

import dataclasses
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from services.rank_worker.sampling.drafts import Drafts
from services.rank_worker.sampling.draw import draw
from services.rank_worker.sampling.logprobs import PendingLogprobs, pending_logprobs
from services.rank_worker.sampling.penalties import TokenCounts, Uncounted, add_bias, penalize
from services.rank_worker.sampling.rows import Chosen
from services.rank_worker.sampling.settings import RowSettings, read_settings
from shared.messages import Sampling


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens of one step, on the device, perhaps not computed yet."""

    tokens: mx.array
    """int32 [rows], equal on all ranks."""
    top_logits: mx.array
    """float32 [rows], each row's highest raw logit. NaN when any of the row is NaN."""
    logprobs: PendingLogprobs | None

    def arrays(self) -> list[mx.array]:
        """Return what must be evaluated."""
        more = self.logprobs.arrays() if self.logprobs else []
        return [self.tokens, self.top_logits, *more]


class Sampler:
    """Draws tokens; keeps per sequence its settings and, for penalties, token counts."""

    def __init__(self, vocab_size: int, share: Callable[[mx.array], mx.array]) -> None:
        """Start without sequences.

        Args:
            vocab_size: logits per row.
            share: makes sampled ids (int32 [rows]) equal on all ranks, inside the graph.
        """
        self._vocab_size = vocab_size
        self._share = share
        self._counts = TokenCounts(vocab_size)
        self._settings: dict[int, RowSettings] = {}

    def admit(
        self, sequence_id: int, sampling: Sampling, prompt: np.ndarray, completion: np.ndarray
    ) -> None:
        """Take in a sequence whose known tokens (int32) are `prompt` and then `completion`."""
        settings = read_settings(sampling, self._vocab_size)
        self._settings[sequence_id] = settings
        if settings.is_penalized:
            self._counts.admit(sequence_id, prompt, completion)

    def drop(self, sequence_id: int) -> None:
        """Forget a sequence."""
        del self._settings[sequence_id]
        self._counts.drop(sequence_id)

    def draw(
        self,
        logits: mx.array,
        sequence_ids: Sequence[int],
        positions: Sequence[int],
        drafts: Drafts | None = None,
    ) -> Drawn:
        """Build the draw of one token per row, counted at once where the row has no drafts.

        Args:
            logits: [rows, vocab] in the model's dtype.
            sequence_ids: whose row each is. One with k drafts has k + 1, next to each other.
            positions: per row, the new token's position in its whole sequence.
            drafts: of these sequences. A row counts the drafts before it; what the sequence
                generates of its tokens is known later, and then told to `count`.
        """
        rows = [self._settings[one] for one in sequence_ids]
        if all(row.is_plain for row in rows):
            tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
            top = logits.max(axis=-1).astype(mx.float32)
            return Drawn(self._share(tokens), top, None)
        raw = logits.astype(mx.float32)
        waiting = drafts.counts if drafts is not None else {}
        uncounted = None
        if drafts is not None and any(row.is_penalized for row in rows):
            uncounted = _before(sequence_ids, drafts)
        tokens = self._share(self._choose(raw, rows, sequence_ids, positions, uncounted))
        counted = _chosen(
            [
                row.is_penalized and one not in waiting
                for row, one in zip(rows, sequence_ids, strict=True)
            ]
        )
        if len(counted):
            ids = [sequence_ids[index] for index in counted.indices]
            self._counts.add(ids, counted.take(tokens))
        return Drawn(tokens, raw.max(axis=-1), _logprobs(raw, tokens, rows))

    def guess(
        self,
        logits: mx.array,
        sequence_ids: Sequence[int],
        positions: Sequence[int],
        uncounted: Uncounted | None = None,
    ) -> mx.array:
        """Draw drafts as `draw` will draw at these positions, but from a proposer's logits.

        Keys, settings and counts are the same, so the better the logits agree, the more often the
        drafts are accepted. Nothing is counted, and nothing shared with other ranks.

        Args:
            logits: [rows, vocab of the proposer].
            sequence_ids: whose row each is.
            positions: per row, the draft's position in its whole sequence.
            uncounted: drafts before these.

        Returns:
            int32 [rows].
        """
        rows = [self._settings[one] for one in sequence_ids]
        logits = _fitted(logits, self._vocab_size)
        if not any(row.is_random or row.is_penalized or row.bias for row in rows):
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        return self._choose(logits.astype(mx.float32), rows, sequence_ids, positions, uncounted)

    def penalizes(self, sequence_ids: Sequence[int]) -> bool:
        """Tell whether drafts before a position matter for any of these sequences."""
        return any(self._settings[one].is_penalized for one in sequence_ids)

    def count(self, generated: Sequence[tuple[int, mx.array]]) -> None:
        """Count what sequences with drafts have generated: (sequence id, int32 [tokens]) each."""
        penalized = [
            (sequence_id, tokens)
            for sequence_id, tokens in generated
            if self._settings[sequence_id].is_penalized
        ]
        if penalized:
            ids = [one for one, tokens in penalized for _ in range(tokens.shape[0])]
            self._counts.add(ids, mx.concatenate([tokens for _, tokens in penalized]))

    def _choose(
        self,
        logits: mx.array,
        rows: Sequence[RowSettings],
        sequence_ids: Sequence[int],
        positions: Sequence[int],
        uncounted: Uncounted | None,
    ) -> mx.array:
        biased = _chosen([bool(row.bias) for row in rows])
        if len(biased):
            some = [rows[index] for index in biased.indices]
            logits = biased.put(logits, add_bias(biased.take(logits), some))
        penalized = _chosen([row.is_penalized for row in rows])
        if len(penalized):
            some = [rows[index] for index in penalized.indices]
            counts, seen = self._counts.read(
                [sequence_ids[i] for i in penalized.indices],
                uncounted.among(penalized.indices) if uncounted is not None else None,
            )
            changed = penalize(penalized.take(logits), some, counts, seen)
            logits = penalized.put(logits, changed)
        random = _chosen([row.is_random for row in rows])
        if len(random) == len(rows):
            return draw(logits, rows, positions)
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        if len(random):
            some = [rows[index] for index in random.indices]
            drawn = draw(random.take(logits), some, [positions[i] for i in random.indices])
            tokens = random.put(tokens, drawn)
        return tokens


def _chosen(flags: list[bool]) -> Chosen:
    return Chosen([index for index, flag in enumerate(flags) if flag], len(flags))


def _before(sequence_ids: Sequence[int], drafts: Drafts) -> Uncounted:
    """Return per row the drafts that stand before its new token."""
    places: dict[int, int] = {}
    rows: list[int] = []
    indices: list[int] = []
    for row, sequence_id in enumerate(sequence_ids):
        place = places.get(sequence_id, 0)
        places[sequence_id] = place + 1
        before = drafts.places(sequence_id, min(place, drafts.count(sequence_id)))
        rows += [row] * len(before)
        indices += before
    return Uncounted(rows, drafts.ids[mx.array(indices, dtype=mx.int32)])


def _fitted(logits: mx.array, vocab_size: int) -> mx.array:
    """Return logits of as many tokens as the target has: both pad their vocabularies."""
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        return mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
    return logits[:, :vocab_size] if missing else logits


def _logprobs(
    logits: mx.array, tokens: mx.array, rows: Sequence[RowSettings]
) -> PendingLogprobs | None:
    asking = _chosen([row.alternatives is not None for row in rows])
    if not len(asking):
        return None
    alternatives = [rows[index].alternatives or 0 for index in asking.indices]
    return pending_logprobs(logits, asking, tokens, alternatives)
