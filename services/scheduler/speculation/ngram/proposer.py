"""Prompt lookup: what followed the same tokens earlier in the prompt or the completion.

Source: Saxena, "Prompt Lookup Decoding" (2023); vLLM's ngram proposer also takes the longest match
of several lengths. Here the length is not bounded by the grams that are indexed: occurrences of the
last 4 tokens, and only when there are none those of the last 2, are compared backwards, the latest
first, and the longest match wins, the latest of equals.

A match goes on by itself: as long as the tokens that come are those that followed it, it is the
longest there is (one more token cannot have a match longer by two), so nothing is searched. That
also keeps a copy on its source where boilerplate repeats.
"""

from services.scheduler.speculation.ngram.gram_index import GramIndex
from services.scheduler.speculation.ngram.interface import Judge

_GRAMS = ((4, 32), (2, 12))
"""(tokens of a gram, occurrences of it that are compared), the longest gram first."""
MATCHED_MAX = 32
"""Matches are compared, and counted, up to so many tokens."""
_JUDGED_MAX = 64
"""More new tokens than this are not what steps have brought: they are not judged."""


class NgramProposer:
    """Prompt lookup for one sequence. Costs are bounded by constants, whatever the length."""

    def __init__(self, tokens: list[int], judge: Judge) -> None:
        """Look up in `tokens`, the sequence's own list, telling `judge` how lookups fared."""
        self.compared = 0
        """Tokens compared so far, a measure of work."""
        self._judge = judge
        self.reset(tokens)

    def reset(self, tokens: list[int]) -> None:
        """Begin with another text; nothing of it is looked at yet."""
        self._tokens = tokens
        self._indexes = [GramIndex(tokens, size) for size, _ in _GRAMS]
        self._judged = 0
        """Tokens taken in, the prompt's included."""
        self._source = 0
        """What follows the match begins here; 0: there is none."""
        self._matched = 0

    @property
    def matched(self) -> int:
        """Tokens before the source that equal the last ones, up to MATCHED_MAX; 0: none."""
        return self._matched

    @property
    def bytes_held(self) -> int:
        """Memory of the indexes."""
        return sum(index.bytes_held for index in self._indexes)

    @property
    def behind(self) -> int:
        """Tokens of work that are left: so much of the text nothing is proposed from yet."""
        return max(index.behind for index in self._indexes)

    @property
    def probes(self) -> int:
        """Slots of indexes looked at so far, a measure of work."""
        return sum(index.probes for index in self._indexes)

    def extend(self, budget: int) -> int:
        """Take in what the list has grown by, judging it; index up to `budget` tokens."""
        done = max([index.add(budget) for index in self._indexes])
        known = len(self._tokens)
        if known == self._judged:
            if done and not self._source:
                self._search()
            return done
        if known - self._judged > _JUDGED_MAX:
            self._source = 0
        while self._judged < known and self._source:
            self._follow(self._tokens[self._judged])
        self._judged = known
        if not self._source:
            self._search()
        return done

    def propose(self, count: int) -> list[int]:
        """Return up to `count` tokens of what followed the match.

        Past the present end it goes on with itself: a match that overlaps the end is a period.
        """
        source = self._source
        if not source or count <= 0 or self._judged < len(self._tokens):
            return []
        drafts = self._tokens[source : source + count]
        period = len(drafts)
        while len(drafts) < count:
            drafts.append(drafts[-period])
        return drafts

    def _follow(self, token: int) -> None:
        """Compare what came with what followed the match, and go on or give it up."""
        hit = self._tokens[self._source] == token
        self._judge(self._matched, hit)
        self._judged += 1
        if hit:
            self._source += 1
            self._matched = min(MATCHED_MAX, self._matched + 1)
        else:
            self._source = self._matched = 0

    def _search(self) -> None:
        """Find the longest match of the present end."""
        end = len(self._tokens)
        self._source = self._matched = 0
        for index, (size, candidates) in zip(self._indexes, _GRAMS, strict=True):
            left = candidates
            for source in index.before(end):
                matched = self._common(source, end, self._matched or size - 1)
                if matched > self._matched:
                    self._source, self._matched = source, matched
                left -= 1
                if not left or matched >= MATCHED_MAX:
                    break
            if self._source:
                return

    def _common(self, source: int, end: int, beaten: int) -> int:
        """Return how many tokens before both are equal; 0 unless more than `beaten` are."""
        tokens = self._tokens
        self.compared += 1
        if source <= beaten or tokens[source - beaten - 1] != tokens[end - beaten - 1]:
            return 0
        most = min(MATCHED_MAX, source)
        matched = 0
        while matched < most and tokens[source - matched - 1] == tokens[end - matched - 1]:
            matched += 1
        self.compared += matched
        return matched if matched > beaten else 0
