"""Command `lockstep up --dry-run`: the commands that would run on each host."""

import io
import json
import shlex
from pathlib import Path

import pytest

from services.supervisor.children import child, process_group
from services.supervisor.console.console import Console
from shared import limits
from shared.configuration import host_selection
from tests.unit.commands.command_lines import parse, run_merged
from tests.unit.commands.deployment import inventories


def _dry_run(*arguments: str) -> tuple[int, str]:
    return run_merged("up", "--dry-run", *arguments)


def _host_lines(output: str) -> dict[str, list[str]]:
    """Return the lines of each host by its name."""
    found = [block.splitlines() for block in output.split("\n\n")[1:]]
    return {lines[0].split(" (")[0]: [line.strip() for line in lines] for lines in found}


def _values_after(lines: list[str], name: str) -> list[list[str]]:
    """Return the text behind `name` on every line, split as a shell would."""
    return [shlex.split(line[len(name) :]) for line in lines if line.startswith(f"{name} ")]


def test_dry_run_shows_roles_of_every_host_on_any_machine(tmp_path: Path) -> None:
    """Roles, ranks and addresses of every host are shown, also on other machines."""
    file = str(inventories.write_inventory(tmp_path))

    code, output = _dry_run("--inventory", file)

    assert code == limits.EXIT_OK
    assert output.startswith("Nothing is started.")
    assert "(this host" not in output
    first, second = _host_lines(output)["studio-1"], _host_lines(output)["studio-2"]
    assert first[0] == (
        "studio-1 (192.168.7.1; collectives on 10.0.0.1; ssh ann@studio-1.local; ranks: 0)"
    )
    assert ["tcp://192.168.7.1:7610", "(gateways)"] in _values_after(first, "listens")
    assert ["tcp://192.168.7.1:7611"] in _values_after(second, "dials")
    assert ["the", "default", "folder", "there", "(keys)"] in _values_after(second, "reads")
    for lines, roles in ((first, "scheduler store gateway"), (second, "store")):
        shown = {line.split()[0] for line in lines[1:]}
        assert shown & {"scheduler", "store", "gateway"} == set(roles.split())
    assert _values_after(second, "rank 1")
    assert not _values_after(second, "rank 0")


def test_dry_run_shows_the_commands_that_supervisor_would_start(tmp_path: Path) -> None:
    """Each role's command is the supervisor's own, and the console script accepts it."""
    text = inventories.TWO_HOSTS.replace('"/opt/lockstep/run"', json.dumps(str(tmp_path)))
    file = str(inventories.write_inventory(tmp_path, text))

    code, output = _dry_run("--inventory", file, "--host", "studio-1")

    assert code == limits.EXIT_OK, output
    lines = _host_lines(output)["studio-1"]
    assert "(this host;" in lines[0]
    share = host_selection.select_share(file, None, {"gateway.host": "studio-1"}, {})
    started = process_group.create_group(share, tmp_path, Console(io.StringIO()))
    assert len(started.all) == 4
    for one in started.all:
        python = "/opt/lockstep/.venv/bin/python"
        expected_words = child.command(python, one.role, str(tmp_path / "config.toml"))
        assert _values_after(lines, one.role.name) == [expected_words]
        parse(expected_words[4:])
    command = _values_after(lines, "command")[0]
    assert command[0] == "/opt/lockstep/.venv/bin/lockstep"
    assert parse(command[1:]).options["host"] == "studio-1"


def test_dry_run_names_files_without_writing_them(tmp_path: Path) -> None:
    """The device matrix is named for the scheduler's host, and no file is written."""
    text = inventories.TWO_HOSTS.replace("ranks = [0]", "ranks = [0]\nrdma.studio-2 = 'rdma_en5'")
    text = text.replace("ranks = [1]", "ranks = [1]\nrdma.studio-1 = 'rdma_en4'")
    text = text.replace('"/opt/lockstep/run"', json.dumps(str(tmp_path / "run")))
    file = str(inventories.write_inventory(tmp_path, text + "\n[world]\nbackend = 'jaccl'\n"))

    code, output = _dry_run("--inventory", file)

    assert code == limits.EXIT_OK, output
    assert f"writes       {tmp_path}/run/rdma_devices.json" in "\n".join(
        _host_lines(output)["studio-1"]
    )
    assert "rdma_devices" not in "\n".join(_host_lines(output)["studio-2"])
    assert not (tmp_path / "run").exists()


def test_dry_run_without_inventory_shows_roles_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine's roles are shown with the flags that were given."""
    monkeypatch.setenv("LOCKSTEP_PATHS_RUN_DIR", str(tmp_path / "run"))

    code, output = _dry_run("--ranks", "2", "--port", "9")

    assert code == limits.EXIT_OK
    assert "rank 1 " in output
    assert "http://127.0.0.1:9 (clients)" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--host", "studio-9"], "has no host studio-9"),
        (["--ranks", "2"], "sets world.size cannot be used with --inventory"),
        (["--config", "x.toml"], "--config cannot be used with --inventory"),
    ],
)
def test_dry_run_refuses_flags_that_contradict_inventory(
    tmp_path: Path, arguments: list[str], expected: str
) -> None:
    """Flags beside an inventory are refused with the errors that a real start gives."""
    file = str(inventories.write_inventory(tmp_path))

    code, output = _dry_run("--inventory", file, *arguments)

    assert code == limits.EXIT_USAGE
    assert expected in output
