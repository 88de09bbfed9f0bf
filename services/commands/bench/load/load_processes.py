"""Load client as a child process. Owns its start, orders and bodies; sends no HTTP itself."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.commands.bench.measuring.processes import (
    MeasuredProcess,
    MeasuredServer,
    bench_program,
)
from shared.errors import UnavailableError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
REQUEST_TIMEOUT_S = 900.0


class LoadClient(MeasuredProcess):
    """The process that puts load on servers; its log is `client.log`."""

    def __init__(self, log_folder: Path) -> None:
        command = bench_program("load.load_client")
        super().__init__("the load client", command, log_folder / "client.log", piped=True)

    def load(
        self,
        server: MeasuredServer,
        path: str,
        clients: Sequence[Sequence[Mapping[str, Any]]],
        **options: Any,
    ) -> dict[str, Any]:
        """Put one load on a server; return the result of `load_client.measure`.

        Args:
            server: the server.
            path: path of the endpoint.
            clients: per client the bodies that it sends one after the other.
            options: further arguments of `load_client.measure`.

        Raises:
            UnavailableError: when any of the requests failed.
        """
        order = {
            "port": server.port,
            "path": path,
            "clients": clients,
            "timeout_s": REQUEST_TIMEOUT_S,
            **options,
        }
        return require_success(self.request(order))

    def complete(
        self,
        server: MeasuredServer,
        work: Sequence[Sequence[list[int] | str]],
        new_tokens: int,
        **options: Any,
    ) -> dict[str, Any]:
        """Put one load of completions on a server; return the result of `load_client.measure`.

        Args:
            server: the server.
            work: per client the prompts (token ids or text) that it sends one after the other.
            new_tokens: completion length of every prompt.
            options: further arguments of `load_client.measure`.

        Raises:
            UnavailableError: when any of the requests failed.
        """
        clients = [
            [request_body(server.model, new_tokens, prompt=prompt) for prompt in prompts]
            for prompts in work
        ]
        return self.load(server, COMPLETIONS, clients, **options)


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


def require_success(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the load client's answer unchanged if none of its requests failed.

    Args:
        answer: result of `load_client.measure`.

    Raises:
        UnavailableError: when any of the requests failed.
    """
    if answer["problems"]:
        raise UnavailableError(f"Requests failed: {answer['problems'][0]}")
    return answer
