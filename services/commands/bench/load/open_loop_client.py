"""Open-loop load: requests at fixed times, whether earlier ones have ended or not.

A process of its own. While it measures it only stores bytes with their times of arrival, because it
shares the machine with the measured server. Each JSON line on standard input orders one
measurement, and one JSON line on standard output reports it. It exits when its input closes.

    python -m services.commands.bench.load.open_loop_client
"""

import gc
import json
import sys
from typing import Any, TextIO

from services.commands.bench.load.closed_loop_client import encode_request, read_events
from services.commands.bench.load.exchanges import HttpExchange, run_exchanges
from services.commands.bench.load.sse import parse_answer
from services.commands.bench.measuring.numbers import percentile

TOO_MANY_REQUESTS = 429


def run_arrivals(
    host: str,
    port: int,
    path: str,
    bodies: list[dict[str, Any]],
    interval_s: float,
    timeout_s: float,
) -> tuple[list[HttpExchange], float]:
    """Send one request every `interval_s` seconds, whether earlier ones have ended or not.

    Args:
        host: IPv4 address of the server.
        port: port of the server.
        path: path of the endpoint.
        bodies: JSON bodies of the requests, in the order of sending.
        interval_s: seconds between two requests.
        timeout_s: longest time for one request and its answer, in seconds.

    Returns:
        The exchanges in the order of `bodies`, and the seconds from the first request to the end of
        the last answer.

    Raises:
        TimeoutError: when an answer takes longer than `timeout_s`.
        OSError: when a connection fails.
    """
    clients = [
        [(number * interval_s, encode_request(host, port, path, body))]
        for number, body in enumerate(bodies)
    ]
    done, wall_s = run_exchanges(host, port, clients, timeout_s)
    return [exchange for each in done for exchange in each], wall_s


def summarize(exchanges: list[HttpExchange], wall_s: float) -> dict[str, Any]:
    """Return the metrics of one measurement, in the form that goes to the benchmark.

    Args:
        exchanges: all requests with the raw bytes of their answers.
        wall_s: seconds from the first request to the end of the last answer.

    Returns:
        metrics: served and refused (numbers of complete answers and of answers 429), tokens_per_s
        (completion tokens of complete answers), refused_p50_ms and refused_p99_ms (median and 99th
        percentile of the time to a 429; absent without refusals). problems: up to 5 sentences on
        answers that are neither complete nor a 429.
    """
    refused_ms = []
    served = 0
    tokens = 0
    problems = []
    for exchange in exchanges:
        answer = parse_answer(exchange.received)
        if answer.status == TOO_MANY_REQUESTS:
            refused_ms.append((exchange.received[0][0] - exchange.sent_s) * 1e3)
        elif answer.status == 200 and answer.ended:
            served += 1
            _, usage, _ = read_events(answer)
            tokens += int((usage or {}).get("completion_tokens") or 0)
        else:
            problems.append(f"HTTP {answer.status}, ended {answer.ended}: {answer.body[:200]!r}")
    metrics: dict[str, float] = {
        "served": served,
        "refused": len(refused_ms),
        "tokens_per_s": tokens / wall_s,
    }
    if refused_ms:
        metrics["refused_p50_ms"] = percentile(refused_ms, 0.5)
        metrics["refused_p99_ms"] = percentile(refused_ms, 0.99)
    return {"metrics": metrics, "problems": problems[:5]}


def main(orders: TextIO, answers: TextIO) -> None:
    """Run one measurement for each line of `orders` and write its result to `answers`.

    Args:
        orders: JSON lines, each an object with the arguments of `run_arrivals`.
        answers: receives per order one JSON line with the result of `summarize`; after a failed
            connection or a timeout only problems.
    """
    for line in orders:
        gc.collect()
        gc.disable()
        try:
            result = summarize(*run_arrivals(**json.loads(line)))
        except (OSError, TimeoutError) as error:
            result = {"metrics": {}, "problems": [f"{type(error).__name__}: {error}"]}
        gc.enable()
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
