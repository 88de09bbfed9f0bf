"""Where each run of so many tokens ended before: exact, without keys, filled in slices.

An open-addressed table holds, per distinct run ("gram"), where it ended last; the tokens there are
the key, so nothing is found that is not so, whatever the hashes. A second array links each
occurrence to the one before it, as LZ77's hash chains do (RFC 1951, section 4). Both are flat
arrays of 4 bytes per entry: a dict of tuples would take some twenty times as much.

A table is never rebuilt, for that would take milliseconds at once: a full one is followed by
another, and the newest is asked first. The oldest goes when the others cover enough.
"""

from array import array
from collections.abc import Iterator

_SLOTS_MIN = 512
_LOAD = 0.7
"""Probes stay about two while at most this part of the slots is taken."""
WINDOW_TOKENS = 131_072
"""So much of the latest text is surely covered; what lies before may be forgotten."""


class _Table:
    """The occurrences of one stretch of the text."""

    __slots__ = ("begin", "distinct", "earlier", "full_at", "mask", "slots")

    def __init__(self, begin: int, slots: int) -> None:
        self.begin = begin
        """The first end that it may hold; `earlier` counts from here."""
        self.mask = slots - 1
        self.full_at = int(_LOAD * slots)
        self.distinct = 0
        self.slots = array("i", bytes(4 * slots))
        """By hash: where a gram ended last; 0: nothing, for no gram ends there."""
        self.earlier = array("i")
        """By end: where the same gram ended before, within this table; 0: nowhere."""

    @property
    def is_full(self) -> bool:
        """Whether another must follow: one that repeats itself would otherwise never end."""
        return self.distinct >= self.full_at or len(self.earlier) >= WINDOW_TOKENS


class GramIndex:
    """Occurrences of all runs of `size` tokens in a list that only grows.

    An occurrence is named by its end: the index of the token that follows it.
    """

    def __init__(self, tokens: list[int], size: int) -> None:
        """Begin empty.

        Args:
            tokens: the text; shared, not copied.
            size: tokens of a gram, at least 2.
        """
        self._tokens = tokens
        self._size = size
        self._next = size
        """The first end that is not in yet."""
        self._tables: list[_Table] = []
        """Newest first."""
        self.probes = 0
        """Slots looked at so far, a measure of work."""

    @property
    def bytes_held(self) -> int:
        """Memory of all tables."""
        return sum(
            4 * (len(table.slots) + table.earlier.buffer_info()[1]) for table in self._tables
        )

    @property
    def behind(self) -> int:
        """Occurrences that are known and not in yet: the last gram has nothing after it."""
        return max(0, len(self._tokens) - self._next)

    def add(self, count: int) -> int:
        """Take in up to `count` further occurrences that something follows; return how many."""
        size, begin, tokens = self._size, self._next, self._tokens
        stop = min(begin + count, len(tokens))
        if stop <= begin:
            return 0
        stretch = tokens[begin - size : stop - 1]
        table = self._room(begin)
        slots, mask = table.slots, table.mask
        probes = stop - begin
        shifted = [stretch[shift:] for shift in range(size)]
        for end, gram in enumerate(zip(*shifted, strict=False), begin):
            if table.is_full:
                table = self._room(end)
                slots, mask = table.slots, table.mask
            slot = hash(gram) & mask
            held = slots[slot]
            while held and tuple(tokens[held - size : held]) != gram:
                slot = (slot + 1) & mask
                held = slots[slot]
                probes += 1
            if not held:
                table.distinct += 1
            slots[slot] = end
            table.earlier.append(held)
        self.probes += probes
        self._next = stop
        return stop - begin

    def before(self, end: int) -> Iterator[int]:
        """Return where the gram that ends at `end` ended before, the latest first."""
        size, tokens = self._size, self._tokens
        if end < size:
            return
        gram = tokens[end - size : end]
        hashed = hash(tuple(gram))
        for table in self._tables:
            slots, mask = table.slots, table.mask
            slot = hashed & mask
            found = slots[slot]
            self.probes += 1
            while found and tokens[found - size : found] != gram:
                slot = (slot + 1) & mask
                found = slots[slot]
                self.probes += 1
            while found:
                if found < end:
                    yield found
                found = table.earlier[found - table.begin]

    def _room(self, end: int) -> _Table:
        """Return a table with room; a new one covers what is known, or half as much as is in."""
        if self._tables and not self._tables[0].is_full:
            return self._tables[0]
        wanted = max(_SLOTS_MIN, min(WINDOW_TOKENS, max(self.behind, end // 2)))
        self._tables.insert(0, _Table(end, 1 << (wanted - 1).bit_length()))
        while len(self._tables) > 1 and end - self._tables[-2].begin >= WINDOW_TOKENS:
            self._tables.pop()
        return self._tables[0]
