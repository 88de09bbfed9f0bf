"""Drawing of one token per row, from the whole vocabulary or from parts on several ranks.

Each rank finds the tokens of its part that could be drawn, its candidates. One exchange gives all
candidates to all ranks. Each rank draws from these, and gets the token that one rank draws from all
logits: of equal values the lowest token id wins.

- A greedy row, and a random one without top_k and top_p, has one candidate on each rank: the token
  with the highest logit, or with the highest score. min_p compares each token with the likeliest
  one only, so a rank applies it to its own part.
- A row with a top_k of at most CANDIDATES has as many candidates on each rank: the likeliest.
- Other rows need all logits (`RowSettings.needs_whole_row`).

Shapes: R rows, P token ids in this rank's part, N ranks.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from services.rank_worker.sampling.gumbel_max import draw_truncated, likely_enough, score
from services.rank_worker.sampling.row_settings import CANDIDATES, RowSelection, RowSettings
from services.rank_worker.sampling.vocabulary import VocabularyPart


@dataclasses.dataclass(frozen=True, slots=True)
class Draws:
    """Tokens drawn in one step. The arrays may not be computed yet."""

    tokens: mx.array
    """int32 [R]."""
    raw: mx.array
    """float32 [R], the raw logits of these tokens."""
    others: list[mx.array]
    """[N, ...] each: the arrays that were exchanged with the candidates."""


class _Candidates(NamedTuple):
    """Tokens of some rows that may be drawn, [rows, count] each or, of all ranks, [N, rows, count].

    Those of a row are in rising order of ids, or the likeliest first.
    """

    scaled: mx.array
    """float32, logits by which `truncate` orders; of a row with one candidate not used."""
    scores: mx.array
    """float32: the token with the highest score is drawn."""
    raw: mx.array
    """float32, the logits that the model computed."""
    ids: mx.array
    """int32."""

    def of(self, rows: RowSelection) -> "_Candidates":
        """Return the candidates of some rows."""
        return _Candidates(*map(rows.take, self))

    def take(self, places: mx.array) -> "_Candidates":
        """Return the candidates at these places of each row, integer [rows, any]."""
        return _Candidates(*(mx.take_along_axis(one, places, axis=-1) for one in self))

    def joined(self) -> "_Candidates":
        """Return the candidates of all ranks side by side, [rows, N count]."""
        return _Candidates(*(one.transpose(1, 0, 2).flatten(1) for one in self))


def draw_tokens(
    logits: mx.array,
    raw: mx.array,
    rows: Sequence[RowSettings],
    positions: Sequence[int],
    vocabulary: VocabularyPart,
    others: Sequence[mx.array] = (),
) -> Draws:
    """Draw one token per row. Runs one exchange, or two if a row is random.

    Args:
        logits: float32 [R, P], with bias, penalties and masks.
        raw: float32 [R, P], as the model computed them.
        rows: settings of each row; none needs its whole row unless the vocabulary is whole.
        positions: of the new token of each row in its sequence.
        vocabulary: whose part the logits are.
        others: arrays with items of four bytes to exchange with the candidates.
    """
    part = _score(logits, raw, rows, positions, vocabulary)
    # A part may have no likely token at all: then its candidate must lose against all others.
    likely = part._replace(scores=_without_unlikely(part, rows))
    best = likely.take(mx.argmax(likely.scores, axis=-1, keepdims=True))
    few = RowSelection.where([row.has_few_candidates for row in rows])
    found = [best, *([_likeliest(part.of(few), vocabulary)] if len(few) else [])]
    if vocabulary.is_whole:
        exchanged = [one[None] for one in others]
    else:
        found, exchanged = _exchange(found, others, vocabulary)
        best = found[0].take(mx.argmax(found[0].scores, axis=-1, keepdims=True))
    drawn = best.ids[:, 0], best.raw[:, 0]
    if len(few):
        few_rows = [rows[index] for index in few.indices]
        drawn = _replaced(drawn, few, _draw_truncated(found[1], few_rows))
    many = RowSelection.where([row.needs_whole_row for row in rows])
    if len(many):
        many_rows = [rows[index] for index in many.indices]
        drawn = _replaced(drawn, many, _draw_truncated(_in_order(part.of(many)), many_rows))
    return Draws(*drawn, exchanged)


def _score(
    logits: mx.array,
    raw: mx.array,
    rows: Sequence[RowSettings],
    positions: Sequence[int],
    vocabulary: VocabularyPart,
) -> _Candidates:
    """Return all tokens of this part, [R, P]; the scores of greedy rows are their logits."""
    ids = mx.arange(vocabulary.start, vocabulary.stop, dtype=mx.int32)
    part = _Candidates(logits, logits, raw, mx.broadcast_to(ids[None], logits.shape))
    random = RowSelection.where([row.is_random for row in rows])
    if not len(random):
        return part
    chosen = random.take(logits)
    (highest,) = vocabulary.exchange([chosen.max(axis=-1)])
    scaled, scores = score(
        chosen,
        highest.max(axis=0),
        [rows[index] for index in random.indices],
        [positions[index] for index in random.indices],
        vocabulary,
    )
    return part._replace(scaled=random.put(logits, scaled), scores=random.put(logits, scores))


def _without_unlikely(part: _Candidates, rows: Sequence[RowSettings]) -> mx.array:
    """Return the scores, [R, P], with minus infinity for tokens that min_p alone excludes."""
    limited = RowSelection.where([row.is_random and row.sampling.min_p > 0.0 for row in rows])
    if not len(limited):
        return part.scores
    limited_rows = [rows[index] for index in limited.indices]
    scores = limited.take(part.scores)
    is_kept = likely_enough(limited.take(part.scaled), limited_rows)
    return limited.put(part.scores, mx.where(is_kept, scores, -mx.inf))


def _likeliest(part: _Candidates, vocabulary: VocabularyPart) -> _Candidates:
    """Return the likeliest tokens of a part: CANDIDATES, or V in a smaller vocabulary.

    A smaller part is filled up with impossible tokens.
    """
    count = min(CANDIDATES, vocabulary.size)
    found = part.take(mx.argsort(-part.scaled, axis=-1)[:, :count])
    missing = count - found.ids.shape[-1]
    if not missing:
        return found
    width = [(0, 0), (0, missing)]
    fills = -mx.inf, -mx.inf, -mx.inf, 0
    return _Candidates(
        *(mx.pad(one, width, constant_values=fill) for one, fill in zip(found, fills, strict=True))
    )


def _exchange(
    found: Sequence[_Candidates], others: Sequence[mx.array], vocabulary: VocabularyPart
) -> tuple[list[_Candidates], list[mx.array]]:
    """Exchange candidates and other arrays with all ranks, in one exchange.

    Returns:
        (candidates of all ranks by row, in the order that `_Candidates` demands; the other arrays
        by rank).
    """
    fields = len(_Candidates._fields)
    sent = [array for one in found for array in one]
    received = vocabulary.exchange([*sent, *others])
    joined = [
        _Candidates(*received[begin : begin + fields]).joined()
        for begin in range(0, len(sent), fields)
    ]
    # The first has the best token of each part; of the second, the likeliest of all parts are kept.
    likeliest = [_likeliest(one, vocabulary) for one in joined[1:]]
    return [joined[0], *likeliest], received[len(sent) :]


def _in_order(candidates: _Candidates) -> _Candidates:
    """Return the candidates with the likeliest first."""
    return candidates.take(mx.argsort(-candidates.scaled, axis=-1))


def _draw_truncated(
    candidates: _Candidates, rows: Sequence[RowSettings]
) -> tuple[mx.array, mx.array]:
    """Draw from the candidates that top_k, top_p and min_p keep; return ids and raw logits, [R]."""
    places = draw_truncated(candidates.scaled, candidates.scores, rows)
    chosen = candidates.take(places[:, None])
    return chosen.ids[:, 0], chosen.raw[:, 0]


def _replaced(
    drawn: tuple[mx.array, mx.array], rows: RowSelection, by: tuple[mx.array, mx.array]
) -> tuple[mx.array, mx.array]:
    """Return ids and raw logits, [R], with those of some rows replaced."""
    return rows.put(drawn[0], by[0]), rows.put(drawn[1], by[1])
