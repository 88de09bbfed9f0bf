"""Hello of a rank, its data port, and the environment of a world."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from services.rank_worker.device.description import Device
from services.rank_worker.joining import join
from shared.errors import ConfigError, WorldLost
from shared.messages import JoinWorld
from tests.support.orders import join_order


def _order(rank: int = 1, **environment: str) -> JoinWorld:
    return join_order(
        rank,
        2,
        environment={"MLX_RANK": str(rank), "NCCL_PORT": "7", **environment},
        files={"MLX_HOSTFILE": '[["127.0.0.1:1"], ["127.0.0.1:2"]]'},
    )


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test an environment without variables of a world."""
    for name in ("MLX_RANK", "CUDA_VISIBLE_DEVICES", *join._WORLD_VARIABLES):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_variables_and_files_of_join_order_exist_only_inside_with_statement(tmp_path: Path) -> None:
    """Variables and files of the order exist inside the `with` statement only; the files are
    private."""
    with join.world_environment(_order(), tmp_path):
        path = Path(os.environ["MLX_HOSTFILE"])
        assert path.read_text() == '[["127.0.0.1:1"], ["127.0.0.1:2"]]'
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert (os.environ["MLX_RANK"], os.environ["NCCL_PORT"]) == ("1", "7")

    assert not path.parent.exists()


def test_files_of_killed_rank_are_removed_by_its_successor(tmp_path: Path) -> None:
    """The next rank with the same number removes files of a killed process.

    Files of living processes and of other ranks stay.
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


def test_join_order_keeps_environment_of_rank_started_by_mlx_launch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank started by mlx.launch says so, and no order changes its variables."""
    monkeypatch.setenv("MLX_RANK", "1")
    monkeypatch.setenv("MLX_HOSTFILE", "theirs")
    said = join.hello(0, "127.0.0.1:1", Device(kind="cpu", name="", memory_bytes=1))
    with join.world_environment(_order(), tmp_path):
        assert os.environ["MLX_HOSTFILE"] == "theirs"
        assert "NCCL_PORT" not in os.environ

    assert (said.rank, said.launched, said.data_address) == (1, True, "")


def test_joining_removes_variables_left_by_other_world(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Variables of another world are removed inside the `with` statement; other variables stay."""
    for name in ("JACCL_RANK", "JACCL_IBV_DEVICES", "MLX_JACCL_RING", "MLX_METAL_FAST_SYNCH"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")

    with join.world_environment(_order(MLX_JACCL_RING="1"), tmp_path):
        assert os.environ["MLX_JACCL_RING"] == "1"
        assert os.environ["NCCL_DEBUG"] == "INFO"
        left = {"JACCL_RANK", "JACCL_IBV_DEVICES", "MLX_METAL_FAST_SYNCH"} & set(os.environ)
        assert left == set()


def test_joining_world_of_one_rank_changes_no_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A world of one rank changes no variable."""
    monkeypatch.setenv("MLX_METAL_FAST_SYNCH", "1")
    order = msgspec.structs.replace(_order(0), backend="off", environment={}, files={})

    with join.world_environment(order, tmp_path):
        assert os.environ["MLX_METAL_FAST_SYNCH"] == "1"


def test_join_order_selects_one_gpu_of_cuda_visible_devices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The number in the order selects one of the GPUs in CUDA_VISIBLE_DEVICES."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")

    with join.world_environment(_order(CUDA_VISIBLE_DEVICES="1"), tmp_path):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "6"


def test_more_ranks_than_visible_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """More ranks than GPUs in CUDA_VISIBLE_DEVICES are refused with the number of GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    order = _order(CUDA_VISIBLE_DEVICES="2")

    with (
        pytest.raises(ConfigError, match="there are 2 GPUs"),
        join.world_environment(order, tmp_path),
    ):
        pass


def test_rank_started_by_launcher_refuses_order_for_other_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An order for another rank than the launched one raises WorldLost."""
    monkeypatch.setenv("MLX_RANK", "0")
    with (
        pytest.raises(WorldLost, match="launched as rank 0, not 1"),
        join.world_environment(_order(), tmp_path),
    ):
        pass


def test_mlx_rank_variable_without_number_raises_config_error_naming_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An MLX_RANK that is not a number raises ConfigError with its name."""
    monkeypatch.setenv("MLX_RANK", "one")
    with pytest.raises(ConfigError, match="MLX_RANK is 'one'"):
        join.launched_rank()


def test_hello_of_process_without_launcher_has_data_address_and_no_fixed_rank() -> None:
    """A process without a launcher sends its data address and no fixed rank."""
    said = join.hello(-1, "127.0.0.1:5", Device(kind="cpu", name="x", memory_bytes=8))

    assert (said.device, said.memory_bytes, said.fast_synch) == ("cpu x", 8, "unproven")
    assert (said.rank, said.launched, said.data_address) == (-1, False, "127.0.0.1:5")
    assert (said.pid, said.host) == (os.getpid(), socket.gethostname())


def test_reserved_data_port_can_be_listened_on_only_after_release() -> None:
    """The data port is in use until it is released, and can be listened on afterwards."""
    port = join.DataPort("127.0.0.1")
    number = int(port.address.rpartition(":")[2])
    with socket.socket() as other_program, pytest.raises(OSError, match="in use"):
        other_program.bind(("127.0.0.1", number))
    port.release()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", number))
        listener.listen()


def test_mlx_can_bind_reserved_data_port_but_other_programs_cannot() -> None:
    """MLX can listen at the port; on Linux other programs cannot bind it before."""
    port = join.DataPort("127.0.0.1")
    host, _, number = port.address.rpartition(":")
    port.allow_binding()
    with socket.socket() as other_program:
        if sys.platform == "linux":
            with pytest.raises(OSError, match="in use"):
                other_program.bind((host, int(number)))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(number)))
        listener.listen()
        with socket.create_connection((host, int(number)), timeout=5.0):
            listener.accept()[0].close()
        port.release()
    port.release()


def test_data_host_setting_with_address_of_other_machine_raises_config_error() -> None:
    """A world.data_host with the address of another machine raises ConfigError with the setting's
    name.
    """
    with pytest.raises(ConfigError, match=r"world\.data_host 192\.0\.2\.7 .*set it to an address"):
        join.DataPort("192.0.2.7")
