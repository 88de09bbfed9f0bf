"""The very commands of docker-compose.dev.yml, as processes of this machine: they serve and end."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared import limits
from shared.configuration.loading import API_KEYS_VARIABLE
from tests.captured_process import ROOT
from tests.ports import free_port
from tests.process_table import wait_until_ended
from tests.unit.commands.deployment import compose_file
from tests.unit.commands.deployment.compose_file import Service

KEY = "k" * 48
READY_DEADLINE_S = 90.0


class Containers:
    """One process per service; folders and addresses stand for the containers' own."""

    def __init__(self, folder: Path) -> None:
        """Start them all at once, as Docker does."""
        self.port = free_port()
        self._folder = folder
        self.processes: dict[str, subprocess.Popen[str]] = {}
        for name, service in compose_file.read_services({API_KEYS_VARIABLE: f"dev={KEY}"}).items():
            self.processes[name] = self._start(name, service)

    def log(self) -> str:
        """Return what all of them have written."""
        return "\n".join(
            f"[{name}] {line}"
            for name in self.processes
            for line in (self._folder / f"{name}.log").read_text().splitlines()
        )

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Ask the gateway with the key; return status and content, or 0 when nobody listens."""
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
        """Wait for what the gateway's health check waits for."""
        until_s = time.monotonic() + READY_DEADLINE_S
        while self.request("GET", "/readyz")[0] != http.HTTPStatus.OK:
            ended = [name for name, one in self.processes.items() if one.poll() is not None]
            assert not ended, f"{ended}\n{self.log()}"
            assert time.monotonic() < until_s, self.log()
            time.sleep(0.1)

    def stop(self, name: str, deadline_s: float) -> int:
        """Send what `docker stop` sends; return the exit code."""
        process = self.processes[name]
        process.send_signal(signal.SIGTERM)
        return process.wait(deadline_s)

    def close(self) -> None:
        """Leave nothing running."""
        for process in self.processes.values():
            process.kill()
            process.wait()

    def _start(self, name: str, service: Service) -> subprocess.Popen[str]:
        for folder in service.mounts:
            self._here(folder).mkdir(mode=0o700, exist_ok=True)
        own = {key: self._local(value) for key, value in service.environment.items()}
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

    def _here(self, folder: str) -> Path:
        return self._folder / folder.strip("/")

    def _local(self, value: str) -> str:
        """Return a setting with this machine's folders, and with loopback for every address."""
        for folder in ("/bus", "/blocks"):
            value = value.replace(folder, str(self._here(folder)))
        return "127.0.0.1" if value == "0.0.0.0" or value.startswith("172.31.77.") else value


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Containers]:
    """All services; none outlives the test."""
    started = Containers(tmp_path)
    try:
        yield started
    finally:
        started.close()


def test_the_services_answer_a_chat_and_end_cleanly(containers: Containers) -> None:
    """They find each other in any order; a chat is answered, for the key only; SIGTERM ends all."""
    containers.wait_until_healthy()
    question = {"role": "user", "content": "What is Lockstep?"}
    body = {"model": "lockstep-demo", "messages": [question], "temperature": 0.0, "max_tokens": 60}

    status, content = containers.request("POST", "/v1/chat/completions", body)

    assert status == http.HTTPStatus.OK, content
    assert "Lockstep" in json.loads(content)["choices"][0]["message"]["content"]
    ranks = [one for one in containers.processes if one.startswith("rank")]
    assert len(ranks) == 2
    # As `docker compose stop` would: whoever has nothing open ends at once.
    assert containers.stop("gateway", 20.0) == limits.EXIT_OK, containers.log()
    assert containers.stop("scheduler", 20.0) == limits.EXIT_OK, containers.log()
    # Without a scheduler ranks end by themselves, and are not started again here.
    for name in ranks:
        assert containers.processes[name].wait(20.0) in (limits.EXIT_WORLD_LOST, -signal.SIGTERM)
    assert containers.stop("store", 20.0) == limits.EXIT_OK, containers.log()
    wait_until_ended([one.pid for one in containers.processes.values()], 5.0)
