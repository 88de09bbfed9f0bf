"""Load on a server: N clients that each send streamed requests one after the other.

A process of its own. While it measures it only stores bytes with their times of arrival, because it
shares the machine with the measured server; it parses them afterwards. Every request has its own
connection, for every contender. Each JSON line on standard input orders one measurement, and one
JSON line on standard output reports it. It exits when its input closes.

    python -m services.commands.bench.load.load_client
"""

import dataclasses
import gc
import time
from typing import Any

import orjson

from services.commands.bench.load.exchanges import HttpExchange, run_exchanges
from services.commands.bench.load.sse import StreamedAnswer, parse_answer
from services.commands.bench.measuring.numbers import latencies, percentile
from services.commands.bench.measuring.orders import answer_orders

HOST = "127.0.0.1"
TOO_MANY_REQUESTS = 429


def encode_request(port: int, path: str, body: dict[str, Any], api_key: str = "") -> bytes:
    """Return the bytes of an HTTP POST whose connection the server closes after the answer.

    Args:
        port: the server's port on this machine, for the head.
        path: path of the endpoint.
        body: is sent as JSON.
        api_key: key of the server; "": none is sent.
    """
    authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
    data = orjson.dumps(body)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\nContent-Length: {len(data)}\r\n{authorization}"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + data


def run_clients(
    port: int,
    path: str,
    clients: list[list[dict[str, Any]]],
    timeout_s: float,
    interval_s: float = 0.0,
    api_key: str = "",
) -> tuple[list[HttpExchange], float]:
    """Run all clients; each sends its next request when its last answer has ended.

    Args:
        port: port of the server on this machine.
        path: path of the endpoint.
        clients: per client the JSON bodies that it sends, in order.
        timeout_s: longest time for one request and its answer, in seconds.
        interval_s: seconds between the beginnings of one client and the next; 0: all at once.
        api_key: key that all requests carry; "": none.

    Returns:
        The exchanges, client after client, and the seconds from the first request to the end of the
        last answer.

    Raises:
        TimeoutError: when an answer takes longer than `timeout_s`.
        OSError: when a connection fails.
    """
    prepared = [
        [(number * interval_s, encode_request(port, path, body, api_key)) for body in bodies]
        for number, bodies in enumerate(clients)
    ]
    done, wall_s = run_exchanges(HOST, port, prepared, timeout_s)
    return [exchange for each in done for exchange in each], wall_s


@dataclasses.dataclass(slots=True)
class StreamContent:
    """What the events of a streamed completion or chat answer with one choice contain."""

    arrived_s: list[float] = dataclasses.field(default_factory=list)
    """Times of arrival of the events with text."""
    text: str = ""
    usage: dict[str, Any] | None = None
    """The usage object; None: absent."""
    cache: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Lockstep's object on the prefix cache; {}: absent."""


def read_content(answer: StreamedAnswer) -> StreamContent:
    """Return the text of a stream, when it arrived, and its usage and prefix cache."""
    content = StreamContent()
    for event in answer.events:
        value = orjson.loads(event.data)
        content.usage = value.get("usage") or content.usage
        content.cache = (value.get("lockstep") or {}).get("cache") or content.cache
        for choice in value.get("choices") or []:
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            content.text += text
            if text or delta.get("reasoning_content"):
                content.arrived_s.append(event.at_s)
    return content


def summarize(
    exchanges: list[HttpExchange], wall_s: float, *, may_refuse: bool = False
) -> dict[str, Any]:
    """Return the metrics and texts of one measurement, in the form that goes to the benchmark.

    Args:
        exchanges: all requests with the raw bytes of their answers.
        wall_s: seconds from the first request to the end of the last answer.
        may_refuse: an answer 429 is a refusal; False: a problem like any other failure.

    Returns:
        metrics: those of `numbers.latencies`; tokens, cached_tokens (sums over all requests),
        tokens_per_s, tokens_per_event (mean; None without events). refusals: from
        `summarize_refusals`. problems: up to 5 sentences on failed requests. prompt_tokens: the
        different lengths of prompts, ascending. tiers, drafts: sums of prefix tokens by cache tier,
        and of accepted and rejected drafts. texts: one per completed request, in the order of
        `exchanges`.
    """
    contents: list[StreamContent] = []
    requests: list[tuple[float, list[float]]] = []
    problems: list[str] = []
    refused_s: list[float] = []
    for exchange in exchanges:
        answer = parse_answer(exchange.received)
        if may_refuse and answer.status == TOO_MANY_REQUESTS:
            refused_s.append(exchange.received[0][0] - exchange.sent_s)
        elif answer.status != 200 or not answer.ended:
            problems.append(f"HTTP {answer.status}, ended {answer.ended}: {answer.body[:200]!r}")
        else:
            content = read_content(answer)
            contents.append(content)
            requests.append((exchange.sent_s, content.arrived_s))
            if not content.usage:
                problems.append("a stream without usage")
    usages = [content.usage for content in contents if content.usage]
    tokens = _sum(usages, "completion_tokens")
    events_with_text = sum(len(content.arrived_s) for content in contents)
    prompt_details = [usage.get("prompt_tokens_details") for usage in usages]
    completion_details = [usage.get("completion_tokens_details") for usage in usages]
    caches = [content.cache for content in contents]
    return {
        "metrics": {
            **latencies(requests, wall_s),
            "tokens": tokens,
            "tokens_per_s": tokens / wall_s,
            "tokens_per_event": tokens / events_with_text if events_with_text else None,
            "cached_tokens": _sum(prompt_details, "cached_tokens"),
        },
        "refusals": summarize_refusals(len(contents), refused_s),
        "problems": problems[:5],
        "prompt_tokens": sorted({int(usage["prompt_tokens"]) for usage in usages}),
        "tiers": {tier: _sum(caches, tier) for tier in ("memory_tokens", "ssd_tokens")},
        "drafts": {
            outcome: _sum(completion_details, f"{outcome}_prediction_tokens")
            for outcome in ("accepted", "rejected")
        },
        "texts": [content.text for content in contents],
    }


def summarize_refusals(served: int, refused_s: list[float]) -> dict[str, float]:
    """Return served and refused (numbers of requests) and the times to refusal.

    Args:
        served: number of complete answers.
        refused_s: per refused request the seconds until its refusal arrived.

    Returns:
        Besides the two numbers refused_p50_ms and refused_p99_ms, the median and 99th percentile of
        the time to a refusal; they are absent without refusals.
    """
    found: dict[str, float] = {"served": served, "refused": len(refused_s)}
    if refused_s:
        found["refused_p50_ms"] = percentile(refused_s, 0.5) * 1e3
        found["refused_p99_ms"] = percentile(refused_s, 0.99) * 1e3
    return found


def measure(*, may_refuse: bool = False, **order: Any) -> dict[str, Any]:
    """Run one measurement and return its result.

    Args:
        may_refuse: as for `summarize`.
        order: arguments of `run_clients`.

    Returns:
        The result of `summarize`, to whose metrics client_cpu_us_per_token is added; after a failed
        connection or timeout only problems.
    """
    gc.collect()
    gc.disable()
    cpu_s = time.process_time()
    try:
        exchanges, wall_s = run_clients(**order)
        cpu_s = time.process_time() - cpu_s
        result = summarize(exchanges, wall_s, may_refuse=may_refuse)
    except (OSError, TimeoutError) as error:
        return {"metrics": {}, "problems": [f"{type(error).__name__}: {error}"]}
    finally:
        gc.enable()
    metrics = result["metrics"]
    metrics["client_cpu_us_per_token"] = cpu_s * 1e6 / max(1, metrics["tokens"])
    return result


def _sum(objects: list[Any], key: str) -> int:
    """Return the sum of a number over JSON objects, in which it may be absent or null."""
    return sum(int((one or {}).get(key) or 0) for one in objects)


if __name__ == "__main__":
    answer_orders(measure)
