"""W3C Trace Context: valid headers, and reading them."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.tracing import trace_context
from tests.support.effort import cases

_TRACE = "0af7651916cd43dd8448eb211c80319c"
_SPAN = "b7ad6b7169203331"
_VALID = f"00-{_TRACE}-{_SPAN}-01"
_HEX = st.sampled_from("0123456789abcdef")


def test_valid_header_is_read_and_written_unchanged() -> None:
    """The ids and the sampled flag are those of the client."""
    found = trace_context.read([_VALID])
    assert found is not None
    assert (found.trace_id, found.span_id, found.is_sampled) == (_TRACE, _SPAN, True)
    assert found.header == _VALID
    unsampled = trace_context.read([f"00-{_TRACE}-{_SPAN}-00"])
    assert unsampled is not None
    assert not unsampled.is_sampled


@pytest.mark.parametrize(
    "header",
    [
        "",
        _VALID.upper(),
        f"ff-{_TRACE}-{_SPAN}-01",
        f"00-{'0' * 32}-{_SPAN}-01",
        f"00-{_TRACE}-{'0' * 16}-01",
        f"00-{_TRACE}-{_SPAN}-01-more",
        f"00-{_TRACE}-{_SPAN}-1",
        f"00-{_TRACE}-{_SPAN}",
        f"00-{_TRACE[:-1]}-{_SPAN}-01",
        f"0-{_TRACE}-{_SPAN}-01",
        f"01-{_TRACE}-{_SPAN}-01more",
        f"00-{_TRACE}-{_SPAN}-0\u0661",
        f"00-{_TRACE}-{_SPAN}-01\n",
    ],
)
def test_invalid_header_is_ignored(header: str) -> None:
    """Upper case, zeros, a wrong length and version ff are not valid."""
    assert trace_context.read([header]) is None


def test_header_of_later_version_may_have_more() -> None:
    """The beginning is read as in version 00; unknown flags are ignored."""
    for header in (f"cc-{_TRACE}-{_SPAN}-03", f"cc-{_TRACE}-{_SPAN}-03-what-ever"):
        found = trace_context.read([header])
        assert found is not None
        assert found.header == _VALID


def test_two_headers_are_ignored() -> None:
    """Two parents contradict each other."""
    assert trace_context.read([_VALID, _VALID]) is None
    assert trace_context.read([]) is None


def test_state_is_one_list_over_all_headers() -> None:
    """Empty members and spaces around members mean nothing."""
    found = trace_context.read([_VALID], ["rojo=1 , ", "congo=t61,fw529a3039@dt=a b"])
    assert found is not None
    assert found.state == "rojo=1,congo=t61,fw529a3039@dt=a b"


@pytest.mark.parametrize(
    "state",
    [
        "novalue",
        "a=1,a=2",
        "Upper=1",
        "a=b=c",
        "a=\u00e9",
        ",".join(f"k{number}=1" for number in range(33)),
        "a=" + "x" * 257,
        ",".join(f"k{number}=" + "x" * 60 for number in range(9)),
    ],
)
def test_invalid_state_is_dropped_and_parent_kept(state: str) -> None:
    """The recommendation keeps a valid parent without its state."""
    found = trace_context.read([_VALID], [state])
    assert found is not None
    assert found.state == ""


@settings(max_examples=cases(200, 1_000))
@given(st.text(max_size=80), st.lists(st.text(max_size=60), max_size=3))
def test_any_text_gives_valid_context_or_none(header: str, states: list[str]) -> None:
    """Nothing is raised, and every context can be sent on."""
    found = trace_context.read([header], states)
    if found is not None:
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]", found.header)


@settings(max_examples=cases(100, 500))
@given(
    st.text(_HEX, min_size=2, max_size=2),
    st.text(_HEX, min_size=32, max_size=32),
    st.text(_HEX, min_size=16, max_size=16),
    st.text(_HEX, min_size=2, max_size=2),
)
def test_well_formed_header_is_valid_unless_zero_or_version_ff(
    version: str, trace: str, span: str, flags: str
) -> None:
    """Only the lowest flag counts."""
    found = trace_context.read([f"{version}-{trace}-{span}-{flags}"])
    if version == "ff" or not int(trace, 16) or not int(span, 16):
        assert found is None
    else:
        assert found is not None
        assert (found.trace_id, found.span_id) == (trace, span)
        assert found.is_sampled == bool(int(flags, 16) & 1)
