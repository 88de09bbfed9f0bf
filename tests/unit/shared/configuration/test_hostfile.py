"""MLX's hostfiles: all three forms are read, and each mistake has its own sentence."""

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


def test_the_rings_own_form_says_every_port() -> None:
    """A list of lists is taken as it is; machines are known by their addresses."""
    found = _parse([["10.0.0.1:5000", "10.0.1.1:5001"], ["10.0.0.2:5000", "10.0.1.2:5001"]])

    assert found.addresses == (
        ("10.0.0.1:5000", "10.0.1.1:5001"),
        ("10.0.0.2:5000", "10.0.1.2:5001"),
    )
    assert found.machines == ("10.0.0.1", "10.0.0.2")
    assert (found.size, found.backend, found.devices) == (2, "", ())
    assert found.coordinator() == "10.0.0.1:5000"


def test_a_launchers_form_gets_the_launchers_ports() -> None:
    """Objects have no ports, so they are counted up from MLX's own, per rank and address."""
    hosts = [{"ssh": "a", "ips": ["10.0.0.1", "10.0.1.1"]}, {"ssh": "b", "ips": ["x", "y"]}]

    found = _parse(hosts)

    assert found.addresses == (("10.0.0.1:32323", "10.0.1.1:32324"), ("x:32325", "y:32326"))
    assert found.machines == ("a", "b")
    assert found.coordinator(12_345) == "10.0.0.1:12345"


@pytest.mark.parametrize(
    ("backend", "ours", "prefers_ring"),
    [("jaccl", "jaccl", False), ("jaccl-ring", "jaccl", True), ("ring", "ring", False)],
)
def test_todays_form_says_backend_and_variables(
    backend: str, ours: str, prefers_ring: bool
) -> None:
    """What `mlx.distributed_config` writes: backend, envs and hosts."""
    tree = {"backend": backend, "envs": ["MLX_A=1=2", "MLX_B"], "hosts": PAIR}

    found = _parse(tree)

    assert (found.backend, found.prefers_ring) == (ours, prefers_ring)
    assert found.variables == {"MLX_A": "1=2", "MLX_B": ""}
    assert found.devices == (((), ("rdma_en5",)), (("rdma_en4",), ()))


def test_ranks_without_an_address() -> None:
    """jaccl needs one for rank 0 only, as in MLX's documents."""
    hosts = [{**PAIR[0]}, {**PAIR[1], "ips": []}]

    found = _parse(hosts)

    assert not found.has_addresses()
    assert found.coordinator() == "10.0.0.1:32323"
    assert _parse([{"ssh": "a"}, {"ssh": "b"}]).coordinator() == ""


@pytest.mark.parametrize(
    ("tree", "words"),
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
        ([{"ssh": "a", "ips": "10.0.0.1"}], '"ips" of rank 0 must be a list'),
        ([{"ssh": "a", "ips": ["10.0.0.1:5"]}], "without a port"),
        ([{"ssh": "a", "rdma": [None, "x"]}, {"ssh": "b"}], '"rdma" of rank 1 is missing'),
        ([{"ssh": "a", "rdma": [None]}, {"ssh": "b", "rdma": [None]}], "2 rows and 1 entries"),
        ({"backend": "mpi", "hosts": PAIR}, '"mpi"'),
        ({"backend": "ring", "envs": "A=1", "hosts": PAIR}, '"envs" must be a list'),
    ],
)
def test_a_mistake_is_named(tree: Any, words: str) -> None:
    """What MLX would trip over later, or take for something else, is refused with its place."""
    with pytest.raises(ConfigError, match=words) as refused:
        _parse(tree)

    assert str(refused.value).startswith("world.hostfile")
    assert str(refused.value).endswith(".")


def test_text_that_is_no_json() -> None:
    """One sentence, not a traceback."""
    with pytest.raises(ConfigError, match=r"world\.hostfile is not valid JSON"):
        hostfile.parse("[[")
