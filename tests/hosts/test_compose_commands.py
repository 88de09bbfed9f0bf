"""The commands of docker-compose.dev.yml, run as processes of this machine."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared import limits
from shared.configuration.loading import API_KEYS_VARIABLE
from tests.support.captured_process import ROOT
from tests.support.ports import free_port
from tests.support.process_table import wait_until_ended
from tests.support.waiting import wait_until
from tests.unit.commands.deployment import compose_file
from tests.unit.commands.deployment.compose_file import Service

KEY = "k" * 48
READY_DEADLINE_S = 90.0


class Containers:
    """One process per service, with local folders and addresses in place of those of Docker."""

    def __init__(self, folder: Path) -> None:
        """Start all services at once, as Docker does."""
        self.port = free_port()
        self._folder = folder
        self.processes: dict[str, subprocess.Popen[str]] = {}
        for name, service in compose_file.read_services({API_KEYS_VARIABLE: f"dev={KEY}"}).items():
            self.processes[name] = self._start(name, service)

    def log(self) -> str:
        """Return the output of all services."""
        return "\n".join(
            f"[{name}] {line}"
            for name in self.processes
            for line in (self._folder / f"{name}.log").read_text().splitlines()
        )

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Send a request with the key; return status and body, or status 0 without a connection."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60.0)
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        with contextlib.closing(client):
            try:
                client.request(method, path, json.dumps(body) if body else None, headers)
                response = client.getresponse()
                return response.status, response.read()
            except OSError:
                return 0, b""

    def wait_until_healthy(self) -> None:
        """Wait until the gateway is ready; fail if a service ends before."""

        def is_ready() -> bool:
            ended = [name for name, one in self.processes.items() if one.poll() is not None]
            assert not ended, f"{ended}\n{self.log()}"
            return self.request("GET", "/readyz")[0] == http.HTTPStatus.OK

        wait_until(is_ready, READY_DEADLINE_S, poll_s=0.1, failure=self.log)

    def stop(self, name: str, deadline_s: float) -> int:
        """Terminate a service as `docker stop` does; return the exit code."""
        process = self.processes[name]
        process.send_signal(signal.SIGTERM)
        return process.wait(deadline_s)

    def close(self) -> None:
        """Kill all services."""
        for process in self.processes.values():
            process.kill()
            process.wait()

    def _start(self, name: str, service: Service) -> subprocess.Popen[str]:
        for folder in service.mounts:
            self._local_folder(folder).mkdir(mode=0o700, exist_ok=True)
        own = {key: self._local_value(value) for key, value in service.environment.items()}
        own |= {"LOCKSTEP_PATHS_RUN_DIR": str(self._folder / f"run-{name}")}
        if "LOCKSTEP_GATEWAY_PORT" in own:
            own["LOCKSTEP_GATEWAY_PORT"] = str(self.port)
        inherited = {key: one for key, one in os.environ.items() if "LOCKSTEP" not in key}
        with (self._folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "services.commands.main", *service.command],
                cwd=ROOT,
                env=inherited | own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def _local_folder(self, folder: str) -> Path:
        return self._folder / folder.strip("/")

    def _local_value(self, value: str) -> str:
        """Return a setting with local folders and with loopback in place of each address."""
        for folder in ("/bus", "/blocks"):
            value = value.replace(folder, str(self._local_folder(folder)))
        return "127.0.0.1" if value == "0.0.0.0" or value.startswith("172.31.77.") else value


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Containers]:
    """Start all services; kill them after the test."""
    started = Containers(tmp_path)
    try:
        yield started
    finally:
        started.close()


def test_compose_services_answer_chat_and_end_on_sigterm(containers: Containers) -> None:
    """The services connect in any order, answer a chat and end on SIGTERM."""
    containers.wait_until_healthy()
    message = {"role": "user", "content": "What is Lockstep?"}
    body = {"model": "lockstep-demo", "messages": [message], "temperature": 0.0, "max_tokens": 60}

    status, content = containers.request("POST", "/v1/chat/completions", body)

    assert status == http.HTTPStatus.OK, content
    assert "Lockstep" in json.loads(content)["choices"][0]["message"]["content"]
    ranks = [one for one in containers.processes if one.startswith("rank")]
    assert len(ranks) == 2
    # As by `docker compose stop`: a service without open work ends at once.
    assert containers.stop("gateway", 20.0) == limits.EXIT_OK, containers.log()
    assert containers.stop("scheduler", 20.0) == limits.EXIT_OK, containers.log()
    # Ranks end without a scheduler; Docker would restart them, this test does not.
    for name in ranks:
        assert containers.processes[name].wait(20.0) in (limits.EXIT_WORLD_LOST, -signal.SIGTERM)
    assert containers.stop("store", 20.0) == limits.EXIT_OK, containers.log()
    wait_until_ended([one.pid for one in containers.processes.values()], 5.0)
