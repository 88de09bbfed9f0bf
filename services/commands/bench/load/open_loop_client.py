"""The load of clients that do not wait for each other: requests at fixed times.

A process of its own, like `load_client`, and like it, it only stores bytes while it measures. One
JSON line in is one measurement, one JSON line out its result; it ends when its input closes.

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

REFUSED = 429


def run_arrivals(
    host: str,
    port: int,
    path: str,
    bodies: list[dict[str, Any]],
    interval_s: float,
    timeout_s: float,
) -> tuple[list[HttpExchange], float]:
    """Send one request each `interval_s`; return the exchanges and the seconds until the last."""
    clients = [
        [(number * interval_s, encode_request(host, port, path, body))]
        for number, body in enumerate(bodies)
    ]
    done, wall_s = run_exchanges(host, port, clients, timeout_s)
    return [one for each in done for one in each], wall_s


def summarize(exchanges: list[HttpExchange], wall_s: float) -> dict[str, Any]:
    """Return metrics, and under "problems" every answer that is neither served nor refused."""
    refused_ms = []
    served = 0
    tokens = 0
    problems = []
    for one in exchanges:
        answer = parse_answer(one.received)
        if answer.status == REFUSED:
            refused_ms.append((one.received[0][0] - one.sent_s) * 1e3)
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
    """Measure what each line of `orders` asks for."""
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
