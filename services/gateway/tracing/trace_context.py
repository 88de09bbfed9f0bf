"""W3C Trace Context. Owns reading a client's `traceparent` and `tracestate`.

Source: W3C Recommendation "Trace Context", level 1, sections 3.2 and 3.3.
"""

import dataclasses
import re
from collections.abc import Sequence

TRACE_PARENT = "traceparent"
TRACE_STATE = "tracestate"
STATE_MEMBERS_MAX = 32
STATE_CHARS_MAX = 512
"""A longer state may be dropped, says the recommendation."""

_PARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_KEY = r"[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13}"
_MEMBER = re.compile(rf"(?P<key>{_KEY})=(?P<value>[\x20-\x2b\x2d-\x3c\x3e-\x7e]{{1,256}})")
_SAMPLED = 1


@dataclasses.dataclass(frozen=True, slots=True)
class TraceContext:
    """A client's trace: the ids in hexadecimal digits, as in the header."""

    trace_id: str
    """32 digits."""
    span_id: str
    """16 digits: the client's span."""
    is_sampled: bool
    """The client records its span, so its trace should be exported."""
    state: str = ""
    """`tracestate`, unchanged but for spaces around its members; "": none, or not valid."""

    @property
    def header(self) -> str:
        """The `traceparent` with these ids, in version 00."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"


def read(parents: Sequence[str], states: Sequence[str] = ()) -> TraceContext | None:
    """Return the context in a request's headers; None without one that is valid.

    Args:
        parents: all values of `traceparent`; only one is valid.
        states: all values of `tracestate`, which are one list.
    """
    found = _PARENT.fullmatch(parents[0].strip(" \t")) if len(parents) == 1 else None
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"]):
        return None
    if not found["trace"].strip("0") or not found["span"].strip("0"):
        return None
    is_sampled = bool(int(found["flags"], 16) & _SAMPLED)
    return TraceContext(found["trace"], found["span"], is_sampled, _state(states))


def _state(values: Sequence[str]) -> str:
    """Return the valid state in all values of the header, else ""."""
    members = [one.strip(" \t") for value in values for one in value.split(",")]
    members = [one for one in members if one]
    found = [_MEMBER.fullmatch(one) for one in members]
    keys = {one["key"] for one in found if one is not None}
    state = ",".join(members)
    is_valid = len(keys) == len(members) <= STATE_MEMBERS_MAX and len(state) <= STATE_CHARS_MAX
    return state if is_valid else ""
