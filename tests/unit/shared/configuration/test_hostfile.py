"""MLX hostfiles: three accepted forms, and an error for each mistake."""

import json
from typing import Any

import pytest

from shared.configuration import hostfile
from shared.errors import ConfigError

PAIR = [
    {"ssh": "mac1", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en5"]},
    {"ssh": "mac2", "ips": ["10.0.0.2"], "rdma": ["rdma_en4", None]},
]


def _parse(tree: Any) -> hostfile.Hostfile:
    return hostfile.parse(json.dumps(tree))


def test_hostfile_of_lists_gives_every_address_with_its_port() -> None:
    """A list of lists is used unchanged; machines are named by their addresses."""
    parsed = _parse([["10.0.0.1:5000", "10.0.1.1:5001"], ["10.0.0.2:5000", "10.0.1.2:5001"]])

    assert parsed.addresses == (
        ("10.0.0.1:5000", "10.0.1.1:5001"),
        ("10.0.0.2:5000", "10.0.1.2:5001"),
    )
    assert parsed.machines == ("10.0.0.1", "10.0.0.2")
    assert (parsed.size, parsed.backend, parsed.devices) == (2, "", ())
    assert parsed.coordinator() == "10.0.0.1:5000"


def test_hostfile_of_objects_numbers_ports_as_mlx_launch_does() -> None:
    """Hosts as objects have no ports; they are counted up from MLX's first port by rank and
    address."""
    hosts = [{"ssh": "a", "ips": ["10.0.0.1", "10.0.1.1"]}, {"ssh": "b", "ips": ["x", "y"]}]

    parsed = _parse(hosts)

    assert parsed.addresses == (("10.0.0.1:32323", "10.0.1.1:32324"), ("x:32325", "y:32326"))
    assert parsed.machines == ("a", "b")
    assert parsed.coordinator(12_345) == "10.0.0.1:12345"


@pytest.mark.parametrize(
    ("backend", "ours", "prefers_ring"),
    [("jaccl", "jaccl", False), ("jaccl-ring", "jaccl", True), ("ring", "ring", False)],
)
def test_hostfile_of_mlx_distributed_config_gives_backend_and_variables(
    backend: str, ours: str, prefers_ring: bool
) -> None:
    """The form that `mlx.distributed_config` writes has a backend, variables and hosts."""
    tree = {"backend": backend, "envs": ["MLX_A=1=2", "MLX_B"], "hosts": PAIR}

    parsed = _parse(tree)

    assert (parsed.backend, parsed.prefers_ring) == (ours, prefers_ring)
    assert parsed.variables == {"MLX_A": "1=2", "MLX_B": ""}
    assert parsed.devices == (((), ("rdma_en5",)), (("rdma_en4",), ()))


def test_jaccl_hostfile_is_valid_when_only_rank_0_has_address() -> None:
    """A hostfile without addresses for other ranks is valid and still has a coordinator."""
    hosts = [{**PAIR[0]}, {**PAIR[1], "ips": []}]

    parsed = _parse(hosts)

    assert not all(parsed.addresses)
    assert parsed.coordinator() == "10.0.0.1:32323"
    assert _parse([{"ssh": "a"}, {"ssh": "b"}]).coordinator() == ""


@pytest.mark.parametrize(
    ("tree", "expected_words"),
    [
        ("text", "must contain a list of hosts"),
        ([], "must contain a list of hosts"),
        ({"backend": "ring"}, "must contain a list of hosts"),
        ({"backend": ["ring"], "hosts": PAIR}, "is for the backend"),
        ([["10.0.0.1:1"], {"ssh": "a"}], "only objects or only lists"),
        ([["10.0.0.1"]], r'rank 0 the address "10.0.0.1", which is not "ip:port"'),
        ([["10.0.0.1:1"], ["[::1]:5"]], "rank 1 the address"),
        ([["10.0.0.1:70000"]], "rank 0 the address"),
        ([[5]], "rank 0 the address 5"),
        ([["10.0.0.1:1"], ["10.0.0.1:1"]], "10.0.0.1:1 to rank 0 and to rank 1"),
        ([["10.0.0.1:1", "10.0.0.1:2"], ["10.0.0.2:1"]], "some ranks 1 and others 2 addresses"),
        ([[None, "rdma_en5"], ["rdma_en5", None]], "--distributed-ibv-devices"),
        ([["10.0.0.1:1"], ["0.0.0.0:1"]], "rank 1 the address 0.0.0.0, which is not"),
        ([["10.0.0.1:1"], ["255.255.255.255:1"]], "rank 1 the address 255.255.255.255"),
        ([{"ssh": "a", "ips": ["224.0.0.1"]}], "rank 0 the address 224.0.0.1, which is not"),
        ([{"ssh": "a", "ips": ["10.0.0"]}], "rank 0 the address 10.0.0, which is neither"),
        ([{"ssh": "a", "ips": ["mac 1"]}], "rank 0 the address mac 1, which is neither"),
        ([{"ssh": "a", "ips": "10.0.0.1"}], '"ips" of rank 0 must be a list'),
        ([{"ssh": "a", "ips": ["10.0.0.1:5"]}], "without a port"),
        ([{"ssh": "a", "rdma": [None, "x"]}, {"ssh": "b"}], '"rdma" of rank 1 is missing'),
        ([{"ssh": "a", "rdma": [None]}, {"ssh": "b", "rdma": [None]}], "2 rows and 1 entries"),
        ({"backend": "mpi", "hosts": PAIR}, '"mpi"'),
        ({"backend": "ring", "envs": "A=1", "hosts": PAIR}, '"envs" must be a list'),
    ],
)
def test_malformed_hostfile_error_names_position_of_mistake(tree: Any, expected_words: str) -> None:
    """Input that MLX would misread or reject later is refused, and the error names its place."""
    with pytest.raises(ConfigError, match=expected_words) as refused:
        _parse(tree)

    assert str(refused.value).startswith("world.hostfile")
    assert str(refused.value).endswith(".")


def test_hostfile_with_invalid_json_raises_one_sentence_error() -> None:
    """The error is one sentence, not a traceback."""
    with pytest.raises(ConfigError, match=r"world\.hostfile is not valid JSON"):
        hostfile.parse("[[")
