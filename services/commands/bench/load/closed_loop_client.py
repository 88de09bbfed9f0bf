"""Closed-loop load: N clients that each send a streamed request when their last one has ended.

A process of its own. While it measures it only stores bytes with their times of arrival, because it
shares the machine with the measured server; it parses them afterwards. Every request has its own
connection, for every contender. Each JSON line on standard input orders one measurement, and one
JSON line on standard output reports it. It exits when its input closes.

    python -m services.commands.bench.load.closed_loop_client
"""

import gc
import json
import sys
import time
from typing import Any, TextIO

import orjson

from services.commands.bench.load.exchanges import HttpExchange, run_exchanges
from services.commands.bench.load.sse import StreamedAnswer, parse_answer
from services.commands.bench.measuring.numbers import latencies


def encode_request(host: str, port: int, path: str, body: dict[str, Any]) -> bytes:
    """Return the bytes of an HTTP POST whose connection the server closes after the answer.

    Args:
        host: the server's address, for the head.
        port: the server's port, for the head.
        path: path of the endpoint.
        body: is sent as JSON.
    """
    data = orjson.dumps(body)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + data


def run_clients(
    host: str, port: int, path: str, clients: list[list[dict[str, Any]]], timeout_s: float
) -> tuple[list[HttpExchange], float]:
    """Run all clients at once; each sends its next request when its last answer has ended.

    Args:
        host: IPv4 address of the server.
        port: port of the server.
        path: path of the endpoint.
        clients: per client the JSON bodies that it sends, in order.
        timeout_s: longest time for one request and its answer, in seconds.

    Returns:
        The exchanges, client after client, and the seconds from the first request to the end of the
        last answer.

    Raises:
        TimeoutError: when an answer takes longer than `timeout_s`.
        OSError: when a connection fails.
    """
    prepared = [
        [(0.0, encode_request(host, port, path, body)) for body in bodies] for bodies in clients
    ]
    done, wall_s = run_exchanges(host, port, prepared, timeout_s)
    return [exchange for each in done for exchange in each], wall_s


def summarize(exchanges: list[HttpExchange], wall_s: float) -> dict[str, Any]:
    """Return the metrics and texts of one measurement, in the form that goes to the benchmark.

    Args:
        exchanges: all requests with the raw bytes of their answers.
        wall_s: seconds from the first request to the end of the last answer.

    Returns:
        metrics: those of `numbers.latencies`; tokens, cached_tokens (sums over all requests),
        tokens_per_s, tokens_per_event (mean; None without events). problems: up to 5 sentences on
        failed requests. prompt_tokens: the different lengths of prompts, ascending. tiers, drafts:
        sums of prefix tokens by cache tier, and of accepted and rejected drafts. texts: one per
        completed request, in the order of `exchanges`.
    """
    requests = []
    problems = []
    texts = []
    drafts = {"accepted": 0, "rejected": 0}
    prompt_tokens: list[int] = []
    completion_tokens = 0
    cached_tokens = 0
    tiers = {"memory_tokens": 0, "ssd_tokens": 0}
    events_with_text = 0
    for exchange in exchanges:
        answer = parse_answer(exchange.received)
        if answer.status != 200 or not answer.ended:
            problems.append(f"HTTP {answer.status}, ended {answer.ended}: {answer.body[:200]!r}")
            continue
        arrived, usage, cache = read_events(answer)
        for tier in tiers:
            tiers[tier] += int(cache.get(tier) or 0)
        events_with_text += len(arrived)
        texts.append(read_text(answer))
        requests.append((exchange.sent_s, arrived))
        if usage:
            prompt_tokens.append(int(usage["prompt_tokens"]))
            completion_tokens += int(usage["completion_tokens"])
            details = usage.get("prompt_tokens_details") or {}
            cached_tokens += int(details.get("cached_tokens") or 0)
            details = usage.get("completion_tokens_details") or {}
            for outcome in drafts:
                drafts[outcome] += int(details.get(f"{outcome}_prediction_tokens") or 0)
        else:
            problems.append("a stream without usage")
    metrics: dict[str, Any] = latencies(requests, wall_s)
    metrics["tokens"] = completion_tokens
    metrics["tokens_per_s"] = completion_tokens / wall_s
    metrics["tokens_per_event"] = completion_tokens / events_with_text if events_with_text else None
    metrics["cached_tokens"] = cached_tokens
    return {
        "metrics": metrics,
        "problems": problems[:5],
        "prompt_tokens": sorted(set(prompt_tokens)),
        "tiers": tiers,
        "drafts": drafts,
        "texts": texts,
    }


def read_events(
    answer: StreamedAnswer,
) -> tuple[list[float], dict[str, Any] | None, dict[str, Any]]:
    """Return when text arrived in a stream, and what its events say on usage and prefix cache.

    Returns:
        The times of arrival (seconds) of events with text, the usage object (None: absent), and
        Lockstep's object on the prefix cache ({}: absent).
    """
    arrived = []
    usage = None
    cache: dict[str, Any] = {}
    for event in answer.events:
        value = orjson.loads(event.data)
        usage = value.get("usage") or usage
        cache = (value.get("lockstep") or {}).get("cache") or cache
        for choice in value.get("choices") or []:
            delta = choice.get("delta") or {}
            if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
                arrived.append(event.at_s)
    return arrived, usage, cache


def read_text(answer: StreamedAnswer) -> str:
    """Return the whole text of a streamed completion or chat answer with one choice."""
    pieces = []
    for event in answer.events:
        for choice in orjson.loads(event.data).get("choices") or []:
            delta = choice.get("delta") or {}
            pieces.append(choice.get("text") or delta.get("content") or "")
    return "".join(pieces)


def main(orders: TextIO, answers: TextIO) -> None:
    """Run one measurement for each line of `orders` and write its result to `answers`.

    Args:
        orders: JSON lines, each an object with the arguments of `run_clients`.
        answers: receives per order one JSON line with the result of `summarize`, to whose metrics
            client_cpu_us_per_token is added; after a failed connection or timeout only problems.
    """
    for line in orders:
        order = json.loads(line)
        gc.collect()
        gc.disable()
        cpu_s = time.process_time()
        try:
            exchanges, wall_s = run_clients(**order)
            cpu_s = time.process_time() - cpu_s
            result = summarize(exchanges, wall_s)
            result["metrics"]["client_cpu_us_per_token"] = (
                cpu_s * 1e6 / max(1, result["metrics"]["tokens"])
            )
        except (OSError, TimeoutError) as error:
            result = {"metrics": {}, "problems": [f"{type(error).__name__}: {error}"]}
        gc.enable()
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
