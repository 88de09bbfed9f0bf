"""`lockstep up --dry-run`: what would run where, in the very words that would be run."""

import contextlib
import io
import json
import shlex
from pathlib import Path

import pytest

from services.commands import main
from services.supervisor.children import child, process_group
from services.supervisor.console.console import Console
from shared import limits
from shared.configuration import host_selection
from tests.unit.commands.deployment import inventories
from tests.unit.commands.parsed_commands import parse


def _dry_run(*arguments: str) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main.main(["up", "--dry-run", *arguments])
    return code, said.getvalue()


def _blocks(said: str) -> dict[str, list[str]]:
    """Return the lines of each host by its name."""
    found = [block.splitlines() for block in said.split("\n\n")[1:]]
    return {lines[0].split(" (")[0]: [line.strip() for line in lines] for lines in found}


def _words(lines: list[str], name: str) -> list[list[str]]:
    """Return what stands behind `name`, as a shell would split it."""
    return [shlex.split(line[len(name) :]) for line in lines if line.startswith(f"{name} ")]


def test_all_hosts_are_shown_from_anywhere(tmp_path: Path) -> None:
    """Roles, ranks and addresses of every host, also on a machine that is none of them."""
    file = str(inventories.written(tmp_path))

    code, said = _dry_run("--inventory", file)

    assert code == limits.EXIT_OK
    assert said.startswith("Nothing is started.")
    assert "(this host" not in said
    first, second = _blocks(said)["studio-1"], _blocks(said)["studio-2"]
    assert first[0] == (
        "studio-1 (192.168.7.1; collectives on 10.0.0.1; ssh ann@studio-1.local; ranks: 0)"
    )
    assert ["tcp://192.168.7.1:7610", "(gateways)"] in _words(first, "listens")
    assert ["tcp://192.168.7.1:7611"] in _words(second, "dials")
    assert ["the", "default", "folder", "there", "(keys)"] in _words(second, "reads")
    for lines, roles in ((first, "scheduler store gateway"), (second, "store")):
        shown = {line.split()[0] for line in lines[1:]}
        assert shown & {"scheduler", "store", "gateway"} == set(roles.split())
    assert _words(second, "rank 1")
    assert not _words(second, "rank 0")


def test_what_is_shown_is_what_starts_and_is_accepted(tmp_path: Path) -> None:
    """Each role's command is the supervisor's own, and the console script accepts it."""
    text = inventories.TWO_HOSTS.replace('"/opt/lockstep/run"', json.dumps(str(tmp_path)))
    file = str(inventories.written(tmp_path, text))

    code, said = _dry_run("--inventory", file, "--host", "studio-1")

    assert code == limits.EXIT_OK, said
    lines = _blocks(said)["studio-1"]
    assert "(this host;" in lines[0]
    share = host_selection.select_share(file, None, {"gateway.host": "studio-1"}, {})
    started = process_group.create_group(share, tmp_path, Console(io.StringIO()))
    assert len(started.all) == 4
    for one in started.all:
        python = "/opt/lockstep/.venv/bin/python"
        due = child.command(python, one.role, str(tmp_path / "config.toml"))
        assert _words(lines, one.role.name) == [due]
        parse(due[4:])
    command = _words(lines, "command")[0]
    assert command[0] == "/opt/lockstep/.venv/bin/lockstep"
    assert parse(command[1:]).options["host"] == "studio-1"


def test_files_that_would_be_written_are_named(tmp_path: Path) -> None:
    """The device table appears where the scheduler is, and is not written."""
    text = inventories.TWO_HOSTS.replace("ranks = [0]", "ranks = [0]\nrdma.studio-2 = 'rdma_en5'")
    text = text.replace("ranks = [1]", "ranks = [1]\nrdma.studio-1 = 'rdma_en4'")
    text = text.replace('"/opt/lockstep/run"', json.dumps(str(tmp_path / "run")))
    file = str(inventories.written(tmp_path, text + "\n[world]\nbackend = 'jaccl'\n"))

    code, said = _dry_run("--inventory", file)

    assert code == limits.EXIT_OK, said
    assert f"writes       {tmp_path}/run/rdma_devices.json" in "\n".join(_blocks(said)["studio-1"])
    assert "rdma_devices" not in "\n".join(_blocks(said)["studio-2"])
    assert not (tmp_path / "run").exists()


def test_one_machine_is_shown_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an inventory: this machine's roles with the flags that were given."""
    monkeypatch.setenv("LOCKSTEP_PATHS_RUN_DIR", str(tmp_path / "run"))

    code, said = _dry_run("--ranks", "2", "--port", "9")

    assert code == limits.EXIT_OK
    assert "rank 1 " in said
    assert "http://127.0.0.1:9 (clients)" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "studio-9"], "has no host studio-9"),
        (["--ranks", "2"], "sets world.size cannot be used with --inventory"),
        (["--config", "x.toml"], "--config cannot be used with --inventory"),
    ],
)
def test_what_contradicts_the_inventory_is_refused(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    """The same sentences as without --dry-run."""
    file = str(inventories.written(tmp_path))

    code, said = _dry_run("--inventory", file, *arguments)

    assert code == limits.EXIT_USAGE
    assert says in said
