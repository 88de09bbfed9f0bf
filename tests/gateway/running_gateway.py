"""Gateway processes for tests, with a scripted scheduler and a plain HTTP client."""

import contextlib
import functools
import http.client
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.messages import StatusReported
from tests.gateway.scripted_scheduler import ScriptedScheduler
from tests.support.forked_process import ForkedProcess, ForkServer
from tests.support.ports import free_port
from tests.support.waiting import wait_until

_ROOT = Path(__file__).resolve().parents[2]
_CODE = (
    "import os, sys, json; from shared.configuration.loading import config_from_tree; "
    "from services.gateway.main import run; "
    "has_keys = bool(os.environ.get('LOCKSTEP_API_KEYS')); "
    "sys.exit(run(config_from_tree(json.loads(sys.argv[1]), has_api_keys=has_keys)))"
)
START_S = 30.0
RESPONSE_S = 60.0
"""Timeout of one response in seconds; other tests may keep both cores busy."""
FORGET_FULL_QUEUE = "import services.gateway.http.admission as q; q.FULL_MEMORY_S = 0.0"
"""Prelude: the gateway does not remember that the scheduler's queue was full."""


@functools.cache
def _fork_server() -> ForkServer:
    # The gateway sets both variables before it imports its tokenizer, which reads them then.
    quiet = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "TOKENIZERS_PARALLELISM": "false"}
    modules = ["services.gateway.main", "transformers.models.auto.tokenization_auto"]
    return ForkServer(modules, {**os.environ, **quiet, "PYTHONPATH": str(_ROOT)})


def launch(
    settings: dict[str, Any], environment: dict[str, str] | None = None, prelude: str = ""
) -> ForkedProcess:
    """Start a gateway process.

    Args:
        settings: the tree of settings, as in the configuration file.
        environment: environment variables in addition to those of this process.
        prelude: Python code that runs first, for example to shorten a timeout.
    """
    return _fork_server().start(
        f"{prelude}\n{_CODE}",
        [json.dumps(settings)],
        {**os.environ, "PYTHONPATH": str(_ROOT), **(environment or {})},
    )


def start_error(settings: dict[str, Any]) -> str:
    """Start a gateway that must exit with code 78, and return its standard error."""
    with launch(settings) as process:
        try:
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    text = errors.decode()
    assert process.returncode == 78, text
    assert "Traceback" not in text
    return text


class RunningGateway:
    """A gateway process, its scheduler, and an HTTP client."""

    def __init__(self, process: ForkedProcess, port: int, scheduler: ScriptedScheduler) -> None:
        self.process = process
        self.port = port
        self.scheduler = scheduler
        self.url = f"http://127.0.0.1:{port}"

    @classmethod
    @contextlib.contextmanager
    def start(
        cls,
        model_folder: Path,
        run_dir: Path,
        *,
        environment: dict[str, str] | None = None,
        prelude: str = "",
        drain_s: float = 3.0,
        report: StatusReported | None = None,
        tenant_share: float = 0.75,
        aliases: list[str] | None = None,
        has_store: bool = False,
        tool_format: str = "auto",
        **gateway: object,
    ) -> Iterator["RunningGateway"]:
        """Start a gateway, wait until it is ready, and stop it at the end of the context.

        Args:
            model_folder: folder with the tokenizer.
            run_dir: an empty folder.
            environment: as for `launch`.
            prelude: as for `launch`.
            drain_s: seconds in which running requests may finish after SIGTERM.
            report: the scheduler's status from the beginning; None: ready.
            tenant_share: the setting `tenants.share`.
            aliases: the setting `model.aliases`.
            has_store: a cache store uses the same folder.
            tool_format: the setting `model.tool_format`.
            gateway: further settings of the section `gateway`.
        """
        port = free_port()
        model = {"path": str(model_folder), "served_name": "tiny"}
        settings = {
            "gateway": {"port": port, **gateway},
            "model": {**model, "aliases": aliases or [], "tool_format": tool_format},
            "paths": {"run_dir": str(run_dir)},
            "scheduler": {"drain_s": drain_s},
            "tenants": {"share": tenant_share},
            "cache": {"block_tokens": 32, "ssd": has_store},
        }
        scheduler = ScriptedScheduler(f"ipc://{run_dir}/gateways.sock", report=report)
        process = launch(settings, environment, prelude)
        running = cls(process, port, scheduler)
        try:
            running.wait_ready()
            yield running
        finally:
            scheduler.stop()
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stderr.close()

    def wait_ready(self) -> None:
        """Wait until /readyz has status 200. Raises AssertionError when the process ends."""
        wait_until(
            self._is_ready,
            START_S,
            poll_s=0.05,
            failure=lambda: f"the gateway is not ready: {self.get('/v1/lockstep/status')}",
        )

    def _is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(self.process.stderr.read().decode())
        with contextlib.suppress(OSError):
            return self.get("/readyz")[0] == 200
        return False

    def wait_draining(self, timeout_s: float = 10.0) -> None:
        """Wait until the gateway drains, that is until the signal has arrived."""
        wait_until(
            lambda: json.loads(self.get("/readyz")[1])["reason"] == "the gateway is shutting down",
            timeout_s,
            poll_s=0.02,
            failure="the gateway does not drain",
        )

    def generation_tokens(self) -> int:
        """Return how many tokens the gateway has received from schedulers."""
        _, page = self.get("/metrics")
        found = re.search(rb"^lockstep_generation_tokens_total (\S+)$", page, re.MULTILINE)
        assert found is not None, page
        return int(float(found[1]))

    def stop(self) -> str:
        """End the process and return its log."""
        self.process.terminate()
        logged = self.process.stderr.read().decode()
        assert self.process.wait(10) == 0
        return logged

    def rss_bytes(self) -> int:
        """Return the process's resident memory in bytes."""
        return int(self._ps("rss")) * 1_024

    def open_files(self) -> int:
        """Return the number of the process's open descriptors."""
        listed = Path(f"/proc/{self.process.pid}/fd")
        if listed.is_dir():
            return len(list(listed.iterdir()))
        found = subprocess.run(
            ["lsof", "-p", str(self.process.pid)], check=True, capture_output=True, text=True
        )
        return len(found.stdout.splitlines())

    def _ps(self, column: str) -> str:
        found = subprocess.run(
            ["ps", "-o", f"{column}=", "-p", str(self.process.pid)],
            check=True,
            capture_output=True,
            text=True,
        )
        return found.stdout.strip()

    def send(self, data: bytes, timeout_s: float = 10.0) -> bytes:
        """Send bytes; return the received bytes, until the server closes or `timeout_s` is over."""
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            client.settimeout(timeout_s)
            received = b""
            try:
                client.sendall(data)
                while part := client.recv(65_536):
                    received += part
            except (TimeoutError, ConnectionError):
                pass
            return received

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        """GET a path; return status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path, headers=headers or {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def post(
        self, path: str, body: bytes | dict[str, Any], headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """POST JSON; return status, body and headers."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=RESPONSE_S)
        try:
            connection.request(
                "POST", path, data, {"Content-Type": "application/json", **(headers or {})}
            )
            response = connection.getresponse()
            raw = response.read()
            fields = {name.lower(): value for name, value in response.getheaders()}
            return response.status, json.loads(raw or b"{}"), fields
        finally:
            connection.close()

    def chat(self, text: str = "Hello", **fields: Any) -> tuple[int, dict[str, Any]]:
        """POST a chat completion with one message; return status and body."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
        return self.post("/v1/chat/completions", body)[:2]

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any] | str]:
        """POST with `stream`; return the events."""
        return self.stream_with_headers(path, body)[0]

    def iter_events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
        """POST with `stream`; yield each event as it arrives."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=RESPONSE_S)
        try:
            data = json.dumps({"model": "tiny", "stream": True, **body}).encode()
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            for line in connection.getresponse():
                if line.startswith(b"data: "):
                    text = line.removeprefix(b"data: ").strip().decode()
                    yield text if text == "[DONE]" else json.loads(text)
        finally:
            connection.close()

    def stream_with_headers(
        self, path: str, body: dict[str, Any]
    ) -> tuple[list[dict[str, Any] | str], dict[str, str]]:
        """POST with `stream`; return the events and the headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=RESPONSE_S)
        try:
            data = json.dumps({"model": "tiny", "stream": True, **body}).encode()
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            events = response.read().decode().split("\n\n")
            assert events.pop() == ""
            assert all(event.startswith("data: ") for event in events)
            texts = [event.removeprefix("data: ") for event in events]
            fields = {name.lower(): value for name, value in response.getheaders()}
            return [text if text == "[DONE]" else json.loads(text) for text in texts], fields
        finally:
            connection.close()
