"""Saying hello, and taking on the environment of a world."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from services.rank_worker.joining import join
from shared.errors import ConfigError, WorldLost
from shared.messages import JoinWorld
from tests.orders import join_order


def _order(rank: int = 1, **environment: str) -> JoinWorld:
    return join_order(
        rank,
        2,
        environment={"MLX_RANK": str(rank), "NCCL_PORT": "7", **environment},
        files={"MLX_HOSTFILE": '[["127.0.0.1:1"], ["127.0.0.1:2"]]'},
    )


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test an environment without a world, and take away what it leaves."""
    for name in ("MLX_RANK", "CUDA_VISIBLE_DEVICES", *join._WORLD_VARIABLES):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_an_order_sets_variables_and_private_files(tmp_path: Path) -> None:
    """Inside the block the variables are set, and files are for this user only; after it, gone."""
    with join.world_environment(_order(), tmp_path):
        path = Path(os.environ["MLX_HOSTFILE"])
        assert path.read_text() == '[["127.0.0.1:1"], ["127.0.0.1:2"]]'
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert (os.environ["MLX_RANK"], os.environ["NCCL_PORT"]) == ("1", "7")

    assert not path.parent.exists()


def test_what_a_killed_process_left_is_taken_away(tmp_path: Path) -> None:
    """A rank that dies while it joins leaves files behind; the next one of its number ends that.

    What a process that lives has there is its own: it may be of another world.
    """
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    own, killed, living, other = (
        tmp_path / f"world-of-rank-{end}"
        for end in (f"1-{os.getpid()}", f"1-{dead.pid}", f"1-{os.getppid()}", f"2-{dead.pid}")
    )
    for folder in (own, killed, living, other):
        folder.mkdir()
        (folder / "MLX_HOSTFILE").write_text("of another world")

    with join.world_environment(_order(), tmp_path):
        path = Path(os.environ["MLX_HOSTFILE"])
        assert path.parent == own
        assert path.read_text() == '[["127.0.0.1:1"], ["127.0.0.1:2"]]'
        assert path.stat().st_mode & 0o777 == 0o600

    assert {one.name for one in tmp_path.iterdir()} == {living.name, other.name}


def test_a_launchers_environment_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank of mlx.launch says so, and no order changes its variables."""
    monkeypatch.setenv("MLX_RANK", "1")
    monkeypatch.setenv("MLX_HOSTFILE", "theirs")
    said = join.hello(0, "127.0.0.1:1", device="d", memory_bytes=1, mlx_version="v")
    with join.world_environment(_order(), tmp_path):
        assert os.environ["MLX_HOSTFILE"] == "theirs"
        assert "NCCL_PORT" not in os.environ

    assert (said.rank, said.launched, said.data_address) == (1, True, "")


def test_what_a_shell_has_left_of_another_world_is_taken_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """JACCL's own names win over MLX's inside MLX, and fast synchronization needs our word."""
    for name in ("JACCL_RANK", "JACCL_IBV_DEVICES", "MLX_JACCL_RING", "MLX_METAL_FAST_SYNCH"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")

    with join.world_environment(_order(MLX_JACCL_RING="1"), tmp_path):
        assert os.environ["MLX_JACCL_RING"] == "1"
        assert os.environ["NCCL_DEBUG"] == "INFO"
        left = {"JACCL_RANK", "JACCL_IBV_DEVICES", "MLX_METAL_FAST_SYNCH"} & set(os.environ)
        assert left == set()


def test_a_world_of_one_leaves_the_environment_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without collectives nothing is decided for the operator."""
    monkeypatch.setenv("MLX_METAL_FAST_SYNCH", "1")
    order = msgspec.structs.replace(_order(0), backend="off", environment={}, files={})

    with join.world_environment(order, tmp_path):
        assert os.environ["MLX_METAL_FAST_SYNCH"] == "1"


def test_a_gpu_is_taken_from_those_that_the_operator_has_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The order counts ranks of the host; the variable says which GPUs they may have."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")

    with join.world_environment(_order(CUDA_VISIBLE_DEVICES="1"), tmp_path):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "6"


def test_more_ranks_than_gpus_that_the_operator_has_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NCCL would fail later, and without a number."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    order = _order(CUDA_VISIBLE_DEVICES="2")

    with (
        pytest.raises(ConfigError, match="there are 2 GPUs"),
        join.world_environment(order, tmp_path),
    ):
        pass


def test_a_launched_rank_cannot_become_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The launcher's rank and the order's must agree."""
    monkeypatch.setenv("MLX_RANK", "0")
    with (
        pytest.raises(WorldLost, match="launched as rank 0, not 1"),
        join.world_environment(_order(), tmp_path),
    ):
        pass


def test_a_rank_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken variable is an error with its name."""
    monkeypatch.setenv("MLX_RANK", "one")
    with pytest.raises(ConfigError, match="MLX_RANK is 'one'"):
        join.launched_rank()


def test_hello_says_what_the_process_is() -> None:
    """A process that nobody launched names its port and takes any rank."""
    said = join.hello(-1, "127.0.0.1:5", device="cpu x", memory_bytes=8, mlx_version="1.2")

    assert (said.rank, said.launched, said.data_address) == (-1, False, "127.0.0.1:5")
    assert (said.pid, said.host) == (os.getpid(), socket.gethostname())


def test_a_data_port_is_free_for_mlx_after_release() -> None:
    """The port is nobody else's until it is released, and can be listened on at once after."""
    port = join.DataPort("127.0.0.1")
    number = int(port.address.rpartition(":")[2])
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", number))
    port.release()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", number))
        listener.listen()


def test_a_data_port_stays_kept_while_mlx_takes_it() -> None:
    """From the order on MLX can listen there; on Linux nobody else gets it before it does."""
    port = join.DataPort("127.0.0.1")
    host, _, number = port.address.rpartition(":")
    port.allow_binding()
    with socket.socket() as stranger:
        if sys.platform == "linux":
            with pytest.raises(OSError, match="in use"):
                stranger.bind((host, int(number)))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(number)))
        listener.listen()
        with socket.create_connection((host, int(number)), timeout=5.0):
            listener.accept()[0].close()
        port.release()
    port.release()


def test_a_data_host_that_is_not_here_is_named() -> None:
    """An address of another machine is a setting that is wrong, with its name."""
    with pytest.raises(ConfigError, match=r"world\.data_host 192\.0\.2\.7 .*set it to an address"):
        join.DataPort("192.0.2.7")
