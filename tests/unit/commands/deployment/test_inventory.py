"""Inventory files: hosts, roles and ranks that fit together, and errors for those that do not."""

from pathlib import Path
from typing import Any

import pytest

from shared.configuration import inventory
from shared.errors import ConfigError, UsageError
from tests.unit.commands.deployment import inventories


def test_inventory_of_two_hosts_gives_their_roles_ranks_and_scheduler_host(tmp_path: Path) -> None:
    """Hosts, ranks and the scheduler's host are those of the file."""
    found = inventory.read(str(inventories.write_inventory(tmp_path)))

    assert [host.name for host in found.hosts] == ["studio-1", "studio-2"]
    assert found.ranks == {"studio-1": (0,), "studio-2": (1,)}
    assert found.scheduler.name == "studio-1"
    assert [host.name for host in found.by_rank()] == ["studio-1", "studio-2"]
    assert found.settings == {"model": {"path": "demo"}}


def test_ranks_are_numbered_in_host_order_when_inventory_gives_only_counts() -> None:
    """A host may have a number of ranks in place of a list."""
    found = inventories.parse_inventory(host0={"ranks": 2}, host1={"ranks": 3})

    assert found.ranks == {"studio-1": (0, 1), "studio-2": (2, 3, 4)}
    assert found.world_size == 5


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"host1": {"name": "studio-1"}}, "have the same name, studio-1"),
        ({"host1": {"name": "Studio-1"}}, "have the same name, studio-1"),
        ({"host1": {"address": "192.168.7.1"}}, "have the same address, 192.168.7.1"),
        ({"host1": {"data_address": "10.0.0.1"}}, "have the same data_address"),
        ({"host1": {"address": "studio-2.local"}}, "not an IP address"),
        ({"host1": {"address": "0.0.0.0"}}, "which is not the address of a host"),
        ({"host1": {"address": "127.0.0.1"}}, "which other hosts cannot reach"),
        ({"host1": {"address": ""}}, "studio-2 has no address"),
        ({"host1": {"data_address": "fd00::2"}}, "MLX needs an IPv4 address"),
        ({"host0": {"roles": ["gateway", "cache_store"]}}, "No host has the role scheduler"),
        ({"host1": {"roles": ["scheduler"]}}, "Two hosts have the role scheduler (studio-1, stud"),
        ({"host0": {"roles": ["scheduler"]}}, "No host has the role gateway"),
        ({"host1": {"roles": ["cache_store", "cache_store"]}}, "studio-2 has a role twice"),
        ({"host1": {"roles": ["store"]}}, "hosts.studio-2.roles[0]: invalid enum value 'store'"),
        ({"host1": {"roles": [], "ranks": []}}, "studio-2 has neither roles nor ranks"),
        ({"host1": {"ranks": [0]}}, "Rank 0 belongs to two hosts, studio-1 and studio-2"),
        ({"host1": {"ranks": [2]}}, "2 ranks have the numbers 0 to 1, but 1 is missing"),
        ({"host1": {"ranks": 1}}, "studio-2 has a number of ranks and the host studio-1 a list"),
        ({"host0": {"ranks": 0}, "host1": {"ranks": 0}}, "have 0 ranks together"),
        ({"host1": {"ranks": "1"}}, "hosts.studio-2.ranks: expected `int | array`, got `str`"),
        ({"world": {"size": 3}}, "world.size is 3, but the hosts have 2 ranks"),
        ({"host1": {"adress": "10.0.0.9"}}, "Unknown key hosts.studio-2.adress"),
        ({"host1": {"run_dir": "run"}}, "hosts.studio-2.run_dir: expected `str` matching"),
        ({"host1": {"user": "b b"}}, "hosts.studio-2.user: expected `str` matching"),
        (
            {"host1": {"rdma": {"studio-3": "rdma_en5"}}},
            "names studio-3, which is not another host",
        ),
        ({"host1": {"rdma": {"studio-1": "rdma_en5"}}}, "a cable has two ends"),
        ({"cluster": {"port": 1}}, "Unknown key cluster.port"),
        ({"cluster": {"bus_port": 65535}}, "cluster.bus_port: expected `int` <= 65534"),
        ({"hosts": []}, "There are no hosts"),
        ({"hosts": "studio-1"}, "hosts: expected `array`, got `str`"),
        ({"hosts": [{"ranks": 1}]}, "hosts.0: object missing required field `name`"),
    ],
)
def test_inconsistent_inventory_is_refused_with_one_line_that_names_host(
    changes: dict[str, Any], expected: str
) -> None:
    """The error names the file, the host and the fault."""
    with pytest.raises(ConfigError) as caught:
        inventories.parse_inventory(**changes)

    assert str(caught.value).startswith("cluster.toml: ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_or_malformed_inventory_file_raises_config_error_that_says_why(
    tmp_path: Path,
) -> None:
    """The error says that the inventory cannot be read or that it is not valid TOML."""
    with pytest.raises(ConfigError, match="Cannot read the inventory"):
        inventory.read(str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match="is not valid TOML"):
        inventory.read(str(inventories.write_inventory(tmp_path, "hosts = [")))


@pytest.mark.parametrize("name", ["studio-2", "Studio-2", "studio-2.local", "studio-2.example.org"])
def test_this_machine_is_found_in_inventory_by_host_name_ignoring_case(name: str) -> None:
    """The machine's host name is found without regard to its domain and the case of letters."""
    assert inventories.parse_inventory().this_host(name).name == "studio-2"


def test_error_lists_host_names_when_machine_matches_no_single_inventory_host() -> None:
    """A machine that matches no host, or two, must name one with --host."""
    with pytest.raises(UsageError, match=r"name one with --host \(studio-1, studio-2\)"):
        inventories.parse_inventory().this_host("laptop")
    twice = inventories.parse_inventory(host0={"name": "a.one"}, host1={"name": "a.two"})
    with pytest.raises(UsageError, match=r"which matches several hosts of"):
        twice.this_host("a")
    with pytest.raises(UsageError, match="has no host studio-9: it has studio-1, studio-2"):
        inventories.parse_inventory().host("studio-9")
