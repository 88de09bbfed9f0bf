"""Command `lockstep hostfile`: MLX's hostfile from an inventory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.commands.deployment import hostfile as command
from shared.configuration import hostfile
from shared.configuration.loading import load_config, read_world_files
from shared.errors import ConfigError
from tests.unit.commands.command_lines import run
from tests.unit.commands.deployment import inventories

CABLES: dict[str, Any] = {
    "host0": {"rdma": {"studio-2": "rdma_en5"}},
    "host1": {"rdma": {"studio-1": ["rdma_en4"]}},
    "world": {"backend": "jaccl"},
}
MLX_READS = """
import sys
from mlx._distributed_utils.common import Hostfile
import json
found = Hostfile.from_file(sys.argv[1])
print(json.dumps(found.to_json()))
"""


def test_hostfile_for_ring_has_data_addresses_of_ranks_in_rank_order() -> None:
    """The ring uses the addresses for collectives, and ssh the host's own destination."""
    hosts = inventories.parse_inventory(host0={"ranks": [1]}, host1={"ranks": [0]})

    parsed = hostfile.parse(command.render(hosts))

    assert parsed.addresses == (("10.0.0.2:32323",), ("10.0.0.1:32324",))
    assert parsed.machines == ("192.168.7.2", "ann@studio-1.local")
    assert (parsed.backend, parsed.devices) == ("ring", ())


def test_hostfile_for_jaccl_has_devices_and_coordinator_of_inventory() -> None:
    """The inventory's backend is the default; rank 0's address is the coordinator's."""
    parsed = hostfile.parse(command.render(inventories.parse_inventory(**CABLES)))

    assert parsed.devices == (((), ("rdma_en5",)), (("rdma_en4",), ()))
    assert (parsed.backend, parsed.coordinator()) == ("jaccl", "192.168.7.1:32323")


def test_hostfile_with_starting_port_is_ring_form_with_ports() -> None:
    """With a port the file is the ring's own form, which MLX_HOSTFILE names."""
    text = command.render(inventories.parse_inventory(), "ring", 5_000)

    assert json.loads(text) == [["10.0.0.1:5000"], ["10.0.0.2:5001"]]


def test_hostfile_of_one_host_has_one_entry_per_rank() -> None:
    """Ranks of one host without addresses meet at 127.0.0.1, each at its own port."""
    alone = {"name": "a", "roles": ["gateway", "scheduler", "cache_store"], "ranks": 2}

    parsed = hostfile.parse(command.render(inventories.parse_inventory(hosts=[alone])))

    assert parsed.addresses == (("127.0.0.1:32323",), ("127.0.0.1:32324",))


@pytest.mark.parametrize(
    ("changes", "backend", "expected_words"),
    [
        ({"host1": {"data_address": ""}}, "ring", "The host studio-2 has no data_address"),
        ({}, "jaccl", "No host has an rdma table"),
        ({**CABLES, "host0": {**CABLES["host0"], "ranks": [0, 2]}}, "jaccl", "has 2 ranks"),
        ({"world": {"backend": "off"}}, None, "world.backend is off.*give --backend"),
    ],
)
def test_inventory_without_what_backend_needs_gives_no_hostfile(
    changes: dict[str, Any], backend: Any, expected_words: str
) -> None:
    """The error names the host and the missing part."""
    with pytest.raises(ConfigError, match=expected_words):
        command.render(inventories.parse_inventory(**changes), backend)


def test_hostfile_command_writes_file_that_lockstep_and_mlx_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """MLX's launcher and `world.hostfile` take the file without changes."""
    file, output = inventories.write_inventory(tmp_path), tmp_path / "hosts.json"

    code, out, err = run(capsys, "hostfile", "--inventory", str(file), "--output", str(output))
    config = load_config(flags={"world.hostfile": str(output)})
    done = subprocess.run(
        [sys.executable, "-c", MLX_READS, str(output)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert (code, out, err) == (0, "", "")
    assert (config.world.size, config.backend) == (2, "ring")
    assert read_world_files(config).ignored_settings == []
    assert json.loads(done.stdout) == json.loads(output.read_text())


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--backend", "jaccl", "--starting-port", "5000"], 64, "--starting-port is for ring"),
        (["--output", "/nowhere/at/all/hosts.json"], 78, "Cannot write /nowhere"),
        (["--starting-port", "65530"], 64, "65530"),
    ],
)
def test_hostfile_command_with_wrong_option_exits_with_one_line(
    words: list[str], code: int, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong option gives its exit code and one line."""
    file = inventories.write_inventory(tmp_path)

    found, out, err = run(capsys, "hostfile", "--inventory", str(file), *words)

    assert (found, out) == (code, "")
    assert expected in err
    assert err.count("\n") == 1
