"""Load clients as child processes. Owns their start, orders and bodies; sends no HTTP itself."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.commands.bench.measuring.processes import MeasuredProcess
from shared.errors import UnavailableError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
REQUEST_TIMEOUT_S = 900.0


def start_closed_loop_client(log_folder: Path) -> MeasuredProcess:
    """Start the process whose clients each send a request only when their last one has ended."""
    return MeasuredProcess(
        "the load client",
        [sys.executable, "-m", "services.commands.bench.load.closed_loop_client"],
        log_folder / "client.log",
        piped=True,
    )


def start_open_loop_client(log_folder: Path) -> MeasuredProcess:
    """Start the process that sends requests at fixed times, whether earlier ones ended or not."""
    return MeasuredProcess(
        "the open-loop load client",
        [sys.executable, "-m", "services.commands.bench.load.open_loop_client"],
        log_folder / "arrivals.log",
        piped=True,
    )


def request_body(model: str, new_tokens: int, **fields: Any) -> dict[str, Any]:
    """Return the body of a greedy, streamed request that every measured server understands.

    Args:
        model: name of the model at the server.
        new_tokens: largest number of completion tokens.
        fields: the prompt or the messages, and further fields.
    """
    return {
        "model": model,
        "max_tokens": new_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


def closed_loop_order(
    port: int, path: str, clients: Sequence[Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """Return the JSON object that orders one measurement from the closed-loop client.

    Args:
        port: the server's port on this machine.
        path: path of the endpoint.
        clients: per client the bodies that it sends one after the other.
    """
    return {
        "host": "127.0.0.1",
        "port": port,
        "path": path,
        "clients": clients,
        "timeout_s": REQUEST_TIMEOUT_S,
    }


def require_success(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a load client's answer unchanged if none of its requests failed.

    Args:
        answer: JSON object of the closed-loop or the open-loop client.

    Raises:
        UnavailableError: when any of its requests failed.
    """
    if answer["problems"]:
        raise UnavailableError(f"Requests failed: {answer['problems'][0]}")
    return answer
