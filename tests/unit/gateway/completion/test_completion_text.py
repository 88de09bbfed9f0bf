"""Text of one completion: stop ids, stop strings and log probabilities together."""

from services.gateway.completion.completion_text import CompletionText
from services.gateway.tokenizing import vocabulary
from services.gateway.tokenizing.detokenizer import ByteLevelDetokenizer
from shared.messages import TokenLogprobs
from tests.unit.gateway.tokenizing import small_tokenizers

_STOP_ID = 2


def _text(stops: list[str]) -> CompletionText:
    table = vocabulary.read(small_tokenizers.byte_level())
    return CompletionText(ByteLevelDetokenizer(table), frozenset({_STOP_ID}), stops)


def _ids(text: str) -> list[int]:
    ids: list[int] = small_tokenizers.byte_level().encode(text).ids
    return ids


def _logprobs(tokens: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(logprob=-float(token)) for token in tokens]


def test_completion_text_excludes_text_of_stop_token() -> None:
    """The stop token arrives with other tokens and adds no text."""
    text = _text([])
    assert text.add([*_ids("Hello"), _STOP_ID], []) == ("Hello", False)
    assert text.finish() == ("", False)


def test_held_possible_stop_string_is_sent_when_completion_ends() -> None:
    """The held start of a possible stop string is sent when the completion ends."""
    text = _text(["lost"])
    assert text.add(_ids("Hello lo"), []) == ("Hello ", False)
    assert text.finish() == ("lo", False)


def test_completion_text_and_token_count_are_equal_for_any_size_of_token_batches() -> None:
    """With any number of tokens at a time, text and count are those of one token at a time."""
    tokens = [token for char in "zabcab" for token in _ids(char)]
    for size in (1, 2, 3, 6):
        text = _text(["ab"])
        sent, count, is_stopped = "", 0, False
        for start in range(0, len(tokens), size):
            piece, is_stopped = text.add(tokens[start : start + size], [])
            sent += piece
            count += len(tokens[start : start + size]) - text.tokens_after_stop
            if is_stopped:
                break
        assert (sent, count, is_stopped) == ("z", 3, True)


def test_completion_stops_at_replacement_character_that_is_stop_string() -> None:
    """An incomplete character becomes U+FFFD at the end, which may be a stop string."""
    text = _text(["\ufffd"])
    table = vocabulary.read(small_tokenizers.byte_level())
    lead = table.token_bytes.index(b"\xf0")
    assert text.add([*_ids("x"), lead], []) == ("x", False)
    assert text.finish() == ("", True)


def test_logprobs_are_held_back_as_long_as_their_text() -> None:
    """Entries are held as long as their text, and come in order, each once."""
    text = _text(["abX"])
    tokens = [token for char in "zab" for token in _ids(char)]
    seen = []
    for token in tokens:
        sent, _ = text.add([token], _logprobs([token]))
        seen.append((sent, [entry.token for entry in text.take_logprobs()]))
    assert seen == [("z", [tokens[0]]), ("", []), ("", [])]
    assert text.finish() == ("ab", False)
    entries = text.take_logprobs(is_final=True)
    assert [(entry.token, entry.start_chars) for entry in entries] == [
        (tokens[1], 1),
        (tokens[2], 2),
    ]


def test_tokens_of_stop_string_have_no_logprobs() -> None:
    """Tokens without sent text, and the stop id, have no entry."""
    text = _text(["ab"])
    tokens = [token for char in "zab" for token in _ids(char)]
    assert text.add(tokens, _logprobs(tokens)) == ("z", True)
    assert [entry.token for entry in text.take_logprobs()] == tokens[:1]
    ended = _text([])
    ended.add([tokens[0], _STOP_ID], _logprobs([tokens[0], _STOP_ID]))
    assert [entry.token for entry in ended.take_logprobs(is_final=True)] == tokens[:1]
