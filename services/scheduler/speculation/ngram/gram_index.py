"""N-gram index. Owns where each n-gram of a text ended before; exact and extended in slices.

An open-addressed hash table holds, per distinct n-gram, where it ended last. The tokens there are
compared, so hash collisions cause no wrong results. A second array links each occurrence to the one
before it, like the hash chains of LZ77 (RFC 1951, section 4). Both are flat arrays of 4 bytes per
entry; a dict of tuples would take about twenty times as much memory.

A table is never rebuilt, since that would take milliseconds at once. A full table is followed by a
new one, which is searched first; the oldest is dropped when the others cover enough text.
"""

from array import array
from collections.abc import Iterator, Sequence

_BUCKETS_MIN = 512
_LOAD = 0.7
"""Most part of the buckets in use, so that a lookup reads about two buckets."""
WINDOW_TOKENS = 131_072
"""Tokens at the end of the text that are always covered; earlier ones may be dropped."""


class _Table:
    """The occurrences in one section of the text."""

    __slots__ = ("begin", "buckets", "distinct", "earlier", "full_at", "mask")

    def __init__(self, begin: int, buckets: int) -> None:
        self.begin = begin
        """The first end in this table; `earlier` is indexed from here."""
        self.mask = buckets - 1
        self.full_at = int(_LOAD * buckets)
        self.distinct = 0
        self.buckets = array("i", bytes(4 * buckets))
        """By hash: where an n-gram ended last; 0: empty."""
        self.earlier = array("i")
        """By end: where the same n-gram ended before in this table; 0: nowhere."""

    @property
    def is_full(self) -> bool:
        """Whether a new table must follow. A repetitive text fills `earlier` before the buckets."""
        return self.distinct >= self.full_at or len(self.earlier) >= WINDOW_TOKENS


class GramIndex:
    """Occurrences of all n-grams of `size` tokens in a text that only grows.

    An occurrence is identified by its end: the index of the token that follows it.
    """

    def __init__(self, tokens: Sequence[int], size: int) -> None:
        """Start empty.

        Args:
            tokens: the text, which is not copied.
            size: tokens of an n-gram, at least 2.
        """
        self._tokens = tokens
        self._size = size
        self._next = size
        """The first end that is not indexed."""
        self._tables: list[_Table] = []
        """Newest first."""

    @property
    def tokens_unindexed(self) -> int:
        """Number of n-gram occurrences in the known text that `add` has not indexed yet."""
        return max(0, len(self._tokens) - self._next)

    def add(self, count: int) -> int:
        """Index up to `count` more n-grams of the text; return how many were indexed."""
        size, begin, tokens = self._size, self._next, self._tokens
        stop = min(begin + count, len(tokens))
        if stop <= begin:
            return 0
        stretch = tokens[begin - size : stop - 1]
        table = self._table_with_room(begin)
        buckets, mask = table.buckets, table.mask
        shifted = [stretch[shift:] for shift in range(size)]
        for end, gram in enumerate(zip(*shifted, strict=False), begin):
            if table.is_full:
                table = self._table_with_room(end)
                buckets, mask = table.buckets, table.mask
            bucket = hash(gram) & mask
            held = buckets[bucket]
            while held and tuple(tokens[held - size : held]) != gram:
                bucket = (bucket + 1) & mask
                held = buckets[bucket]
            if not held:
                table.distinct += 1
            buckets[bucket] = end
            table.earlier.append(held)
        self._next = stop
        return stop - begin

    def earlier_ends(self, end: int) -> Iterator[int]:
        """Yield the ends of earlier occurrences of an n-gram, the latest first.

        Args:
            end: end of the n-gram: the index in the text of the token that follows it.
        """
        size, tokens = self._size, self._tokens
        if end < size:
            return
        gram = tokens[end - size : end]
        hashed = hash(tuple(gram))
        for table in self._tables:
            buckets, mask = table.buckets, table.mask
            bucket = hashed & mask
            found = buckets[bucket]
            while found and tokens[found - size : found] != gram:
                bucket = (bucket + 1) & mask
                found = buckets[bucket]
            while found:
                if found < end:
                    yield found
                found = table.earlier[found - table.begin]

    def _table_with_room(self, end: int) -> _Table:
        """Return the newest table, or a new one sized by the tokens to index and indexed so far."""
        if self._tables and not self._tables[0].is_full:
            return self._tables[0]
        wanted = max(_BUCKETS_MIN, min(WINDOW_TOKENS, max(self.tokens_unindexed, end // 2)))
        self._tables.insert(0, _Table(end, 1 << (wanted - 1).bit_length()))
        while len(self._tables) > 1 and end - self._tables[-2].begin >= WINDOW_TOKENS:
            self._tables.pop()
        return self._tables[0]
