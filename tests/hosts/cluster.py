"""Two hosts from one inventory: gateway, scheduler, store and rank 0 on one, the rest on the other.

Each host has keys of its own, which the other one allows.
"""

import contextlib
import http.client
import io
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.commands import main
from tests.hosts.network import Network, Running

PORT = 8080
STREAM: dict[str, Any] = {
    "model": "lockstep-demo",
    "prompt": "one two three",
    "temperature": 1.0,
    "seed": 7,
    "max_tokens": 200,
    "stream": True,
}


def inventory(network: Network, folder: Path) -> Path:
    """Write the inventory; every host's files are in a folder of its own."""
    text = "[model]\npath = 'demo'\n"
    for name, roles, rank in (
        ("host-a", "'gateway', 'scheduler', 'cache_store'", 0),
        ("host-b", "'cache_store'", 1),
    ):
        text += (
            f"[[hosts]]\nname = '{name}'\naddress = '{network.bus[name]}'\n"
            f"data_address = '{network.data[name]}'\nroles = [{roles}]\nranks = [{rank}]\n"
            f"run_dir = '{folder}/{name}/run'\nkeys_dir = '{folder}/{name}/keys'\n"
            f"cache_dir = '{folder}/{name}/blocks'\n"
        )
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return path


def command(*arguments: str) -> tuple[int, str]:
    """Run a command that needs no network, in this process; return exit code and output."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main.main(arguments)
    return code, said.getvalue()


def exchange_keys(file: Path) -> None:
    """Make a pair on each host, and allow each on the other as what it is there."""
    public = {}
    for host in ("host-a", "host-b"):
        where = ("--inventory", str(file), "--host", host)
        assert command("keys", "new", *where)[0] == 0
        code, said = command("keys", "show", "--json", *where)
        assert code == 0, said
        public[host] = json.loads(said)["public_key"]
    for host, peer, roles in (
        ("host-a", "host-b", ("rank", "status")),
        ("host-b", "host-a", ("scheduler",)),
    ):
        named = [word for role in roles for word in ("--role", role)]
        code, said = command(
            *("keys", "allow", public[peer], peer, *named),
            *("--inventory", str(file), "--host", host),
        )
        assert code == 0, said


class Cluster:
    """The two hosts' supervisors."""

    def __init__(self, network: Network, file: Path) -> None:
        """Start none of them yet."""
        self.network = network
        self.file = file
        self.hosts: dict[str, Running] = {}

    def begin(self) -> None:
        """Start both; return when both say that they are ready."""
        # The one that needs the other comes first.
        self.start("host-b")
        self.start("host-a").wait_for_line("Lockstep is ready")
        self.hosts["host-b"].wait_for_line("Lockstep is ready; host-b runs rank 1 of 2")

    def start(self, host: str) -> Running:
        """Run `lockstep up` on a host, which finds itself in the inventory by its name."""
        self.hosts[host] = Running(self.network, host, ["up", "--inventory", str(self.file)])
        return self.hosts[host]

    def stop(self, host: str) -> int:
        """Press Ctrl-C on a host; return the exit code."""
        self.hosts[host].process.send_signal(signal.SIGINT)
        return self.hosts[host].end()

    def close(self) -> None:
        """Leave nothing running."""
        for running in self.hosts.values():
            running.close()

    @contextlib.contextmanager
    def ask(self, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        """Send a request to the gateway, as a client on its host."""
        with contextlib.closing(self.network.connect("host-a", PORT, timeout_s=60.0)) as client:
            client.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = client.getresponse()
            assert response.status == http.HTTPStatus.OK, response.read()
            yield response

    def stream(self) -> Iterator[str]:
        """Yield the pieces of the stream's text; it must end as a stream should."""
        ended = False
        with self.ask("/v1/completions", STREAM) as response:
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    ended = True
                elif line.startswith(b"data: "):
                    yield "".join(choice["text"] for choice in json.loads(data)["choices"])
        assert ended
