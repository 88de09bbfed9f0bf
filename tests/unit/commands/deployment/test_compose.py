"""docker-compose.dev.yml and Dockerfile: commands and settings that the console script accepts."""

import fnmatch
import ipaddress
import re
from pathlib import PurePosixPath

import pytest

from services.commands.deployment.jobs import END_GRACE_S
from shared.configuration import host_selection
from shared.configuration.loading import API_KEYS_VARIABLE
from shared.configuration.settings import Config
from tests.unit.commands.command_lines import parse
from tests.unit.commands.deployment import compose_file
from tests.unit.commands.deployment.compose_file import ROOT, Service

KEYS = {API_KEYS_VARIABLE: "dev=" + "k" * 48}
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def services() -> dict[str, Service]:
    """Return all services, with the one variable that must be set."""
    return compose_file.read_services(KEYS)


def _config(service: Service) -> Config:
    """Return the settings that the process in the container gets from command and environment."""
    parsed = parse(service.command)
    image = dict(re.findall(r"(LOCKSTEP_\w+)=(\S+)", DOCKERFILE))
    return host_selection.select_share(
        None, parsed.options["config"], parsed.overrides, image | service.environment
    ).config


def _rank_services(services: dict[str, Service]) -> dict[int, Service]:
    """Return the rank workers by the rank in their command."""
    found = {}
    for service in services.values():
        parsed = parse(service.command)
        if parsed.command == "rank-worker":
            found[parsed.options["rank"]] = service
    return found


def test_console_script_accepts_every_command_and_setting_of_compose_file(
    services: dict[str, Service],
) -> None:
    """Each role's command and environment give valid settings."""
    roles = {parse(one.command).command for one in services.values()}

    assert roles == {"gateway", "scheduler", "rank-worker", "cache-store"}
    for service in services.values():
        assert _config(service).model.path == "demo"


def test_compose_services_have_equal_settings_except_their_addresses(
    services: dict[str, Service],
) -> None:
    """All settings are equal but the gateway's own address and each rank's."""
    own = {"LOCKSTEP_GATEWAY_HOST", "LOCKSTEP_GATEWAY_PORT", "LOCKSTEP_WORLD_DATA_HOST"}
    common = [
        {key: value for key, value in one.environment.items() if key not in own | KEYS.keys()}
        for one in services.values()
    ]

    assert all(settings == common[0] for settings in common)
    assert sorted(_rank_services(services)) == list(
        range(_config(services["scheduler"]).world.size)
    )


def test_compose_services_share_volumes_for_sockets_and_kv_block_files(
    services: dict[str, Service],
) -> None:
    """Both ends of a link mount its socket folder; store and ranks mount the block folder."""
    ranks = list(_rank_services(services).values())
    config = _config(services["scheduler"])
    users = {
        config.gateway_address: [services["gateway"], services["scheduler"]],
        config.rank_address: [services["scheduler"], *ranks],
        config.store_address: [services["store"], *ranks],
    }

    for address, sides in users.items():
        assert address.startswith("ipc:///")
        folder = str(PurePosixPath(address.removeprefix("ipc://")).parent)
        assert all(folder in side.mounts for side in sides), address
    assert all(str(config.cache_directory) in one.mounts for one in [services["store"], *ranks])
    volumes = {one.partition(":")[0] for each in services.values() for one in each.tree["volumes"]}
    assert volumes == set(compose_file.compose_tree()["volumes"])


def test_compose_ranks_share_internal_network_without_other_services(
    services: dict[str, Service],
) -> None:
    """Each rank's data address is its own, in an internal network without other services."""
    network = compose_file.compose_tree()["networks"]["ranks"]
    subnet = ipaddress.ip_network(network["ipam"]["config"][0]["subnet"])
    ranks = _rank_services(services)

    assert network["internal"] is True
    assert _config(ranks[0]).backend == "ring"
    seen = set()
    for service in ranks.values():
        address = service.tree["networks"]["ranks"]["ipv4_address"]
        assert _config(service).world.data_host == address
        assert ipaddress.ip_address(address) in subnet
        seen.add(address)
    assert len(seen) == len(ranks)
    others = [one for one in services.values() if one not in ranks.values()]
    assert not any("ranks" in one.tree.get("networks", []) for one in others)


def test_compose_gateway_listens_on_loopback_and_requires_api_key(
    services: dict[str, Service],
) -> None:
    """The port is on loopback, keys come from outside, and /readyz is the health check."""
    gateway = services["gateway"]
    port = _config(gateway).gateway.port

    assert [one.tree.get("ports") for one in services.values() if one is not gateway] == [None] * 4
    assert gateway.tree["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert f"http://127.0.0.1:{port}/readyz" in gateway.tree["healthcheck"]["test"][-1]
    assert "k" * 48 not in compose_file.FILE.read_text(encoding="utf-8")
    with pytest.raises(KeyError):
        compose_file.read_services({})
    assert [one.name for one in services.values() if API_KEYS_VARIABLE in one.environment] == [
        "gateway"
    ]


def test_compose_services_have_time_to_drain_and_restart_after_exit(
    services: dict[str, Service],
) -> None:
    """The grace period covers a drain, signals reach the process, and an exit restarts it."""
    for service in services.values():
        grace = service.tree["stop_grace_period"]
        assert grace.endswith("s")
        assert float(grace[:-1]) >= _config(service).scheduler.drain_s + END_GRACE_S
        assert service.tree["init"] is True
        assert service.tree["restart"] == "always"
        assert service.tree["cap_drop"] == ["ALL"]


def test_compose_services_have_limits_of_memory_and_processes(
    services: dict[str, Service],
) -> None:
    """No role can take the machine's memory or processes, and the ranks' shares of it add up to at
    most all."""
    for service in services.values():
        assert re.fullmatch(r"(\$\{\w+:-)?\d+g\}?", service.tree["mem_limit"]), service.name
        assert service.tree["pids_limit"] > 100
    shares = [_config(one).rank_worker.memory_share for one in _rank_services(services).values()]
    assert all(shares)
    assert sum(shares) <= 1.0


def test_compose_file_is_valid_for_docker() -> None:
    """`docker compose config` accepts the file where it is installed; its specification's schema
    accepts it everywhere."""
    problems = compose_file.find_schema_errors(compose_file.compose_tree())

    assert problems == []
    if compose_file.has_docker_compose():
        done = compose_file.run_docker_compose_config(KEYS)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("key", "value"),
    [("restrat", "always"), ("mem_limit", ["4g"]), ("volumes", "bus:/bus"), ("init", "yes")],
)
def test_compose_schema_refuses_misspelt_key_or_wrong_type(key: str, value: object) -> None:
    """The schema would notice a mistake in a service."""
    tree = compose_file.compose_tree()
    tree["services"]["gateway"][key] = value

    assert compose_file.find_schema_errors(tree)


def test_docker_image_copies_only_the_checkout_and_downloads_only_by_pip() -> None:
    """The image has the default registry, no download but by pip, no root, and existing sources."""
    instructions = re.findall(r"^([A-Z]+) (.+(?:\\\n.+)*)", DOCKERFILE, re.MULTILINE)
    kinds = [kind for kind, _ in instructions]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()

    assert re.fullmatch(r"python:3\.1[123]-slim", instructions[0][1])
    assert set(kinds) <= {"FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "ENTRYPOINT", "CMD"}
    assert "://" not in DOCKERFILE
    assert dict(instructions)["USER"] not in ("root", "0")
    assert dict(instructions)["ENTRYPOINT"] == '["lockstep"]'
    for kind, rest in instructions:
        for source in rest.split()[:-1] if kind == "COPY" else []:
            assert (ROOT / source).exists(), source
            assert any(fnmatch.fnmatch(f"!{source}", line) for line in ignored), source


def test_volume_folders_in_docker_image_belong_to_its_user(services: dict[str, Service]) -> None:
    """Every folder that is a volume is made in the image, private to its user."""
    made = re.search(r"install -d -o lockstep -g lockstep -m 0700 (.+)$", DOCKERFILE, re.MULTILINE)
    assert made is not None

    folders = {folder for service in services.values() for folder in service.mounts}
    run_dir = str(_config(services["gateway"]).run_dir)

    assert folders | {run_dir} == set(made[1].split())
