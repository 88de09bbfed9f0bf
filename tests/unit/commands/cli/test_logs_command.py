"""`lockstep logs`: which lines it shows, in which order and form."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.commands.lifecycle.logs import parse_since
from services.commands.main import main
from shared.errors import UsageError
from shared.log import lines

NOW_S = 1_800_000_000.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Log files of one job per role: lines 0 to 5 by turns, and a print of a library."""
    monkeypatch.setenv("LOCKSTEP_LOG_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("LOCKSTEP_PATHS_RUN_DIR", str(tmp_path / "run"))
    for number in range(6):
        name = ("scheduler", "rank-0", "rank-1")[number % 3]
        line = lines.make(name, "counted", {"number": number}, time_s=NOW_S + number)
        with (tmp_path / f"{name}.log").open("a") as stream:
            stream.write(f"{lines.encode(line)}\n")
    with (tmp_path / "rank-0.log").open("a") as stream:
        stream.write("printed by MLX\n")
    return tmp_path


def _shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> Iterator[object]:
    assert main(["logs", "--json", *arguments]) == 0
    for text in capsys.readouterr().out.splitlines():
        line = json.loads(text)
        yield line.get("number", line.get("text"))


@pytest.mark.usefixtures("folder")
def test_logs_of_all_roles_are_in_order_of_time(capsys: pytest.CaptureFixture[str]) -> None:
    """The files of several processes are shown as one log; foreign output stays at its place."""
    assert list(_shown(capsys)) == [0, 1, 2, 3, 4, "printed by MLX", 5]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--role", "scheduler"], [0, 3]),
        (["--role", "rank"], [1, 2, 4, "printed by MLX", 5]),
        (["--rank", "0"], [1, 4, "printed by MLX"]),
        (["--role", "scheduler", "--rank", "0"], []),
        (["--lines", "2"], ["printed by MLX", 5]),
        (["--lines", "0"], []),
        (["--since", "2027-01-15T08:00:04+00:00"], [4, "printed by MLX", 5]),
        (["--since", "2027-01-15T08:00:04+00:00", "--lines", "1"], [5]),
    ],
)
def test_logs_are_chosen_by_role_rank_time_and_number(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: list[object]
) -> None:
    """Options are combined: a line must meet all of them."""
    assert list(_shown(capsys, *arguments)) == expected


@pytest.mark.usefixtures("folder")
def test_logs_for_people_have_date_and_name_on_every_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A line names its day and its process, because months and many processes are in the files."""
    assert main(["logs", "--rank", "0"]) == 0

    text = capsys.readouterr().out.splitlines()
    assert text[0][:4] == "2027"
    assert text[0][19:] == " rank 0    | info    counted number=1"
    assert text[2][19:] == " rank 0    | printed by MLX"


def test_followed_logs_show_new_lines_until_the_command_is_ended(folder: Path) -> None:
    """A line written after the start appears."""
    command = [sys.executable, "-m", "services.commands.main", "logs"]
    with subprocess.Popen(
        [*command, "--follow", "--json", "-n", "1"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["number"] == 5
            line = lines.make("gateway", "counted", {"number": 6})
            (folder / "gateway.log").write_text(f"{lines.encode(line)}\n")
            assert json.loads(process.stdout.readline())["number"] == 6
            assert process.poll() is None
        finally:
            # Not by SIGINT, which a test run in the background ignores.
            process.terminate()


@pytest.mark.parametrize(
    ("text", "expected_s"),
    [
        ("90s", NOW_S - 90.0),
        ("10m", NOW_S - 600.0),
        ("1.5h", NOW_S - 5_400.0),
        ("2d", NOW_S - 172_800.0),
        ("2027-01-15T08:00:00+00:00", NOW_S),
    ],
)
def test_time_of_first_line_is_an_age_or_a_date(text: str, expected_s: float) -> None:
    """Ages count back from now; a date may name its time zone."""
    assert parse_since(text, NOW_S) == expected_s


@pytest.mark.parametrize("text", ["yesterday", "10", "-5m", "5w", ""])
def test_meaningless_time_of_first_line_is_refused_with_examples(text: str) -> None:
    """The error shows how to write it."""
    with pytest.raises(UsageError, match=r"is no time: write an age \(10m, 2h, 1d\)"):
        parse_since(text, NOW_S)


def test_logs_without_files_say_where_the_log_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without log.directory the log is on standard output, which systemd's journal keeps."""
    monkeypatch.setattr("services.commands.lifecycle.logs.LOG_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("LOCKSTEP_PATHS_RUN_DIR", str(tmp_path))

    assert main(["logs"]) == 69
    assert "journalctl" in capsys.readouterr().err
    monkeypatch.setenv("LOCKSTEP_LOG_DIRECTORY", str(tmp_path))
    assert main(["logs"]) == 69
    assert f"There are no log files in {tmp_path}." in capsys.readouterr().err


def test_logs_in_unreadable_folder_say_who_can_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another user's logs are not taken for missing ones."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOCKSTEP_PATHS_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("LOCKSTEP_LOG_DIRECTORY", str(tmp_path / "file"))

    assert main(["logs"]) == 69
    assert "Run this as the user that runs Lockstep." in capsys.readouterr().err
