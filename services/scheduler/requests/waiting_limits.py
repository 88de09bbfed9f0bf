"""Limits of waiting work. Owns how much of each tenant waits; orders nothing."""

import dataclasses

from services.scheduler.requests.sequence import Sequence
from shared.configuration.settings import SchedulerConfig
from shared.identifiers import SequenceId
from shared.messages import token_ids
from shared.tenants.fair_share import FairShare

_REQUEST_BYTES = 4_096
"""Memory of a waiting request besides its token ids and logit bias."""
_BIAS_BYTES = 128
"""Memory of one entry of a logit bias."""

_CHAR_BYTES = 4
"""Most memory of one character of a grammar."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Counted:
    """Amounts that one waiting sequence was counted with."""

    tokens: int
    own_bytes: int
    """Memory that it does not share."""
    text: int
    """Identity of its token ids in memory."""


@dataclasses.dataclass(slots=True)
class _Text:
    """Token ids that the waiting sequences of one request share."""

    bytes: int
    sharers: int = 0


class WaitingLimits:
    """Limits of the requests, tokens and bytes that wait; tenants share each of them fairly."""

    def __init__(self, config: SchedulerConfig, share: float) -> None:
        """Start empty.

        Args:
            config: the most that may wait.
            share: largest part of each for one tenant.
        """
        self._requests = FairShare(config.waiting_requests_max, share)
        self._tokens = FairShare(config.waiting_tokens_max, share)
        self._bytes = FairShare(config.waiting_bytes_max, share)
        self._counted: dict[SequenceId, _Counted] = {}
        self._texts: dict[int, _Text] = {}

    @property
    def tokens(self) -> int:
        """Tokens of all waiting sequences."""
        return self._tokens.used

    def explain_refusal(self, sequence: Sequence) -> str:
        """Return which limit leaves no room for a new request, for its client; "": there is room.

        A request that would wait alone may have any number of tokens and bytes.
        """
        if detail := _explain(self._requests, sequence.tenant, 1, "requests"):
            return detail
        if not self._requests.used:
            return ""
        tokens, size = len(sequence.tokens), _own_bytes(sequence)
        if id(sequence.tokens) not in self._texts:
            size += _text_bytes(sequence)
        return _explain(self._tokens, sequence.tenant, tokens, "tokens") or _explain(
            self._bytes, sequence.tenant, size, "bytes"
        )

    def add(self, sequence: Sequence) -> None:
        """Count a sequence that waits from now on, even if there is no room for it."""
        tenant, text = sequence.tenant, id(sequence.tokens)
        counted = _Counted(len(sequence.tokens), _own_bytes(sequence), text)
        self._counted[sequence.sequence_id] = counted
        self._requests.add(tenant, 1)
        self._tokens.add(tenant, counted.tokens)
        self._bytes.add(tenant, counted.own_bytes)
        if text not in self._texts:
            self._texts[text] = _Text(_text_bytes(sequence))
            self._bytes.add(tenant, self._texts[text].bytes)
        self._texts[text].sharers += 1

    def remove(self, sequence: Sequence) -> None:
        """Stop counting a sequence that no longer waits."""
        counted = self._counted.pop(sequence.sequence_id)
        self._requests.release(sequence.tenant, 1)
        self._tokens.release(sequence.tenant, counted.tokens)
        self._bytes.release(sequence.tenant, counted.own_bytes)
        text = self._texts[counted.text]
        text.sharers -= 1
        if not text.sharers:
            self._bytes.release(sequence.tenant, text.bytes)
            del self._texts[counted.text]

    def check_invariants(self, waiting: list[Sequence]) -> None:
        """Assert that exactly the waiting sequences are counted.

        Args:
            waiting: all waiting sequences.
        """
        assert self._counted.keys() == {sequence.sequence_id for sequence in waiting}
        assert sum(text.sharers for text in self._texts.values()) == len(waiting)
        assert self._requests.used == len(waiting)
        assert self._tokens.used == sum(one.tokens for one in self._counted.values())


def _own_bytes(sequence: Sequence) -> int:
    grammar = sequence.request.grammar
    grammar_bytes = _CHAR_BYTES * len(grammar.text) if grammar is not None else 0
    return _REQUEST_BYTES + _BIAS_BYTES * len(sequence.request.sampling.logit_bias) + grammar_bytes


def _text_bytes(sequence: Sequence) -> int:
    return token_ids.TOKEN_BYTES * len(sequence.tokens)


def _explain(share: FairShare, tenant: str, amount: int, unit: str) -> str:
    """Return a sentence if there is no room for an amount more of a tenant's to wait, else ""."""
    if share.has_room(tenant, amount):
        return ""
    if share.used + amount > share.total:
        return (
            f"{share.used:,} {unit} are waiting and {amount:,} more would exceed the limit of "
            f"{share.total:,}."
        )
    return (
        f"Your own share is used up: {share.held_by(tenant):,} {unit} of yours are waiting, "
        f"{share.used:,} in all, and {amount:,} more would leave too few of {share.total:,} to "
        "other clients."
    )
