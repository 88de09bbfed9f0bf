"""Answers are parsed independently of the cuts between reads, with arrival times."""

from services.commands.bench.load.exchanges import HttpExchange
from services.commands.bench.load.load_client import read_content, summarize
from services.commands.bench.load.sse import parse_answer

PLAIN = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def _event(text: str) -> bytes:
    return b'data: {"choices": [{"text": "' + text.encode() + b'"}]}\n\n'


USAGE = (
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, '
    b'"prompt_tokens_details": {"cached_tokens": 1}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def test_sse_event_has_arrival_time_of_its_last_byte() -> None:
    """An event in two reads has the time of the second read."""
    first, second = _event("a"), _event("b")
    answer = parse_answer(
        [(1.0, PLAIN), (2.0, first), (3.0, second[:10]), (4.0, second[10:] + DONE)]
    )
    assert answer.status == 200
    assert answer.ended
    assert [event.at_s for event in answer.events] == [2.0, 4.0]
    assert read_content(answer).arrived_s == [2.0, 4.0]


def test_http_chunk_headers_are_removed_wherever_reads_cut_the_stream() -> None:
    """One read per byte gives the same events as one read, also when an event spans chunks."""
    second = _event("b")
    raw = (
        CHUNKED
        + _chunk(_event("a"))
        + _chunk(second[:7])
        + _chunk(second[7:] + USAGE)
        + _chunk(DONE)
        + b"0\r\n\r\n"
    )
    whole = parse_answer([(1.0, raw)])
    single = parse_answer([(float(index), raw[index : index + 1]) for index in range(len(raw))])
    assert whole.ended
    assert single.ended
    assert [event.data for event in whole.events] == [event.data for event in single.events]
    assert len(whole.events) == 3
    times = [event.at_s for event in single.events]
    assert times == sorted(times)
    assert times[0] == float(raw.index(b"}\n\n") + 1)
    content = read_content(whole)
    assert content.usage is not None
    assert content.usage["completion_tokens"] == 2
    assert content.cache == {}


def test_answer_is_incomplete_when_refused_cut_off_or_empty() -> None:
    """The status and the end mark distinguish them."""
    refused = parse_answer([(1.0, b"HTTP/1.1 429 Too Many\r\nContent-Length: 2\r\n\r\n{}")])
    assert (refused.status, refused.ended, refused.body) == (429, False, b"{}")
    assert not parse_answer([(1.0, PLAIN + _event("a"))]).ended
    assert parse_answer([]).status == 0


def test_load_summary_counts_tokens_from_usage_and_lists_failed_requests() -> None:
    """Tokens/s uses the server's own count; a failed request is described in a sentence."""
    good = HttpExchange(
        sent_s=1.0,
        received=[(1.5, PLAIN + _event("a")), (1.75, _event("b")), (2.0, USAGE + DONE)],
    )
    bad = HttpExchange(sent_s=1.0, received=[(1.1, b"HTTP/1.1 503 No\r\n\r\nno")])
    found = summarize([good, bad], wall_s=2.0)
    assert found["metrics"]["tokens"] == 2
    assert found["metrics"]["tokens_per_s"] == 1.0
    assert found["metrics"]["ttft_p50_ms"] == 500.0
    assert found["metrics"]["itl_p50_ms"] == 250.0
    assert found["metrics"]["cached_tokens"] == 1
    assert found["prompt_tokens"] == [3]
    assert found["problems"] == ["HTTP 503, ended False: b'no'"]


def test_load_summary_keeps_texts_in_request_order_and_sums_draft_counts() -> None:
    """Texts of both endpoints are in the order of requests; no drafts count as 0."""
    usage = (
        b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4, '
        b'"completion_tokens_details": {"accepted_prediction_tokens": 3, '
        b'"rejected_prediction_tokens": 2}}}\n\n'
    )
    chat_event = b'data: {"choices": [{"delta": {"role": "assistant", "content": "c"}}]}\n\n'
    one = HttpExchange(
        sent_s=1.0, received=[(1.5, PLAIN + _event("a") + _event("b") + usage + DONE)]
    )
    other = HttpExchange(sent_s=1.0, received=[(1.5, PLAIN + chat_event + USAGE + DONE)])
    found = summarize([one, other, one], 1.0)
    assert found["texts"] == ["ab", "c", "ab"]
    assert found["drafts"] == {"accepted": 6, "rejected": 4}
    assert summarize([other], 1.0)["drafts"] == {"accepted": 0, "rejected": 0}


def test_load_summary_sums_cached_tokens_per_cache_tier() -> None:
    """A server that does not report tiers has 0 tokens in each."""
    usage = (
        b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}, '
        b'"lockstep": {"cache": {"memory_tokens": 5, "ssd_tokens": 3, "miss": null}}}\n\n'
    )
    one = HttpExchange(sent_s=1.0, received=[(1.5, PLAIN + _event("a") + usage + DONE)])
    other = HttpExchange(sent_s=1.0, received=[(1.5, PLAIN + _event("a") + USAGE + DONE)])
    assert summarize([one, one], 1.0)["tiers"] == {"memory_tokens": 10, "ssd_tokens": 6}
    assert summarize([other], 1.0)["tiers"] == {"memory_tokens": 0, "ssd_tokens": 0}
