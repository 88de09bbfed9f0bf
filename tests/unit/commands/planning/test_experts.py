"""`lockstep plan --expert-stats`: shares of experts by measured load, and files that are wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.measurements import expert_file
from shared.messages import ExpertLayer, ExpertsReported
from tests.unit.commands.command_lines import run
from tests.unit.commands.planning import sparse_checkpoints

EXPERTS = 128
LAYERS = 48


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint of Qwen3 30B A3B: 57 GiB that take no disk space."""
    return sparse_checkpoints.write(
        tmp_path / "qwen", sparse_checkpoints.EXPERTS, sparse_checkpoints.expert_shapes()
    )


def _write(file: Path, counts: list[int], layers: int = LAYERS) -> Path:
    """Write a file with the same loads in each layer."""
    report = ExpertsReported(
        model="qwen",
        model_fingerprint="a",
        sharding="expert",
        world_size=2,
        layers=[ExpertLayer(layer=one, counts=counts, ranges=[]) for one in range(layers)],
    )
    expert_file.write(file, report)
    assert expert_file.read(file) == report
    return file


def _plan(
    capsys: pytest.CaptureFixture[str], folder: Path, file: Path, *words: str
) -> tuple[int, str, str]:
    return run(capsys, "plan", "--model", str(folder), "--expert-stats", str(file), *words)


def test_plan_of_skewed_loads_proposes_unequal_shares_with_balanced_load(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first 32 experts have three times the load of the others: 192 tokens in all, so that the
    border belongs after the 96th token, at expert 32."""
    file = _write(tmp_path / "skewed.json", [3] * 32 + [1] * 96)
    code, out, _ = _plan(capsys, folder, file, "--memory", "512GB,512GB", "--json")
    found = json.loads(out)["experts"]
    assert code == 0
    assert (found["ranks"], found["assignments"]) == (2, 192 * LAYERS)
    assert (found["present"], found["proposed"]) == ([64, 64], [32, 96])
    assert found["present_imbalance"] == pytest.approx(128 / 96)
    assert found["proposed_imbalance"] == 1.0
    _, out, _ = _plan(capsys, folder, file, "--memory", "512GB,512GB")
    assert (
        "with 64+64 experts the busiest rank of each layer gets 1.33 times the mean; with 32+96 it "
        "gets 1.00 times: set world.expert_shares = [32, 96]"
    ) in out


def test_plan_of_skewed_loads_goes_no_further_than_memory(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """54 GiB of experts do not all fit on the host that should get most of them."""
    file = _write(tmp_path / "skewed.json", [9] * 32 + [1] * 96)
    words = ("--memory", "56GB,56GB", "--usable", "1", "--context", "4096", "--json")
    _, out, _ = _plan(capsys, folder, file, *words)
    plan = json.loads(out)
    (option,) = (one for one in plan["options"] if (one["ranks"], one["sharding"]) == (2, "expert"))
    assert option["fits"]
    few, many = plan["experts"]["proposed"]
    assert plan["experts"]["present_imbalance"] > plan["experts"]["proposed_imbalance"] > 1.0
    bytes_each = sum(one["divided_bytes"] for one in option["shares"]) / EXPERTS
    share = option["shares"][1]
    assert 64 < many < EXPERTS - 20
    assert share["whole_bytes"] + many * bytes_each < share["usable_bytes"]
    assert few + many == EXPERTS


@pytest.mark.parametrize("sharding", ["expert", "tensor+expert"])
def test_plan_proposes_equal_shares_of_even_loads_in_place_of_configured_ones(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], sharding: str
) -> None:
    """How many experts fit follows from those that the configured shares give to each host."""
    file = _write(tmp_path / "even.json", [1] * EXPERTS)
    config = tmp_path / "lockstep.toml"
    config.write_text(f'[world]\nsize = 2\nsharding = "{sharding}"\nexpert_shares = [96, 32]\n')
    words = ("--config", str(config), "--memory", "52GB,52GB", "--json")
    _, out, _ = _plan(capsys, folder, file, *words)
    found = json.loads(out)
    assert (found["experts"]["present"], found["experts"]["proposed"]) == ([96, 32], [64, 64])
    (option,) = (
        one for one in found["options"] if (one["ranks"], one["sharding"]) == (2, sharding)
    )
    many, few = (one["divided_bytes"] for one in option["shares"])
    assert many > few


def test_plan_proposes_shares_for_the_configured_split_of_tensors_and_experts(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With attention divided too, more experts fit on the host that should get most of them."""
    file = _write(tmp_path / "skewed.json", [99] * 8 + [1] * 120)
    words = ("--memory", "48GB,48GB", "--usable", "1", "--context", "4096", "--json")
    most = []
    for sharding in ("expert", "tensor+expert"):
        monkeypatch.setenv("LOCKSTEP_WORLD_SHARDING", sharding)
        _, out, _ = _plan(capsys, folder, file, *words)
        most.append(max(json.loads(out)["experts"]["proposed"]))
    assert EXPERTS > most[1] > most[0]


def test_plan_of_even_loads_keeps_shares(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says that nothing is better."""
    file = _write(tmp_path / "even.json", [5] * EXPERTS)
    _, out, _ = _plan(capsys, folder, file, "--memory", "512GB,512GB")
    assert "no other division into adjacent experts that fits is better" in out


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "no counts of experts"),
        (b"\xff\xfe\x00", "no counts of experts"),
        (b'{"a": 1}', "no counts of experts"),
        (b"[" * 100_000, "no counts of experts"),
        (b'{"type":"StatusReported"}', "no counts of experts"),
    ],
)
def test_file_without_counts_is_refused_with_sentence(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes,
    sentence: str,
) -> None:
    """A damaged or foreign file is a usage error that names the file and the remedy."""
    file = tmp_path / "stats.json"
    file.write_bytes(content)
    code, _, error = _plan(capsys, folder, file, "--memory", "512GB,512GB")
    assert code == 64
    assert sentence in error
    assert str(file) in error
    assert "lockstep status --expert-stats" in error


def _with_layers(layers: list[dict[str, Any]]) -> str:
    fields = {"type": "ExpertsReported", "model": "m", "model_fingerprint": "", "world_size": 2}
    return json.dumps({**fields, "sharding": "expert", "layers": layers})


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        ([{"layer": 0, "counts": [1] * 127, "ranges": []}], "of another model (m, 127 experts"),
        ([{"layer": 48, "counts": [1] * 128, "ranges": []}], "of another model"),
        ([{"layer": 3, "counts": [1] * 128, "ranges": []}] * 2, "counts a layer twice"),
        ([{"layer": 3, "counts": [0] * 128, "ranges": []}], "counts no tokens"),
        ([{"layer": 3, "counts": [-1] * 128, "ranges": []}], "no counts of experts"),
        ([], "counts no tokens"),
    ],
)
def test_counts_that_do_not_fit_the_model_are_refused(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    layers: list[dict[str, Any]],
    sentence: str,
) -> None:
    """Loads of another model, or none at all, are a usage error."""
    file = tmp_path / "stats.json"
    file.write_text(_with_layers(layers))
    code, _, error = _plan(capsys, folder, file, "--memory", "512GB,512GB")
    assert (code, sentence in error) == (64, True), error


def test_one_rank_or_missing_file_is_a_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank has nothing to divide."""
    file = _write(tmp_path / "even.json", [5] * EXPERTS)
    code, _, error = _plan(capsys, folder, file, "--memory", "512GB")
    assert (code, "give --ranks or --memory" in error) == (64, True), error
    code, _, error = _plan(capsys, folder, tmp_path / "absent", "--memory", "512GB,512GB")
    assert (code, "cannot be read" in error) == (64, True), error
