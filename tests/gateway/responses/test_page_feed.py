"""The page's files and events over HTTP, with two API keys."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from services.gateway.endpoints.page.assets import PREFIX
from services.gateway.endpoints.page.endpoints import FEED_PATH, VIEWERS_MAX
from shared.messages import CachedPrefix
from tests.gateway.running_gateway import RunningGateway, start_error
from tests.gateway.scripted_scheduler import reply_after, reply_with
from tests.support.ports import free_port
from tests.support.waiting import wait_until

ALICE, BOB = "alice-has-a-long-secret-key", "bob-has-another-secret-key"
CHAT = "/v1/chat/completions"


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


class Watcher:
    """An open connection to the feed."""

    def __init__(self, gateway: RunningGateway, key: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=20)
        self._connection.request("GET", FEED_PATH, headers=_headers(key))
        self.response = self._connection.getresponse()

    def events(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and content of each event."""
        name = ""
        for line in self.response:
            if line.startswith(b"event: "):
                name = line[7:].strip().decode()
            elif line.startswith(b"data: "):
                yield name, json.loads(line[6:])

    def next(self, name: str) -> Any:
        """Return the content of the next event with this name."""
        return next(content for one, content in self.events() if one == name)

    def close(self) -> None:
        """Close the connection."""
        self.response.close()
        self._connection.close()


@pytest.fixture(scope="module")
def keyed(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """A gateway with the keys of Alice and Bob."""
    environment = {"LOCKSTEP_API_KEYS": f"alice={ALICE},bob={BOB}"}
    run_dir = tmp_path_factory.mktemp("run")
    with RunningGateway.start(model_folder, run_dir, environment=environment) as running:
        yield running


def _send(
    gateway: RunningGateway,
    method: str,
    path: str,
    headers: dict[str, str] | None = None,
    body: str | None = None,
    port: int = 0,
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Send a request; return status, headers and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port or gateway.port, timeout=30)
    with closing(connection):
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.headers, response.read()


def _ask(gateway: RunningGateway, key: str) -> tuple[int, dict[str, Any]]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "one two three four"}]}
    status, _, content = _send(gateway, "POST", CHAT, _headers(key), json.dumps(body))
    answer: dict[str, Any] = json.loads(content)
    return status, answer


def test_files_of_page_need_no_key_and_forbid_foreign_content_and_data_need_one(
    keyed: RunningGateway,
) -> None:
    """The page shows nothing by itself, so a browser gets it before its key is typed in."""
    for path in ("/", f"{PREFIX}app.js", f"{PREFIX}vendor/licences.txt"):
        status, headers, body = _send(keyed, "GET", path, {"Accept-Encoding": "gzip"})
        assert status == 200
        assert body
        assert headers["Content-Encoding"] == "gzip"
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        status, _, body = _send(keyed, "GET", path, {"If-None-Match": headers["ETag"]})
        assert (status, body) == (304, b"")
    for path in (FEED_PATH, "/v1/lockstep/status", f"{PREFIX}../app.js"):
        assert keyed.get(path)[0] == 401
    assert keyed.get(f"{PREFIX}absent.js", _headers(ALICE))[0] == 404


def test_feed_sends_snapshots_and_only_own_requests_and_misses(keyed: RunningGateway) -> None:
    """Bob's page has the figures of the cluster, and neither Alice's requests nor her text."""
    keyed.scheduler.reply = reply_with([7, 8], cached=CachedPrefix(diverged_at=2, miss="diverged"))
    assert _ask(keyed, ALICE)[0] == 200
    release = threading.Event()
    keyed.scheduler.reply = reply_after([7, 8, 9, 10], release)
    before = len(keyed.scheduler.submitted)
    running = threading.Thread(target=_ask, args=(keyed, ALICE))
    running.start()
    wait_until(lambda: len(keyed.scheduler.submitted) > before, 10.0)
    name = keyed.scheduler.submitted[-1].request_id
    with closing(Watcher(keyed, ALICE)) as alice, closing(Watcher(keyed, BOB)) as bob:
        snapshot = alice.next("snapshot")
        assert snapshot["status"]["ready"]
        assert snapshot["open_requests"] == 1
        own = alice.next("own")
        assert own["requests"] == [name]
        [miss] = own["misses"]
        assert (miss["miss"], miss["diverged_at"]) == ("diverged", 2)
        assert miss["text_before"]
        assert miss["text_after"]
        assert bob.next("own") == {"requests": [], "misses": []}
    release.set()
    running.join(20)


def test_request_is_cancelled_by_its_owner_only(keyed: RunningGateway) -> None:
    """Another key gets a 404; the owner's DELETE ends the request at client and scheduler."""
    release = threading.Event()
    keyed.scheduler.reply = reply_after([7, 8, 9, 10], release)
    before, aborts = len(keyed.scheduler.submitted), len(keyed.scheduler.aborts)
    answers: list[tuple[int, dict[str, Any]]] = []
    running = threading.Thread(target=lambda: answers.append(_ask(keyed, ALICE)))
    running.start()
    wait_until(lambda: len(keyed.scheduler.submitted) > before, 10.0)
    path = f"/v1/lockstep/requests/{keyed.scheduler.submitted[-1].request_id}"
    statuses = [_send(keyed, "DELETE", path, _headers(key))[0] for key in (BOB, ALICE)]
    running.join(20)
    assert statuses == [404, 200]
    [(status, answer)] = answers
    assert (status, answer["error"]["code"]) == (499, "cancelled")
    keyed.scheduler.wait_aborts(aborts + 1)


def test_feed_refuses_more_viewers_than_its_limit_and_frees_their_places(
    model_folder: Path, tmp_path: Path
) -> None:
    """The viewer after the last gets a 429 that says why; a page that closes makes room."""
    prelude = "import services.gateway.endpoints.page.endpoints as e; e.VIEWERS_MAX = 2"
    assert VIEWERS_MAX > 2
    with (
        RunningGateway.start(model_folder, tmp_path, prelude=prelude) as gateway,
        closing(Watcher(gateway, "")) as first,
        closing(Watcher(gateway, "")) as second,
    ):
        first.next("snapshot")
        second.next("snapshot")
        status, body = gateway.get(FEED_PATH)
        assert (status, json.loads(body)["error"]["code"]) == (429, "too_many_viewers")
        first.close()
        wait_until(lambda: _is_watched(gateway), 10.0, poll_s=0.1)


def _is_watched(gateway: RunningGateway) -> bool:
    with closing(Watcher(gateway, "")) as watcher:
        return watcher.response.status == 200


def test_snapshots_go_on_while_scheduler_is_away(model_folder: Path, tmp_path: Path) -> None:
    """They say so, and have no activity."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        gateway.scheduler.stop()
        with closing(Watcher(gateway, "")) as watcher:
            snapshots = [watcher.next("snapshot") for _ in range(5)]
        assert snapshots[-1]["activity"] is None
        assert snapshots[-1]["status"]["reason"] == "the scheduler does not report"


def test_page_is_served_on_its_own_port_and_path_or_not_at_all(
    model_folder: Path, tmp_path: Path
) -> None:
    """With `dashboard_port` the other port has no page; with "" no page is served."""
    page = free_port()
    settings: dict[str, Any] = {"dashboard": "/cluster", "dashboard_port": page}
    with RunningGateway.start(model_folder, tmp_path, **settings) as gateway:
        assert gateway.get("/cluster")[0] == 404
        assert gateway.get("/")[0] == 404
        assert b"Lockstep" in _send(gateway, "GET", "/cluster", port=page)[2]
    folder = tmp_path / "off"
    folder.mkdir()
    with RunningGateway.start(model_folder, folder, dashboard="") as gateway:
        assert gateway.get("/")[0] == 404


def test_page_on_path_of_api_is_refused_at_start(model_folder: Path, tmp_path: Path) -> None:
    """The error names the setting."""
    model = {"path": str(model_folder), "served_name": "tiny"}
    settings = {
        "gateway": {"port": free_port(), "dashboard": "/metrics"},
        "model": model,
        "paths": {"run_dir": str(tmp_path)},
        "scheduler": {},
        "cache": {"ssd": False},
    }
    assert "gateway.dashboard is /metrics" in start_error(settings)
