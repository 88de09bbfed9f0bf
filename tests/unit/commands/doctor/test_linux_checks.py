"""Checks of a Linux host: settings, GPUs, cores, and memory for the weights."""

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from services.commands.doctor.checks import environment, files, linux, macos
from services.commands.doctor.examiner import Examiner
from services.commands.doctor.facts import Finding, Findings
from services.commands.doctor.system_commands import CommandOutcome
from shared.configuration.loading import load_config
from tests.support.control_groups import hide_control_groups, show_control_groups
from tests.unit.commands.doctor import recorded
from tests.unit.commands.doctor.test_checks import _only_finding, _share


def _set_memory(monkeypatch: pytest.MonkeyPatch, total: int, available: int) -> None:
    sizes = SimpleNamespace(total=total, available=available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: sizes)
    hide_control_groups(monkeypatch)


def _check_linux_memory(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    free_bytes: int,
    gpu_outcome: CommandOutcome,
    dtype: str = "auto",
) -> Finding:
    """Examine a Linux host with `free_bytes` of memory; return the finding about memory."""
    monkeypatch.setattr("services.commands.doctor.examiner.sys.platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    _set_memory(monkeypatch, free_bytes, free_bytes)
    share = _share(tmp_path, model={"dtype": dtype})

    def run(command: Sequence[str], _: float) -> CommandOutcome:
        return gpu_outcome if command[0] == "nvidia-smi" else recorded.not_installed(command[0])

    return _only_finding(Examiner(share, "a", {}, run).examine(), "free memory")


def test_doctor_counts_weights_of_cpu_rank_as_float32(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A CPU rank loads float32 unless model.dtype is set; a GPU rank needs no host memory."""
    _, weights = files.check_model(Findings("a"), load_config(None, {"model.path": "demo"}))
    assert weights is not None
    half, full = (files.bytes_in_memory(weights, one) for one in ("bfloat16", "float32"))
    assert full == 2 * half
    no_gpus, gpus = recorded.not_installed("nvidia-smi"), CommandOutcome(recorded.NVIDIA)

    between = (half + full) // 2
    assert _check_linux_memory(monkeypatch, tmp_path, between, no_gpus).verdict == "FAIL"
    assert _check_linux_memory(monkeypatch, tmp_path, between, no_gpus, "bfloat16").verdict == "OK"
    assert _check_linux_memory(monkeypatch, tmp_path, half // 2, gpus).verdict == "OK"


def test_doctor_compares_weights_with_limit_of_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Weights that the machine could hold and the container cannot are a FAIL that names the
    limit."""
    _set_memory(monkeypatch, 16 * linux.GIB, 16 * linux.GIB)
    limit = {"memory.max": str(2 * linux.GIB), "memory.current": str(linux.GIB)}
    show_control_groups(tmp_path, monkeypatch, limit)
    found = Findings("a")

    linux.check_memory(found, 3 * linux.GIB // 2)

    (finding,) = found.all
    assert finding.verdict == "FAIL"
    assert f"1.0 GiB of 2.0 GiB, the limit of the control group {tmp_path}" in finding.detail


def test_doctor_checks_gpus_cores_and_memory_of_linux_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks that only macOS has are CANNOT CHECK."""
    found = Findings("a")
    linux.check_gpus(found, CommandOutcome(recorded.NVIDIA), needed=True)
    linux.check_gpus(found, recorded.not_installed("nvidia-smi"), needed=True)
    linux.check_cores(found, 2, 2)
    _set_memory(monkeypatch, 8 * 2**30, 4 * 2**30)
    linux.check_memory(found, 5 * 2**30)
    linux.report_mac_only_checks(found)

    assert [(one.check, one.verdict) for one in found.all[:5]] == [
        ("GPU", "OK"),
        ("GPU 1 memory", "WARN"),
        ("GPU", "FAIL"),
        ("cores", "WARN"),
        ("free memory", "FAIL"),
    ]
    assert {one.verdict for one in found.all[5:]} == {"CANNOT CHECK"}


def test_doctor_fails_weights_beyond_memory_share_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory that is free but not in the ranks' share of this machine holds no weights."""
    _set_memory(monkeypatch, 16 * linux.GIB, 8 * linux.GIB)
    found = Findings("a")

    linux.check_memory(found, 3 * linux.GIB, ranks=1, machine_share=0.25)
    linux.check_memory(found, 3 * linux.GIB, ranks=2, machine_share=0.25)
    linux.check_memory(found, 3 * linux.GIB, ranks=1)

    assert [one.verdict for one in found.all] == ["FAIL", "OK", "OK"]
    assert "2.0 GiB of it for its ranks (rank_worker.memory_share)" in found.all[0].detail


def test_doctor_fails_weights_beyond_memory_share_on_mac() -> None:
    """On a Mac the share is one of the memory that its GPU may use."""
    found = Findings("a")

    for share in (0.5, 1.0):
        limit = CommandOutcome("0\n")
        macos.check_gpu_limit(found, limit, 64 * linux.GIB, 30 * linux.GIB, share)

    assert [one.verdict for one in found.all] == ["FAIL", "OK"]
    assert "its ranks 24 GiB of that (rank_worker.memory_share)" in found.all[0].detail


def test_doctor_warns_when_memory_shares_of_ranks_exceed_the_host(tmp_path: Path) -> None:
    """Two ranks of one host with three quarters of it each are a warning."""
    found = Findings("a")
    share = _share(tmp_path, world={"size": 2}, rank_worker={"memory_share": 0.75})

    environment.check_settings(found, share)

    assert found.all[0].verdict == "WARN"
    assert "memory_share is 0.75, and 2 ranks" in found.all[0].detail


def _settings_finding(tmp_path: Path, **world: object) -> Finding:
    found = Findings("a")
    environment.check_settings(found, _share(tmp_path, world=world))
    return found.all[0]


def test_doctor_fails_hostfile_whose_ranks_cannot_reach_each_other(tmp_path: Path) -> None:
    """The finding is the error with which `lockstep up` would refuse the file, and its remedy."""
    hosts = tmp_path / "hosts.json"
    hosts.write_text('[["127.0.0.1:5000"], ["10.0.0.2:5000"]]')

    finding = _settings_finding(tmp_path, size=2, hostfile=str(hosts), backend="ring")

    assert finding.verdict == "FAIL"
    assert "rank 0 on 127.0.0.1 is 127.0.0.1, which the others cannot reach" in finding.detail
    assert finding.remedy == "write its address in their network."


def test_doctor_warns_of_pipeline_over_jaccl(tmp_path: Path) -> None:
    """A setting that is a known risk is a WARN with the reason."""
    finding = _settings_finding(
        tmp_path,
        size=2,
        backend="jaccl",
        jaccl_devices="devices.json",
        jaccl_coordinator="10.0.0.1:9000",
        sharding="pipeline",
        enable_pipeline=True,
    )

    assert finding.verdict == "WARN"
    assert "send and receive over jaccl" in finding.detail


def test_doctor_finds_settings_without_contradiction_ok(tmp_path: Path) -> None:
    """Settings that fit together give one OK."""
    assert _settings_finding(tmp_path, size=1).verdict == "OK"
