"""Downloads with the real client from a local server that speaks the protocol of the hub."""

import http.server
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.support.background_server import run_in_background

ROOT = Path(__file__).resolve().parents[4]
REVISION = "c" * 40
FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "model.safetensors": b"\x07" * 3_000_000,
    "tokenizer.json": b"{}",
    "modeling.py": b"raise SystemExit",
    "README.md": b"not needed",
    "picture.png": b"not needed",
}
CODE = """
import json, sys
from services.rank_worker.model.download import download
from shared.errors import LockstepError
progress = []
try:
    folder = download(sys.argv[1], progress.append, code=sys.argv[2] == "code")
    found = sorted(path.name for path in folder.iterdir())
    print(json.dumps({"files": found, "folder": str(folder), "progress": progress}))
except LockstepError as error:
    print(json.dumps({"error": str(error), "kind": type(error).__name__}))
"""

GATEWAY_CODE = """
import json, sys
from services.gateway.tokenizing import tokenizer
from shared.configuration.settings import ModelConfig
from shared.errors import LockstepError
try:
    tokenizer.load(ModelConfig(path=sys.argv[1]))
except LockstepError as error:
    print(json.dumps({"error": str(error), "kind": type(error).__name__}))
"""


class _Hub(http.server.BaseHTTPRequestHandler):
    """Hub with one repository, acme/tiny, and a gated one."""

    requested: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path.startswith("/api/models/acme/tiny/revision/"):
            self._send_json({"id": "acme/tiny", "sha": REVISION, "siblings": []})
        elif path.startswith("/api/models/acme/tiny/tree/"):
            self._send_json(
                [
                    {"type": "file", "path": path, "size": len(data), "oid": path}
                    for path, data in FILES.items()
                ]
            )
        elif path.startswith("/acme/tiny/resolve/") and name in FILES:
            if with_body:
                self.requested.append(name)
            headers = {"ETag": f'"{name}"', "X-Repo-Commit": REVISION}
            self._send(200, FILES[name], headers, with_body=with_body)
        else:
            code = "GatedRepo" if "gated" in path else "RepoNotFound"
            status = 403 if "gated" in path else 404
            self._send(status, b"", {"X-Error-Code": code}, with_body=with_body)

    def _send_json(self, value: Any) -> None:
        headers = {"Content-Type": "application/json"}
        self._send(200, json.dumps(value).encode(), headers, with_body=True)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[str]:
    """Serve a hub and return its address."""
    _Hub.requested.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    with run_in_background(server):
        yield f"http://127.0.0.1:{server.server_port}"


def _download(
    hub: str, home: Path, name: str, code: str = "", program: str = CODE
) -> dict[str, Any]:
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
        "HF_ENDPOINT": hub,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", program, name, code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_model_is_downloaded_only_once_and_reports_progress(hub: str, tmp_path: Path) -> None:
    """Only needed files are downloaded, with progress up to 1, and only once."""
    first = _download(hub, tmp_path, "acme/tiny")
    requested = sorted(_Hub.requested)
    again = _download(hub, tmp_path, "acme/tiny")

    assert first["files"] == ["config.json", "model.safetensors", "tokenizer.json"] == requested
    assert first["progress"][-1] == 1.0
    assert all(0.0 <= part <= 1.0 for part in first["progress"])
    assert again["folder"] == first["folder"]
    assert sorted(_Hub.requested) == requested


def test_python_files_of_model_are_downloaded_only_with_trust_remote_code(
    hub: str, tmp_path: Path
) -> None:
    """Python files of a repository are downloaded only with trust_remote_code."""
    assert "modeling.py" in _download(hub, tmp_path, "acme/tiny", "code")["files"]


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("acme/nothing", "ConfigError", "has no model acme/nothing"),
        ("acme/gated", "ConfigError", "acme/gated is gated"),
    ],
)
def test_missing_and_gated_models_are_refused_with_different_messages(
    hub: str, tmp_path: Path, name: str, kind: str, message: str
) -> None:
    """Missing and gated models have different messages, in rank and gateway."""
    for program in (CODE, GATEWAY_CODE):
        found = _download(hub, tmp_path, name, program=program)

        assert found["kind"] == kind
        assert message in found["error"]


def test_gateway_downloads_config_and_tokenizer_but_no_weights(hub: str, tmp_path: Path) -> None:
    """The gateway downloads config and tokenizer only, and reports an unusable tokenizer."""
    found = _download(hub, tmp_path, "acme/tiny", program=GATEWAY_CODE)

    assert sorted(_Hub.requested) == ["config.json", "tokenizer.json"]
    assert "tokenizer of acme/tiny cannot be loaded" in found["error"]


def test_downloaded_model_is_used_when_hub_is_unreachable(hub: str, tmp_path: Path) -> None:
    """Without the hub a downloaded model is used; another one raises UnavailableError."""
    first = _download(hub, tmp_path, "acme/tiny")
    unreachable = "http://127.0.0.1:9"

    assert _download(unreachable, tmp_path, "acme/tiny")["files"] == first["files"]
    assert _download(unreachable, tmp_path, "acme/other") == {
        "kind": "UnavailableError",
        "error": "The model acme/other is not on this machine, and the hub does not answer.",
    }
