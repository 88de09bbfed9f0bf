"""Two hosts from one inventory, with keys.

One host runs gateway, scheduler, cache store and rank 0; the other a cache store and rank 1.
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
from tests.hosts.network import HostProcess, Network

PORT = 8080
STREAM: dict[str, Any] = {
    "model": "lockstep-demo",
    "prompt": "one two three",
    "temperature": 1.0,
    "seed": 7,
    "max_tokens": 200,
    "stream": True,
}


def write_inventory(network: Network, folder: Path) -> Path:
    """Write the inventory; each host has its own folder for files."""
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


def run_command(*arguments: str) -> tuple[int, str]:
    """Run a `lockstep` command without network in this process; return exit code and output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main.main(arguments)
    return code, output.getvalue()


def exchange_keys(file: Path) -> None:
    """Create a key pair on each host, and allow it on the other host with its roles."""
    public = {}
    for host in ("host-a", "host-b"):
        inventory = ("--inventory", str(file), "--host", host)
        assert run_command("keys", "new", *inventory)[0] == 0
        code, output = run_command("keys", "show", "--json", *inventory)
        assert code == 0, output
        public[host] = json.loads(output)["public_key"]
    for host, peer, roles in (
        ("host-a", "host-b", ("rank", "status")),
        ("host-b", "host-a", ("scheduler",)),
    ):
        role_options = [word for role in roles for word in ("--role", role)]
        code, output = run_command(
            *("keys", "allow", public[peer], peer, *role_options),
            *("--inventory", str(file), "--host", host),
        )
        assert code == 0, output


class Cluster:
    """The supervisors of both hosts."""

    def __init__(self, network: Network, file: Path) -> None:
        """Prepare the cluster; `start_all` starts the hosts."""
        self.network = network
        self.file = file
        self.hosts: dict[str, HostProcess] = {}

    def start_all(self) -> None:
        """Start both hosts and wait until both are ready."""
        # host-b needs host-a, and must be able to start before it.
        self.start("host-b")
        self.start("host-a").wait_for_line("Lockstep is ready")
        self.hosts["host-b"].wait_for_line("Lockstep is ready; host-b runs rank 1 of 2")

    def start(self, host: str) -> HostProcess:
        """Run `lockstep up` on a host, which is identified by its host name."""
        self.hosts[host] = HostProcess(self.network, host, ["up", "--inventory", str(self.file)])
        return self.hosts[host]

    def stop(self, host: str) -> int:
        """Interrupt a host's supervisor as Ctrl-C does; return the exit code."""
        self.hosts[host].process.send_signal(signal.SIGINT)
        return self.hosts[host].wait_and_close()

    def close(self) -> None:
        """Kill all processes."""
        for process in self.hosts.values():
            process.close()

    @contextlib.contextmanager
    def send_request(self, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        """Send a request to the gateway from its own host."""
        with contextlib.closing(self.network.connect("host-a", PORT, timeout_s=60.0)) as client:
            client.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = client.getresponse()
            assert response.status == http.HTTPStatus.OK, response.read()
            yield response

    def stream(self) -> Iterator[str]:
        """Yield the text deltas of a stream, and check that it ends with [DONE]."""
        ended = False
        with self.send_request("/v1/completions", STREAM) as response:
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    ended = True
                elif line.startswith(b"data: "):
                    yield "".join(choice["text"] for choice in json.loads(data)["choices"])
        assert ended
