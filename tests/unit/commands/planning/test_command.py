"""Command `lockstep plan`: its output, exit codes and errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.commands.command_lines import run
from tests.unit.commands.planning import sparse_checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint of Qwen3 30B A3B: 57 GiB that take no disk space."""
    return sparse_checkpoints.write(
        tmp_path / "qwen", sparse_checkpoints.EXPERTS, sparse_checkpoints.expert_shapes()
    )


def _plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    return run(capsys, "plan", *words)


def test_plan_for_two_hosts_lists_splits_and_recommends_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every split has a line, and the last line names the settings to use."""
    code, out, _ = _plan(capsys, "--model", str(folder), "--memory", "512GB,192GB")

    assert code == 0
    assert "host 1: 192 GiB, of which metal may use 144 GiB" in out
    for kind in ("none", "tensor", "expert", "tensor+expert", "pipeline"):
        assert f" {kind} " in out
    last = next(line for line in out.splitlines() if line.startswith("Recommended"))
    assert (
        f'in the inventory set model.path = "{folder}", world.size = 2, world.sharding = "expert"'
        in last
    )
    assert "lockstep up" not in last


def test_plan_for_one_host_recommends_lockstep_up_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For one host the recommendation is a `lockstep up` command."""
    _, out, _ = _plan(capsys, "--model", str(folder), "--memory", "512GB")

    assert f"lockstep up --model {folder} --ranks 1\n" in out


def test_plan_recommends_one_host_when_second_host_has_too_little_memory(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of hosts with 4 GB and 512 GB of memory, the recommendation names only the large one."""
    _, out, _ = _plan(capsys, "--model", str(folder), "--memory", "4GB,512GB", "--json")
    best = json.loads(out)["recommendation"]
    _, table, _ = _plan(capsys, "--model", str(folder), "--memory", "4GB,512GB")

    assert (best["hosts"], best["flags"]) == (["host 1"], [])
    assert "world.size = 1, with ranks on host 1 only" in table


def test_plan_exits_with_1_and_prints_missing_gib_when_model_does_not_fit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """57 GiB of weights for a GPU with 24 GiB: exit code 1, and the output has the missing GiB."""
    code, out, _ = _plan(capsys, "--model", str(folder), "--memory", "36GB", "--usable", "0.67")

    assert code == 1
    assert "GiB short" in out
    assert "Nothing to recommend: every split lacks memory" in out


def test_plan_exits_with_1_when_requested_sequences_do_not_fit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recommendation is printed, and the exit code is 1."""
    code, out, _ = _plan(
        capsys,
        "--model",
        str(folder),
        "--memory",
        "128GB",
        "--context",
        "40960",
        "--sequences",
        "500",
    )

    assert code == 1
    assert "Recommended" in out


def test_plan_json_has_weight_bytes_and_one_entry_per_rank(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The document has the size of the weights in bytes, and an entry for each rank of a split."""
    _, out, _ = _plan(capsys, "--model", str(folder), "--memory", "2x128GB", "--json")

    plan = json.loads(out)
    assert plan["weights_bytes"] == sparse_checkpoints.read(folder).bytes
    assert plan["recommendation"]["sharding"] == "expert"
    expert = next(one for one in plan["options"] if one["sharding"] == "expert")
    assert {len(expert["shares"]), expert["ranks"]} == {2}


INVENTORY = """
{settings}
[[hosts]]
name = "studio-a"
address = "10.0.0.1"
data_address = "10.1.0.1"
roles = ["gateway", "scheduler", "cache_store"]
ranks = 1
memory_bytes = 549755813888
{first}
[[hosts]]
name = "studio-b"
address = "10.0.0.2"
data_address = "10.1.0.2"
roles = ["cache_store"]
ranks = 1
{second}
"""
MEMORY = "memory_bytes = 206158430208"


def _inventory(tmp_path: Path, settings: str, first: str = "", second: str = MEMORY) -> Path:
    file = tmp_path / "hosts.toml"
    file.write_text(INVENTORY.format(settings=settings, first=first, second=second))
    return file


def test_plan_takes_hosts_and_memory_from_inventory(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hosts are planned with the inventory's settings; the error names a host without memory."""
    model = f'[model]\npath = "{folder}"'
    file = _inventory(tmp_path, model)
    code, out, err = _plan(capsys, "--inventory", str(file))
    assert (code, err) == (0, "")
    assert "studio-b: 192 GiB, of which metal" in out
    assert 'world.sharding = "expert"' in out
    assert "lockstep up" not in out

    file = _inventory(tmp_path, model, second="")
    code, _, err = _plan(capsys, "--inventory", str(file))
    assert code == 78
    assert "how much memory studio-b has" in err


@pytest.mark.parametrize(("backend", "usable"), [("ring", "36.0 GiB"), ("nccl", "192 GiB")])
def test_plan_gives_ranks_of_inventory_their_share_of_host_memory(
    backend: str, usable: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rank_worker.memory_share` is a part of the host for each rank; a GPU has its own memory."""
    settings = (
        f'[world]\nbackend = "{backend}"\n[model]\npath = "{folder}"\n'
        "[rank_worker]\nmemory_share = 0.25"
    )

    _, out, _ = _plan(capsys, "--inventory", str(_inventory(tmp_path, settings)))

    line = next(line for line in out.splitlines() if "studio-b" in line)
    assert line.endswith(f"may use {usable}")
    assert ("each rank may use 0.25 of its host's memory" in out) == (backend == "ring")


def test_plan_counts_rdma_resources_of_inventory_with_jaccl(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A note says what a world needs of each RDMA device, and what the device has."""
    settings = f'[world]\nbackend = "jaccl"\n[model]\npath = "{folder}"'
    cables = [f"rdma = {{ {peer} = 'rdma_en5' }}" for peer in ("studio-b", "studio-a")]
    first, second = cables[0], f"{MEMORY}\n{cables[1]}"
    _, out, _ = _plan(capsys, "--inventory", str(_inventory(tmp_path, settings, first, second)))

    note = "each RDMA device needs 1 of 10 queue pairs and 64 of 100 memory regions"
    assert f"note: {note}, which all processes of its host share" in out


def _pipeline_inventory(tmp_path: Path, folder: Path, backend: str) -> Path:
    world = f'[world]\nbackend = "{backend}"\nsharding = "pipeline"\nenable_pipeline = true'
    return _inventory(tmp_path, f'{world}\n[model]\npath = "{folder}"')


def test_plan_refuses_inventory_with_pipeline_over_nccl(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal is that of `lockstep up`, without planning anything."""
    file = _pipeline_inventory(tmp_path, folder, "nccl")

    code, out, err = _plan(capsys, "--inventory", str(file))

    assert (code, out) == (78, "")
    assert "MLX has no send and receive over nccl, which pipelines need" in err


def test_plan_over_nccl_lists_pipeline_as_impossible(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hosts whose backend is nccl get no figures for a pipeline and no recommendation of one."""
    file = _inventory(tmp_path, f'[world]\nbackend = "nccl"\n[model]\npath = "{folder}"')

    _, out, _ = _plan(capsys, "--inventory", str(file), "--json")

    options = {one["sharding"]: one["obstacle"] for one in json.loads(out)["options"]}
    assert options["pipeline"] == "MLX has no send and receive over nccl"
    assert options["expert"] == ""


def test_plan_warns_of_pipeline_over_jaccl(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the settings make a pipeline over jaccl, a note states the known risk."""
    _, out, _ = _plan(capsys, "--inventory", str(_pipeline_inventory(tmp_path, folder, "jaccl")))

    assert "note: with some versions MLX's send and receive over jaccl" in out


def test_plan_notes_hostfile_that_ranks_cannot_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hostfile whose ranks could not reach each other is named before anything starts."""
    hosts = tmp_path / "hosts.json"
    hosts.write_text('[["127.0.0.1:5000"], ["10.0.0.2:5000"]]')
    config = tmp_path / "lockstep.toml"
    config.write_text(f'[world]\nhostfile = "{hosts}"\n')

    _, out, _ = _plan(capsys, "--config", str(config), "--memory", "64GB")

    assert "note: the world cannot start: world.hostfile is for several machines" in out


def test_plan_reads_the_inventory_model_folder_that_exists_on_this_machine(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inventory hosts may have different model folders: plan reads the one that exists here
    and never the demo model."""
    away, here = 'model_path = "/nowhere/at/all"', f'model_path = "{folder}"'

    code, out, _ = _plan(
        capsys, "--inventory", str(_inventory(tmp_path, "", away, f"{MEMORY}\n{here}"))
    )
    assert (code, out.startswith(f"{folder} (qwen3_moe)")) == (0, True)

    code, out, err = _plan(capsys, "--inventory", str(_inventory(tmp_path, "", away)))
    assert (code, out) == (78, "")
    assert "/nowhere/at/all" in err


def test_plan_uses_all_gpu_memory_of_nccl_hosts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All memory of an NVIDIA GPU is usable, unlike that of a Mac."""
    settings = f'[world]\nbackend = "nccl"\n[model]\npath = "{folder}"'

    _, out, _ = _plan(capsys, "--inventory", str(_inventory(tmp_path, settings)))

    assert "studio-b: 192 GiB, of which cuda may use 192 GiB" in out


def test_plan_reports_config_section_with_scalar_value_in_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A setting in place of a section gives an error of one line that names the setting."""
    file = _inventory(tmp_path, 'model = "demo"')

    code, out, err = _plan(capsys, "--inventory", str(file))

    assert (code, out) == (78, "")
    assert "The setting model must be a section" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--model", "some/thing-that-is-not-here"], 78, "hf download some/thing-that-is-not-here"),
        (["--model", "./nowhere"], 78, "no model folder"),
        (["--memory", "much"], 64, "not a size of memory"),
        (["--memory", "9" * 400], 64, "not a size of memory"),
        (["--memory", "1GB,2GB", "--ranks", "3"], 64, "names 2 hosts and --ranks says 3"),
        (["--context", "0"], 64, "--context is 0"),
        (["--context", "99999999"], 64, "allows at most 8,192 tokens"),
        (["--ranks", "65"], 64, "at most 64"),
        (["--usable", "1.5"], 64, "above 0 and at most 1"),
        (["--usable", "nan"], 64, "above 0 and at most 1"),
        (["--inventory", "x.toml", "--ranks", "2"], 64, "leave out"),
    ],
)
def test_plan_with_wrong_flag_exits_with_usage_code_and_one_line_error(
    words: list[str], code: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong flag or model gives its exit code and one line with cause and remedy."""
    found, out, err = _plan(capsys, *words)

    assert (found, out) == (code, "")
    assert expected in err
    assert err.startswith("lockstep: ")
    assert err.count("\n") == 1


def test_plan_command_imports_no_mlx_and_opens_no_connection(folder: Path) -> None:
    """Planning works without MLX and opens no connection."""
    program = (
        "import sys, socket\n"
        "sys.modules['mlx'] = sys.modules['mlx_lm'] = None\n"
        "socket.socket.connect = None\n"
        "from services.commands.main import main\n"
        f"code = main(['plan', '--model', {str(folder)!r}, '--memory', '512GB'])\n"
        "assert not [one for one in sys.modules if one.startswith('mlx.')]\n"
        "sys.exit(code)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stderr
