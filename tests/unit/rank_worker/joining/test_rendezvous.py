"""Rendezvous of the ranks before MLX joins them, over real sockets."""

import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest

from services.rank_worker.joining import join, rendezvous, rendezvous_client
from shared.errors import RanksUnreachable
from tests.unit.rank_worker.joining.rendezvous_peers import (
    LONG_S,
    SHORT_S,
    free_ports,
    rendezvous_order,
    ring_orders,
    run_all_rendezvous,
    run_rendezvous,
    star_orders,
)


@pytest.mark.parametrize(("size", "connections"), [(1, 1), (2, 1), (2, 3), (4, 1)])
def test_ring_ranks_complete_rendezvous_over_every_address(size: int, connections: int) -> None:
    """Each rank of a ring connects to its neighbours over every address."""
    free = free_ports(size * connections)
    rows = [[f"127.0.0.1:{free.pop()}" for _ in range(connections)] for _ in range(size)]

    assert run_all_rendezvous(ring_orders(rows)) == [""] * size
    # All ports are closed again: MLX can listen there.
    for address in (address for row in rows for address in row):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", int(address.rpartition(":")[2])))
            listener.listen()


def test_rendezvous_completes_at_reserved_data_ports() -> None:
    """The rendezvous works at data ports that the ranks have reserved."""
    kept = [join.DataPort("127.0.0.1") for _ in range(3)]
    for port in kept:
        port.allow_binding()

    assert run_all_rendezvous(ring_orders([[port.address] for port in kept])) == [""] * 3
    for port in kept:
        port.release()


@pytest.mark.parametrize("backend", ["jaccl", "nccl"])
def test_jaccl_and_nccl_ranks_complete_rendezvous_at_rank_0(
    backend: Literal["jaccl", "nccl"],
) -> None:
    """With jaccl and NCCL all ranks connect to rank 0."""
    (port,) = free_ports(1)
    environment = {
        "MLX_JACCL_COORDINATOR": f"127.0.0.1:{port}",
        "NCCL_HOST_IP": "127.0.0.1",
        "NCCL_PORT": str(port),
        "MLX_WORLD_SIZE": "3",
    }
    files = {"MLX_IBV_DEVICES": json.dumps([[None] * 3] * 3)}

    orders = [rendezvous_order(rank, 3, backend, environment, files) for rank in range(3)]
    assert run_all_rendezvous(orders) == ["", "", ""]


def test_rendezvous_is_skipped_for_one_rank_or_empty_environment() -> None:
    """An order without an environment, or for one rank, needs no rendezvous."""
    rendezvous.wait_for_ranks(rendezvous_order(0, 2))
    rendezvous.wait_for_ranks(rendezvous_order(0, 2, "jaccl"))
    rendezvous.wait_for_ranks(rendezvous_order(0, 2, "nccl"))
    rendezvous.wait_for_ranks(rendezvous_order(0, 1, "off"))


def test_missing_rank_is_named_with_its_address_and_cause() -> None:
    """The message names the unreachable rank, its address and cause, and the missing connection."""
    own, other = free_ports(2)
    rows = [[f"127.0.0.1:{own}"], [f"127.0.0.1:{other}"]]

    (message,) = run_all_rendezvous(ring_orders(rows, SHORT_S)[:1])

    assert f"cannot reach rank 1 at 127.0.0.1:{other} (Connection refused)" in message
    assert f"let port {other} through?" in message
    assert f"Rank 1 has not reached rank 0 on {socket.gethostname()}" in message
    # Whole seconds since the port was opened, shortly after the time limit began.
    assert re.search(
        rf"at 127\.0\.0\.1:{own} from 127\.0\.0\.1 within [012] s \(no connection\)", message
    )


@pytest.mark.proof
def test_message_to_each_rank_names_only_missing_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one of three ranks is missing, rank 0 names it, and the other rank gets its name."""
    monkeypatch.setattr(rendezvous_client, "FINAL_REPLY_S", 10.0)
    orders, (host, port) = star_orders(3, 3 * SHORT_S)

    first, second = run_all_rendezvous(orders[:2])

    assert "Rank 2 has not reached rank 0" in first
    assert re.search(rf"at {host}:{port} within \d s \(no connection\)", first)
    assert "Rank 1" not in first
    assert f"Rank 0 at {host}:{port} has not completed the rendezvous with rank 1" in second
    assert "rank 2 has not reached it" in second
    assert "firewall" not in second


def test_no_rank_leaves_rendezvous_before_last_one_arrives() -> None:
    """No rank continues before the last has arrived, and no port is open afterwards."""
    orders, place = star_orders(3)

    with ThreadPoolExecutor(2) as pool:
        early = [pool.submit(run_rendezvous, one) for one in orders[:2]]
        time.sleep(0.5)
        assert not any(one.done() for one in early)
        assert run_rendezvous(orders[2]) == ""
        with socket.socket() as mlx:
            assert mlx.connect_ex(place) != 0
        assert [one.result(LONG_S) for one in early] == ["", ""]


def test_rendezvous_completes_when_one_rank_starts_late() -> None:
    """A rank that starts later completes the rendezvous."""
    rows = [[f"127.0.0.1:{port}"] for port in free_ports(2)]
    first, second = ring_orders(rows)

    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(rendezvous.wait_for_ranks, first)
        time.sleep(0.3)
        rendezvous.wait_for_ranks(second)
        early.result(LONG_S)


def test_rendezvous_error_names_unknown_host_and_cause() -> None:
    """A host name that cannot be resolved is named with the cause."""
    (own,) = free_ports(1)
    rows = [[f"127.0.0.1:{own}"], ["no-such-host.invalid:7"]]

    (message,) = run_all_rendezvous(ring_orders(rows, SHORT_S)[:1])

    assert "rank 1 at no-such-host.invalid:7 (" in message


def test_rendezvous_at_port_in_use_fails_at_once() -> None:
    """A port in use fails at once with port, rank and setting."""
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        rows = [[f"127.0.0.1:{port}"], ["127.0.0.1:9"]]

        with pytest.raises(
            RanksUnreachable, match=f"Port {port} .*rank 0 .*is taken.*world.hostfile"
        ):
            rendezvous.wait_for_ranks(ring_orders(rows)[0])


def test_rank_on_wrong_machine_fails_at_once_with_expected_address() -> None:
    """A rank on the wrong machine fails at once with the expected address."""
    rows = [["127.0.0.1:9"], ["192.0.2.7:5000"]]

    with pytest.raises(
        RanksUnreachable, match=r"192\.0\.2\.7:5000 is for rank 1 .*--rank 1.*hostfile"
    ):
        rendezvous.wait_for_ranks(ring_orders(rows)[1])
