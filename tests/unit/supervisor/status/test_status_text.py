"""Status for people: loading progress, the ready line, the table of `lockstep status`."""

import io
import json
import shlex

import pytest

from services.supervisor.console.console import Console
from services.supervisor.status import progress_text
from services.supervisor.status.status_table import render
from shared.configuration.loading import load_config
from shared.messages import DismissedRank, DraftStatistics
from tests.unit.supervisor.status.status_reports import rank_status, status_report


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_loading_line_on_terminal_shows_progress_bar_per_rank() -> None:
    """Each rank has a bar and its state."""
    loading = status_report(
        ready=False,
        ranks=[rank_status(0), rank_status(1, "loading", 0.5), rank_status(2, "joining")],
    )

    line = progress_text.loading_line(loading, with_bar=True)

    assert line == (
        "rank 0 [#########] ready  rank 1 [####.....]  50 %  rank 2 [.........] joining"
    )


@pytest.mark.parametrize("count", [1, 2, 4, 5, 8, 64])
def test_loading_line_fits_terminal_width(count: int) -> None:
    """A wrapped line could not be redrawn. More than four ranks share one bar."""
    ranks = [rank_status(n, "loading", n / count) for n in range(count)]

    line = progress_text.loading_line(status_report(ready=False, ranks=ranks), with_bar=True)

    assert len(line) <= progress_text.COLUMNS
    assert line.count("[") == (count if count <= 4 else 1)
    assert ("rank 0 0 %" in line) == (count > 4)


def test_loading_line_in_log_changes_only_every_ten_percent() -> None:
    """A log gets one line for ten percent, not one for each report."""
    lines = {
        progress_text.loading_line(
            status_report(ready=False, ranks=[rank_status(0, "loading", share / 100)]),
            with_bar=False,
        )
        for share in range(100)
    }

    assert len(lines) == 10
    assert "Loading: rank 0 30 %" in lines


def test_loading_line_says_waiting_for_ranks_before_first_rank_connects() -> None:
    """Before the first rank has connected, the line says that Lockstep waits for ranks."""
    assert progress_text.loading_line(status_report(ranks=[]), with_bar=True) == "Waiting for ranks"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:9000"),
        ("::1", "http://[::1]:9000"),
        ("localhost", "http://localhost:9000"),
    ],
)
def test_printed_base_url_has_valid_form_for_every_host_setting(host: str, url: str) -> None:
    """Every allowed host is shown as clients write it in a URL."""
    config = load_config(flags={"gateway.host": host, "gateway.port": "9000"})

    assert progress_text.base_url(config) == url


def test_ready_line_shows_model_address_number_of_ranks_and_backend() -> None:
    """The line names model, address, number of ranks and backend."""
    config = load_config(flags={"world.size": "2"})

    assert progress_text.ready_line(config, status_report()) == (
        "Lockstep is ready: model lockstep-demo on http://127.0.0.1:8080 (2 ranks, ring)"
    )
    assert "(1 rank, off)" in progress_text.ready_line(
        config, status_report(world_size=1, backend="off")
    )


def test_printed_curl_command_is_valid_shell_for_any_model_name() -> None:
    """A shell parses the line as one command with a valid JSON body."""
    config = load_config(flags={"model.served_name": 'it\'s "mine"'})

    for needs_key in (False, True):
        curl = progress_text.curl_line(config, needs_key=needs_key)
        words = shlex.split(curl.replace("\\\n", " "))

        assert words[:3] == ["curl", "-N", "http://127.0.0.1:8080/v1/chat/completions"]
        assert ("Authorization: Bearer $LOCKSTEP_API_KEY" in words) == needs_key
        assert json.loads(words[-1])["model"] == 'it\'s "mine"'


def test_status_table_shows_world_queue_kv_and_ranks() -> None:
    """The table has state, world, queue, KV cache, rates, and for each rank its BLAS and device."""
    text = render(status_report(ranks=[rank_status(0), rank_status(1, "loading", 0.25)]))

    assert text.startswith("Lockstep is ready\n")
    for words in (
        ["2 x ring, epoch 1"],
        ["3 running, 1 waiting"],
        ["1,024 of 81,920 tokens"],
        ["tokens_per_second 123.46"],
        ["tokens_total 5,000"],
        ["0", "ready", "100", "mac-1", "gpu", "OpenBLAS 0.3", "0.32.4", "-", "1,024 MiB"],
        ["1", "loading 25%", "101"],
    ):
        assert "  ".join(words) in _squeezed(text)


def test_status_text_names_formats_of_the_gateway_if_it_answers() -> None:
    """Operators see which tool calls and which reasoning are read."""
    text = render(status_report(), formats="glm tool calls, think reasoning")

    assert "  formats      glm tool calls, think reasoning\n" in text
    assert "formats" not in render(status_report())


def test_status_text_begins_with_reason_when_lockstep_is_not_ready() -> None:
    """The first line gives the reason."""
    text = render(status_report(ready=False, reason="rank 1 is missing", draining=True))

    assert text.startswith("Lockstep is not ready (rank 1 is missing), draining\n")


@pytest.mark.parametrize(
    ("failure", "remedy"),
    [("configuration", "change the setting"), ("epochs", "lockstep restart scheduler")],
)
def test_status_text_shows_failure_of_scheduler_with_remedy(failure: str, remedy: str) -> None:
    """The second line gives the remedy."""
    lines = render(status_report(ready=False, reason="It broke.", failure=failure)).splitlines()

    assert lines[0] == "Lockstep is not ready (It broke.)"
    assert remedy in lines[1]


def test_status_text_names_command_that_ends_drain_while_draining() -> None:
    """The second line names `lockstep drain --off`."""
    lines = render(status_report(ready=False, reason="Draining.", draining=True)).splitlines()

    assert lines[0].endswith(", draining")
    assert "lockstep drain --off" in lines[1]


def test_status_text_names_change_of_the_world_since_last_start() -> None:
    """The scheduler's sentence has a line of its own, which is missing without a change."""
    text = render(status_report(world_change="The world has changed."))

    assert "  change       The world has changed." in text.splitlines()
    assert "change" not in render(status_report())


def test_status_text_shows_dismissed_rank_processes_with_their_hosts() -> None:
    """Rank processes that have not ended yet are shown with their hosts; without any there is no
    line."""
    left = [DismissedRank(host="mac-1", pid=7), DismissedRank(host="mac-2", pid=8)]

    assert (
        "  dismissed    7 on mac-1, 8 on mac-2"
        in render(status_report(dismissed=left)).splitlines()
    )
    assert "dismissed" not in render(status_report())


def _squeezed(text: str) -> str:
    return "\n".join(
        "  ".join(word.strip() for word in line.split("  ") if word.strip())
        for line in text.splitlines()
    )


def test_console_writes_plain_text_with_role_names_to_log() -> None:
    """A log gets plain text, and a progress line only when it changes."""
    stream = io.StringIO()
    console = Console(stream)

    console.show_progress("half")
    console.show_progress("half")
    console.forward_line("rank 0", "hello")
    console.show_progress("")

    assert stream.getvalue() == "half\nrank 0    | hello\n"


def test_console_on_terminal_redraws_progress_below_log_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A log line is printed above the progress line, which is drawn again."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    stream = _Terminal()
    console = Console(stream)

    console.show_progress("half")
    console.forward_line("rank 0", "hello")

    assert stream.getvalue().endswith("| \x1b[0m hello\nhalf".replace("| ", "|"))
    assert "\x1b[36mrank 0" in stream.getvalue()


def test_console_raises_no_error_when_its_stream_is_closed() -> None:
    """Output to a closed stream must not keep the supervisor from stopping its children."""
    stream = io.StringIO()
    console = Console(stream)
    stream.close()

    console.print_line("text")


def test_status_text_has_one_draft_line_per_speculation_method() -> None:
    """The line has proposed and accepted drafts, acceptance by position and tokens per step."""
    text = render(
        status_report(
            counters={"steps_total": 9.0},
            drafts=[
                DraftStatistics(method="eagle", rows=10, proposed_at=[10, 10], accepted_at=[8, 5])
            ],
        )
    )
    line = "drafts       eagle: 20 proposed, 13 accepted (65%; by position 80 50 %), 2.30 tokens"
    assert line in text
    assert "drafts_eagle" not in text
    assert "steps_total 9" in text


def test_status_text_has_no_draft_line_without_speculation() -> None:
    """Without speculation the table has no such line."""
    assert "\n  drafts " not in render(status_report(counters={"steps_total": 9.0}))
