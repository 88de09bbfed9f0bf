"""Stop strings: found in any partition of the text, and little text is held back."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.tokenizing.stop_strings import StopStrings
from tests.support.effort import cases

_ALPHABET = "ab<é"
_stops = st.lists(st.text(_ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)
_pieces = st.lists(st.text(_ALPHABET, max_size=6), max_size=12)


def _expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """Return the text before the first complete stop string; the one that began first counts."""
    for end in range(1, len(text) + 1):
        matches = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(matches)], True
    return text, False


@settings(max_examples=cases(200, 1000))
@given(stops=_stops, pieces=_pieces)
def test_stop_string_is_found_however_the_text_is_cut(stops: list[str], pieces: list[str]) -> None:
    """For any partition the text ends where a search in the whole text ends it."""
    watcher = StopStrings(stops)
    sent = ""
    is_stopped = False
    for piece in pieces:
        text, is_stopped = watcher.push(piece)
        sent += text
        if is_stopped:
            break
    if not is_stopped:
        sent += watcher.finish()
    assert (sent, is_stopped) == _expected("".join(pieces), stops)


@settings(max_examples=cases(200, 1000))
@given(stops=_stops, pieces=_pieces)
def test_only_text_that_may_begin_stop_string_is_held_back(
    stops: list[str], pieces: list[str]
) -> None:
    """The held text is the longest end of the text that starts a stop string."""
    watcher = StopStrings(stops)
    seen = sent = ""
    for piece in pieces:
        text, is_stopped = watcher.push(piece)
        if is_stopped:
            return
        seen += piece
        sent += text
        held = max(
            (size for stop in stops for size in range(len(stop)) if seen.endswith(stop[:size])),
            default=0,
        )
        assert sent == seen[: len(seen) - held]


def test_stop_string_is_found_when_its_characters_arrive_singly() -> None:
    """The characters of the stop string arrive one by one."""
    watcher = StopStrings(["</end>"])
    assert [watcher.push(char) for char in "x</end>"] == [("x", False)] + [("", False)] * 5 + [
        ("", True)
    ]


def test_held_text_is_sent_when_it_does_not_become_stop_string() -> None:
    """Text that began like a stop string is sent completely."""
    watcher = StopStrings(["aab"])
    assert watcher.push("aa") == ("", False)
    assert watcher.push("a") == ("a", False)
    assert watcher.push("c") == ("aac", False)
