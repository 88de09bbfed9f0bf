"""N-gram proposer (prompt lookup). Owns drafts copied from earlier text of the same sequence.

Source: Saxena, "Prompt Lookup Decoding" (2023); vLLM's ngram proposer also takes the longest match
of several lengths. Here a match may be longer than the indexed n-grams: occurrences of the last 4
tokens, or else of the last 2, are extended backwards, the latest first. The longest match wins, and
the latest of equal ones.

A match continues without a search as long as each new token is the one that followed it, because
one more token cannot have a match that is longer by two. This also keeps a copy at its source where
boilerplate repeats.
"""

from collections.abc import Callable, Sequence

from services.scheduler.speculation.ngram.gram_index import GramIndex

OutcomeCallback = Callable[[int, bool], None]
"""Called for each new token while there is a match, with the length of the match and whether the
token was the predicted one. So acceptance is measured without sending drafts."""

_GRAMS = ((4, 32), (2, 12))
"""(tokens of an n-gram, most occurrences compared), the longest n-gram first."""
MATCHED_MAX = 32
"""Longest match in tokens; longer ones count as this."""
_NEW_TOKENS_MAX = 64
"""With more new tokens than this, a prompt was added: the match is dropped, not continued."""


class NgramProposer:
    """Copies drafts for one sequence from where its last tokens occurred before (prompt lookup).

    The last tokens that also occurred earlier are the match; drafts are the tokens that followed
    the earlier occurrence. The cost per step does not grow with the text.
    """

    def __init__(self, tokens: Sequence[int], record_outcome: OutcomeCallback) -> None:
        """Start without an index.

        Args:
            tokens: all tokens of the sequence, which only grow.
            record_outcome: called for each new token that a match had predicted.
        """
        self._record_outcome = record_outcome
        self._tokens = tokens
        self._indexes = [GramIndex(tokens, size) for size, _ in _GRAMS]
        self._known = 0
        """Tokens of the text that were processed."""
        self._source = 0
        """Index of the token that followed the match; 0: there is no match."""
        self.matched = 0
        """Length of the current match in tokens, at most MATCHED_MAX; 0: there is no match."""

    def extend(self, budget: int) -> int:
        """Take in new tokens: continue or replace the match, and index more text.

        Args:
            budget: most tokens to index in this call, since indexing takes time.

        Returns:
            The number of tokens that were indexed.
        """
        done = max([index.add(budget) for index in self._indexes])
        known = len(self._tokens)
        if known == self._known:
            if done and not self._source:
                self._find_match()
            return done
        if known - self._known > _NEW_TOKENS_MAX:
            self._source = 0
        while self._known < known and self._source:
            self._advance_match(self._tokens[self._known])
        self._known = known
        if not self._source:
            self._find_match()
        return done

    def propose(self, count: int) -> list[int]:
        """Return up to `count` tokens that followed the match's earlier occurrence.

        Past the end of the text the tokens repeat, because a match that reaches the end is a period
        of the text.

        Args:
            count: most drafts to return.

        Returns:
            The drafts; [] if there is no match.
        """
        source = self._source
        if not source or count <= 0 or self._known < len(self._tokens):
            return []
        drafts = list(self._tokens[source : source + count])
        period = len(drafts)
        while len(drafts) < count:
            drafts.append(drafts[-period])
        return drafts

    def _advance_match(self, token: int) -> None:
        """Compare a new token with the one that followed the match; continue or drop the match."""
        hit = self._tokens[self._source] == token
        self._record_outcome(self.matched, hit)
        self._known += 1
        if hit:
            self._source += 1
            self.matched = min(MATCHED_MAX, self.matched + 1)
        else:
            self._source = self.matched = 0

    def _find_match(self) -> None:
        """Find the longest match of the end of the text."""
        end = len(self._tokens)
        self._source = self.matched = 0
        for index, (size, candidates) in zip(self._indexes, _GRAMS, strict=True):
            left = candidates
            for source in index.earlier_ends(end):
                matched = self._common_suffix(source, end, self.matched or size - 1)
                if matched > self.matched:
                    self._source, self.matched = source, matched
                left -= 1
                if not left or matched >= MATCHED_MAX:
                    break
            if self._source:
                return

    def _common_suffix(self, source: int, end: int, beaten: int) -> int:
        """Return how many tokens before both ends are equal; 0 if not more than `beaten`."""
        tokens = self._tokens
        if source <= beaten or tokens[source - beaten - 1] != tokens[end - beaten - 1]:
            return 0
        most = min(MATCHED_MAX, source)
        matched = 0
        while matched < most and tokens[source - matched - 1] == tokens[end - matched - 1]:
            matched += 1
        return matched if matched > beaten else 0
