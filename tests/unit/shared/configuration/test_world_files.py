"""Settings that follow from `world.hostfile`, and the check of a world's files before ranks
start."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.configuration.loading import (
    change_config,
    load_config,
    read_world_files,
    with_absolute_paths,
)
from shared.errors import ConfigError

PAIR = [
    {"ssh": "mac1", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en5"]},
    {"ssh": "mac2", "ips": ["10.0.0.2"], "rdma": ["rdma_en4", None]},
]
MATRIX = [[None, "rdma_en5"], ["rdma_en4", None]]
RING_4 = [[None, "a", None, "b"], ["b", None, "a", None], [None, "b", None, "a"],
          ["a", None, "b", None]]  # fmt: skip


def _file(folder: Path, tree: Any, name: str = "hosts.json") -> str:
    path = folder / name
    path.write_text(json.dumps(tree))
    return str(path)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ([["10.0.0.1:1"], ["10.0.0.2:1"], ["10.0.0.3:1"]], (3, "ring")),
        (PAIR, (2, "ring")),
        ({"backend": "jaccl", "hosts": PAIR}, (2, "jaccl")),
        ({"backend": "jaccl-ring", "hosts": PAIR}, (2, "jaccl")),
        ({"backend": "", "hosts": PAIR}, (2, "ring")),
        ([["10.0.0.1:1"]], (1, "off")),
    ],
)
def test_hostfile_sets_number_of_ranks_and_backend(
    tmp_path: Path, tree: Any, expected: tuple[int, str]
) -> None:
    """A hostfile alone is enough, also beside a configuration file that contains the defaults."""
    hostfile = _file(tmp_path, tree)
    defaults = tmp_path / "lockstep.toml"
    defaults.write_text('[world]\nsize = 1\nbackend = "auto"\n')

    for file in (None, str(defaults)):
        loaded = load_config(file, {"world.hostfile": hostfile})
        assert (loaded.world.size, loaded.backend) == expected


def test_flags_override_number_of_ranks_and_backend_of_hostfile(tmp_path: Path) -> None:
    """Size and backend of flags win; a size that does not fit the hostfile is an error."""
    hostfile = _file(tmp_path, {"backend": "jaccl", "hosts": PAIR})

    ring = load_config(flags={"world.hostfile": hostfile, "world.backend": "ring"})
    three = load_config(flags={"world.hostfile": hostfile, "world.size": "3"})

    assert (ring.world.size, ring.backend) == (2, "ring")
    assert three.world.size == 3
    with pytest.raises(ConfigError, match=r"2 ranks, but world\.size is 3"):
        read_world_files(three)


@pytest.mark.parametrize("backend", ["auto", "ring", "jaccl"])
@pytest.mark.parametrize("is_flag", [True, False], ids=["flag", "variable"])
def test_hostfile_for_two_ranks_is_refused_when_flag_sets_one_rank(
    tmp_path: Path, backend: str, is_flag: bool
) -> None:
    """A hostfile for two ranks is refused if a flag or variable sets one rank; one for one rank
    passes."""
    pair = _file(tmp_path, {"backend": "jaccl", "hosts": PAIR})
    alone = _file(tmp_path, [["10.0.0.1:1"]], "alone.json")
    configuration = tmp_path / "lockstep.toml"

    for hostfile in (pair, alone):
        configuration.write_text(f'[world]\nhostfile = "{hostfile}"\nbackend = "{backend}"\n')
        flags: dict[str, Any] = {"world.size": 1} if is_flag else {}
        environment = {} if is_flag else {"LOCKSTEP_WORLD_SIZE": "1"}
        if hostfile == alone:
            loaded = load_config(str(configuration), flags, environment)
            assert (loaded.world.size, loaded.backend) == (1, "off")
            continue
        with pytest.raises(ConfigError, match=r"hosts\.json is for 2 ranks, but world\.size is 1"):
            load_config(str(configuration), flags, environment)
        flags["world.backend"] = "off"
        assert load_config(str(configuration), flags, environment).world.size == 1


def test_environment_variables_override_number_of_ranks_and_backend_of_hostfile(
    tmp_path: Path,
) -> None:
    """Size and backend of variables win over the hostfile, and flags win over variables."""
    hostfile = _file(tmp_path, {"backend": "jaccl", "hosts": PAIR})
    environment = {"LOCKSTEP_WORLD_HOSTFILE": hostfile, "LOCKSTEP_WORLD_BACKEND": "ring"}

    assert load_config(environment=environment).backend == "ring"
    assert load_config(flags={"world.backend": "jaccl"}, environment=environment).backend == "jaccl"
    assert load_config(flags={"world.backend": "auto"}, environment=environment).backend == "jaccl"
    three = load_config(environment={**environment, "LOCKSTEP_WORLD_SIZE": "3"})
    with pytest.raises(ConfigError, match=r"2 ranks, but world\.size is 3"):
        read_world_files(three)
    two = load_config(
        flags={"world.size": 2}, environment={**environment, "LOCKSTEP_WORLD_SIZE": "1"}
    )
    assert two.world.size == 2
    without_file = load_config(flags={"world.hostfile": ""}, environment=environment)
    assert (without_file.world.size, without_file.backend) == (1, "off")


def test_missing_hostfile_is_no_error_when_backend_is_off(tmp_path: Path) -> None:
    """With the backend `off` the hostfile need not exist."""
    loaded = load_config(flags={"world.hostfile": "nowhere.json", "world.backend": "off"})

    assert (loaded.world.size, loaded.backend) == (1, "off")
    assert read_world_files(loaded).hostfile == ""


def test_hostfile_is_not_read_when_number_of_ranks_and_backend_are_set() -> None:
    """A rank on another host has the same settings but not the file."""
    flags = {"world.hostfile": "nowhere.json", "world.size": "2", "world.backend": "ring"}

    assert load_config(flags=flags).world.size == 2


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_unreadable_hostfile_error_names_setting_path_and_cause(
    tmp_path: Path, content: bytes | None
) -> None:
    """The error names the setting, the path and the cause."""
    path = tmp_path / "hosts.json"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"Cannot read world\.hostfile .*hosts\.json: "):
        load_config(flags={"world.hostfile": str(path)})


def test_change_of_hostfile_also_changes_number_of_ranks_and_backend(tmp_path: Path) -> None:
    """Settings of a running Lockstep contain both; a new hostfile replaces them, flags win."""
    running = load_config(flags={"world.size": 4, "world.backend": "ring"})
    hostfile = _file(tmp_path, {"backend": "jaccl", "hosts": PAIR})

    changed = change_config(running, {"world.hostfile": hostfile})

    assert (changed.world.size, changed.backend) == (2, "jaccl")
    flags = {"world.hostfile": hostfile, "world.backend": "ring"}
    assert change_config(running, flags).backend == "ring"
    assert change_config(running, {"world.size": "2"}).world.size == 2
    with pytest.raises(ConfigError, match="pipeline"):
        change_config(running, {"world.sharding": "pipeline"})


def test_relative_paths_of_settings_become_absolute_in_their_folder(tmp_path: Path) -> None:
    """Files and folders are meant in the working folder; ids of models and ~ stay as they are."""
    (tmp_path / "qwen").mkdir()
    flags = {
        "model.path": "qwen",
        "speculation.draft_model": "org/draft",
        "world.hostfile": "hosts.json",
        "world.backend": "off",
        "cache.directory": "~/blocks",
        "paths.keys_dir": "/keys",
    }

    config = with_absolute_paths(load_config(flags=flags), tmp_path)

    assert config.model.path == str(tmp_path / "qwen")
    assert config.speculation.draft_model == "org/draft"
    assert config.world.hostfile == str(tmp_path / "hosts.json")
    assert (config.cache.directory, config.paths.keys_dir) == ("~/blocks", "/keys")
    assert config.gateway.api_keys_file == ""


def _config_with_files(tmp_path: Path, files: dict[str, Any], **world: Any) -> Any:
    settings = {f"world.{key}": value for key, value in world.items()}
    for key, tree in files.items():
        settings[f"world.{key}"] = _file(tmp_path, tree, key)
    return load_config(flags=settings)


@pytest.mark.parametrize(
    ("files", "world", "expected_words"),
    [
        ({"hostfile": [PAIR[0], {**PAIR[1], "ips": []}]}, {}, "rank 1 on mac2: ring needs it"),
        ({"hostfile": [{"ssh": "a"}, {"ssh": "b"}]}, {"backend": "nccl"}, "rank 0 on a: nccl"),
        ({"hostfile": [{"ssh": "a", "ips": ["x"]}, {"ssh": "b"}]}, {"backend": "jaccl"},
         'no devices \\("rdma"\\)'),
        ({"hostfile": [{**host, "ips": []} for host in PAIR]}, {"backend": "jaccl"},
         "no address .*--distributed-jaccl-coordinator"),
        ({"hostfile": [PAIR[0], {**PAIR[1], "rdma": [None, None]}]}, {"backend": "jaccl"},
         "no device from rank 1 to rank 0"),
        ({"jaccl_devices": RING_4}, {"backend": "jaccl", "size": 2, "jaccl_coordinator": "a:1"},
         "2 rows of 2 devices.*but has 4 rows"),
        ({"hostfile": [["127.0.0.1:1"], ["10.0.0.2:1"]]}, {}, "address of rank 0 on 127.0.0.1 is"),
        ({"hostfile": [{**host, "ips": ["localhost"]} for host in PAIR]}, {},
         "rank 0 on mac1 is localhost, which the others cannot reach"),
        ({"hostfile": [{**host, "ips": ["127.0.0.1"]} for host in PAIR]}, {"backend": "nccl"},
         "rank 0 on mac1 is 127.0.0.1"),
        ({"hostfile": [{**host, "ips": ["127.0.0.1"]} for host in PAIR]}, {"backend": "jaccl"},
         "rank 0 on mac1 is 127.0.0.1"),
        ({"hostfile": PAIR}, {"backend": "jaccl", "jaccl_coordinator": "127.0.0.1:5"},
         "rank 0 on mac1 is 127.0.0.1"),
        ({"hostfile": [[], []]}, {}, "no address .* rank 0"),
    ],
)  # fmt: skip
def test_hostfile_or_device_matrix_that_backend_cannot_use_is_refused(
    tmp_path: Path, files: dict[str, Any], world: dict[str, Any], expected_words: str
) -> None:
    """Files and settings are checked against the needs of the backend."""
    config = _config_with_files(tmp_path, files, **world)

    with pytest.raises(ConfigError, match=expected_words) as refused:
        read_world_files(config)

    assert str(refused.value).endswith(".")


@pytest.mark.parametrize(
    ("files", "world"),
    [
        ({"hostfile": {"backend": "jaccl", "hosts": PAIR}}, {}),
        ({"hostfile": [PAIR[0], {**PAIR[1], "ips": []}]}, {"backend": "jaccl"}),
        ({"hostfile": [["a:1"], ["b:1"]], "jaccl_devices": MATRIX}, {"backend": "jaccl"}),
        ({"jaccl_devices": RING_4}, {"backend": "jaccl", "size": 4, "jaccl_coordinator": "a:1"}),
        ({"hostfile": PAIR}, {"backend": "nccl"}),
        ({"hostfile": [["127.0.0.1:1"], ["127.0.0.2:1"]]}, {}),
        ({"hostfile": [{"ssh": "mac1", "ips": ["localhost"]}] * 2}, {}),
        ({"hostfile": [PAIR[0], {**PAIR[1], "ips": ["127.0.0.1"]}]}, {"backend": "jaccl"}),
        ({}, {"size": 2}),
    ],
)
def test_complete_hostfile_and_device_matrix_are_returned_unchanged(
    tmp_path: Path, files: dict[str, Any], world: dict[str, Any]
) -> None:
    """Files and settings complete each other; the texts of the files are returned unchanged."""
    config = _config_with_files(tmp_path, files, **world)

    found = read_world_files(config)

    assert found.ignored_settings == []
    assert found.hostfile == (json.dumps(files["hostfile"]) if "hostfile" in files else "")
    assert bool(found.jaccl_devices) == ("jaccl_devices" in files)


def test_hostfile_variables_that_lockstep_sets_are_reported_as_ignored(tmp_path: Path) -> None:
    """A hostfile may set variables of MLX and NCCL, except those that Lockstep sets."""
    envs = ["NCCL_DEBUG=INFO", "MLX_METAL_FAST_SYNCH=1", "MLX_RANK=7", "PATH=/tmp"]
    config = _config_with_files(tmp_path, {"hostfile": {"envs": envs, "hosts": PAIR}})

    fast, rank, path = read_world_files(config).ignored_settings

    assert "MLX_METAL_FAST_SYNCH" in fast
    assert "world.metal_fast_synch decides" in fast
    assert "MLX_RANK, which Lockstep sets itself" in rank
    assert "PATH, which is ignored" in path
