"""Roles and settings of one host of an inventory, and settings that contradict it."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.configuration import host_selection, host_share
from shared.configuration.host_share import HostRoles, HostShare
from shared.errors import ConfigError, UsageError
from tests.unit.commands.deployment import inventories

RDMA: dict[str, Any] = {
    "world": {"backend": "jaccl"},
    "host0": {"rdma": {"studio-2": "rdma_en5"}},
    "host1": {"rdma": {"studio-1": ["rdma_en4"]}},
}


def _share(host: str = "studio-1", **changes: Any) -> HostShare:
    found = inventories.parse_inventory(**changes)
    return host_share.share_of_host(found, found.host(host))


def test_inventory_hosts_have_equal_settings_except_paths_and_data_address() -> None:
    """All other settings follow from the inventory and are equal."""
    first, second = _share("studio-1").config, _share("studio-2").config

    assert first.world.size == second.world.size == 2
    assert first.backend == second.backend == "ring"
    assert first.gateway_address == second.gateway_address == "tcp://192.168.7.1:7610"
    assert first.rank_address == second.rank_address == "tcp://192.168.7.1:7611"
    assert (first.world.data_host, second.world.data_host) == ("10.0.0.1", "10.0.0.2")
    assert (first.paths.keys_dir, second.paths.keys_dir) == ("/opt/lockstep/keys", "")
    assert first.store_address == second.store_address == "ipc:///opt/lockstep/run/store.sock"


def test_each_inventory_host_runs_only_its_own_roles_and_ranks() -> None:
    """A host runs only the roles and ranks of its table."""
    assert _share("studio-1").roles == HostRoles(True, True, True, (0,))
    assert _share("studio-2").roles == HostRoles(False, False, True, (1,))


def test_paths_in_host_table_override_inventory_sections_for_that_host() -> None:
    """`model_path`, `cache_dir` and `run_dir` apply to their host only."""
    changes: dict[str, Any] = {
        "host1": {"model_path": "/models/m", "cache_dir": "/ssd", "run_dir": ""}
    }
    sections: dict[str, Any] = {"paths": {"run_dir": "/run/all"}}

    assert _share("studio-1", **changes, **sections).config.model.path == "demo"
    own = _share("studio-2", **changes, **sections).config
    assert (own.model.path, own.cache.directory, own.paths.run_dir) == (
        "/models/m",
        "/ssd",
        "/run/all",
    )


def test_single_inventory_host_uses_unix_sockets_in_run_folder() -> None:
    """An inventory of one host needs no addresses."""
    only = inventories.inventory_tree()["hosts"][0] | {
        "address": "",
        "data_address": "",
        "ranks": 2,
    }
    share = _share(hosts=[only])

    assert share.config.gateway_address == "ipc:///opt/lockstep/run/gateways.sock"
    assert share.config.world.data_host == "127.0.0.1"
    assert share.roles.ranks == (0, 1)


def test_inventory_keeps_configured_tcp_addresses_and_refuses_unix_sockets() -> None:
    """An operator may choose port or address, but not a Unix socket."""
    chosen: dict[str, Any] = {
        "scheduler": {"rank_address": "tcp://192.168.7.9:1"},
        "cluster": {"bus_port": 9000},
    }
    config = _share(**chosen).config

    assert config.rank_address == "tcp://192.168.7.9:1"
    assert config.gateway_address == "tcp://192.168.7.1:9000"
    with pytest.raises(ConfigError, match="which other hosts cannot reach"):
        _share(scheduler={"rank_address": "ipc:///run/ranks.sock"})


def test_rdma_tables_of_inventory_become_device_matrix_on_scheduler_host() -> None:
    """Rows are ranks, columns peers, null for itself; only the scheduler's host gets the file."""
    share = _share(**RDMA)
    path = "/opt/lockstep/run/rdma_devices.json"

    assert json.loads(share.files[path]) == [[None, "rdma_en5"], ["rdma_en4", None]]
    assert share.config.world.jaccl_devices == path
    assert share.config.world.jaccl_coordinator == "192.168.7.1:7620"
    assert _share("studio-2", **RDMA).files == {}
    assert _share("studio-2", **RDMA).config.world == _share_world("10.0.0.2")


def _share_world(data_host: str) -> Any:
    import msgspec

    return msgspec.structs.replace(_share(**RDMA).config.world, data_host=data_host)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"host1": {"data_address": ""}}, "studio-2 has no data_address"),
        (RDMA | {"world": {"backend": "ring"}}, "rdma tables, but world.backend is ring"),
        (RDMA | {"host1": {**RDMA["host1"], "ranks": [1, 2]}}, "with RDMA each host has one"),
        (
            RDMA | {"world": {"backend": "jaccl", "hostfile": "/h.json"}},
            "keep one of them",
        ),
        (
            RDMA | {"host0": {**RDMA["host0"], "run_dir": ""}},
            "set run_dir of the host studio-1 to an absolute path",
        ),
        (
            RDMA
            | {"world": {"backend": "jaccl", "jaccl_fallback": "ring"}}
            | {"host1": {**RDMA["host1"], "data_address": ""}},
            (
                "studio-2 has no data_address, where the ranks of other hosts reach its ranks "
                "(world.ja"
            ),
        ),
        ({"world": {"backend": "jaccl"}}, "world.backend is jaccl"),
        ({"host1": {"roles": []}}, "studio-2 has ranks but not the role cache_store"),
        ({"cache": {"ssd": False}}, "has the role cache_store, but no blocks are stored on SSD"),
        (
            {"host0": {"ranks": [0, 1]}, "host1": {"ranks": []}},
            "studio-2 has the role cache_store but no ranks",
        ),
        ({"gateway": {"host": "0.0.0.0"}}, "so clients need API keys"),
        ({"world": {"sise": 2}}, "Unknown setting world.sise"),
        ({"world": 3}, "The setting world must be a section"),
        ({"wrld": {}}, "Unknown setting wrld"),
    ],
)
def test_inventory_settings_that_contradict_its_hosts_are_refused(
    changes: dict[str, Any], expected: str
) -> None:
    """The one line names the file, the host or setting, and the remedy."""
    with pytest.raises(ConfigError) as caught:
        _share(**changes)

    assert expected in str(caught.value)
    assert "cluster.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_inventory_host_without_gateway_needs_no_api_keys_file() -> None:
    """Only the gateway's own host needs the file of API keys."""
    changes = {"gateway": {"host": "192.168.7.1"}}

    assert _share("studio-2", **changes).config.gateway.host == "192.168.7.1"
    found = inventories.parse_inventory(**changes)
    assert host_share.share_of_host(found, found.hosts[0], has_api_keys=True).roles.gateway


def test_device_matrix_file_is_readable_by_its_user_only(tmp_path: Path) -> None:
    """The file lies at the path in the settings and has mode 0600."""
    run_dir = str(tmp_path / "run")
    share = _share(**(RDMA | {"host0": {**RDMA["host0"], "run_dir": run_dir}}))

    share.write_files()

    path = Path(share.config.world.jaccl_devices)
    assert path.parent == tmp_path / "run"
    assert json.loads(path.read_text())[0] == [None, "rdma_en5"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_settings_from_file_flag_or_variable_are_refused_beside_inventory(tmp_path: Path) -> None:
    """A configuration file, flag or variable beside --inventory is refused by name."""
    file = str(inventories.write_inventory(tmp_path))

    with pytest.raises(UsageError, match="--config cannot be used with --inventory"):
        host_selection.select_share(file, "lockstep.toml", {}, {})
    with pytest.raises(UsageError, match=r"sets world.size cannot be used with --inventory"):
        host_selection.select_share(file, None, {"world.size": "2", "gateway.host": None}, {})
    with pytest.raises(ConfigError, match="LOCKSTEP_WORLD_SIZE cannot be used with --inventory"):
        host_selection.select_share(file, None, {}, {"LOCKSTEP_WORLD_SIZE": "2"})
    chosen = host_selection.select_share(file, None, {"gateway.host": "studio-2"}, {"HOME": "/x"})
    assert chosen.name == "studio-2"
    assert chosen.config.gateway.host == "127.0.0.1"


def test_rank_worker_is_refused_on_host_of_another_rank(tmp_path: Path) -> None:
    """`rank-worker --rank 0` is refused on the host of rank 1."""
    share = _share("studio-2")

    expected = "Rank 0 does not belong to the host studio-2, whose ranks are 1"
    with pytest.raises(UsageError, match=expected):
        host_selection.check_rank_is_here(share, 0)
    host_selection.check_rank_is_here(share, 1)
    host_selection.check_rank_is_here(share, -1)
    host_selection.check_rank_is_here(host_selection.select_share(None, None, {}, {}), 5)
