"""Matcher of one sequence. Owns where its grammar begins and ends, and its error."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future

from llguidance import LLMatcher

from shared.errors import InvariantBroken
from shared.messages import Grammar

NO_TOKEN_LEFT = "it allows no token of the model's vocabulary"  # noqa: S105 - no password


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar's state for one sequence, and what its masks look like."""

    state: LLMatcher
    """At the start of the grammar, and of no other sequence."""
    mask_tokens: int
    """Tokens in a mask."""
    text_end: int
    """The token in masks that stands for the end of the text; the model does not have it."""


class Matcher:
    """Where a sequence's completion stands in its grammar.

    The state is a function of the grammar and the completion's tokens, so it is equal on all ranks.
    An error is never repaired: `error` says why, and the matcher refuses nothing any more. A thread
    of the compiler begins it; from `ready` on it belongs to the thread that executes steps.
    """

    def __init__(self, grammar: Grammar) -> None:
        """Make a matcher that waits for its compiled grammar.

        Args:
            grammar: the sequence's grammar.
        """
        self.error = ""
        """One sentence; "": no error."""
        self.ready: Future[None] = Future()
        """Done once the grammar is compiled and has taken the tokens generated before, or cannot
        be. Cancelled if the sequence is dropped before."""
        self.end_ids = tuple(grammar.end_ids)
        """Token ids that end the completion."""
        self.barred_ids = (*grammar.barred_ids, *grammar.end_ids)
        """Token ids that are not allowed before the grammar holds."""
        self._begin_ids = frozenset(grammar.begin_ids)
        self._grammar: CompiledGrammar | None = None
        self._has_begun = not grammar.begin_ids
        self._has_ended = False
        self._drawn_steps = 0
        """Steps that drew a token and whose tokens are not taken yet."""

    @property
    def grammar(self) -> CompiledGrammar:
        """The compiled grammar in its present state, once it is ready without an error."""
        if self._grammar is None:
            raise InvariantBroken("a grammar is used before it is compiled")
        return self._grammar

    def drop(self) -> None:
        """Free the compiled grammar, or do not wait for it any more: the sequence has ended."""
        self.ready.cancel()
        # Callbacks of futures refer to this object, which lives until the next garbage collection.
        self._has_ended = True
        self._grammar = None

    def begin(self, compiled: CompiledGrammar, generated: Sequence[int]) -> None:
        """Begin with the compiled grammar, and take the tokens generated so far.

        Args:
            compiled: the grammar at its start, for this sequence alone.
            generated: tokens of the completion so far.
        """
        if not self._has_ended:
            self._grammar = compiled
            self._advance(generated)

    def fail(self, error: str) -> None:
        """Note, in one sentence, why the grammar cannot be compiled."""
        self.error = error

    def prepare(self) -> None:
        """Count a step that draws from now on. Waits for `ready`, which plans do not let happen.

        Raises:
            InvariantBroken: the tokens of an earlier step have not been taken.
        """
        if self._drawn_steps:
            raise InvariantBroken("a mask is filled before the tokens of the step before are known")
        self.ready.result()
        self._drawn_steps = 1

    def take(self, tokens: Sequence[int]) -> None:
        """Take the tokens that a step has drawn and accepted."""
        self._drawn_steps = 0
        self._advance(tokens)

    def constrained_drafts(self, drafts: Sequence[int]) -> tuple[int, list[int]] | None:
        """Return which drafts of a step the grammar allows.

        Args:
            drafts: token ids that may follow the completion.

        Returns:
            (n, ids): the grammar holds for the draws after the first n drafts, and `ids` are the
            drafts after these that it allows, up to the first that it does not, or that ends the
            completion. With n greater than the number of drafts it holds for no draw of this step.
            Before it holds, `barred_ids` are not allowed. None: any token is.
        """
        if self._has_ended or self.error:
            return None
        first = 0
        if not self._has_begun:
            first = next((n + 1 for n, one in enumerate(drafts) if one in self._begin_ids), 0)
            if not first or any(one in self.end_ids for one in drafts[:first]):
                return len(drafts) + 1, []
        rest = list(drafts[first:])
        length = next((n for n, one in enumerate(rest) if one in self.end_ids), len(rest))
        rest = rest[:length]
        return first, rest[: self.grammar.state.validate_tokens(rest)] if rest else []

    def check(self) -> bool:
        """Note an error of the library's matcher; return False if this matcher has failed."""
        if self._grammar is not None and not self.error and self.grammar.state.is_error():
            cause = describe_error(self.grammar.state)
            self.error = f"The grammar cannot be matched any further: {cause}"
        return not self.error

    def _advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._has_ended or self.error:
                return
            if token in self.end_ids:
                self._has_ended = True
            elif not self._has_begun:
                self._has_begun = token in self._begin_ids
            else:
                self.grammar.state.consume_token(token)
                self.check()


def describe_error(matcher: LLMatcher) -> str:
    """Return the first line of a matcher's error; the others describe its state."""
    lines = matcher.get_error().strip().splitlines() or ["the cause is unknown"]
    return NO_TOKEN_LEFT if "NoExtensionBias" in lines[0] else lines[0][:500]
