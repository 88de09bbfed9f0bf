"""Flags of the roles: each overrides a setting, and `lockstep up` hands them to its children."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from services.commands import main
from services.commands.cli import flags
from services.supervisor.children import effective_config
from shared import limits
from shared.configuration.loading import load_config, sections
from tests.unit.commands.command_lines import parse

ROOT = Path(__file__).resolve().parents[4]
ROLES = ["up", "gateway", "scheduler", "rank-worker", "cache-store", "status"]


def _settings(command: str, *arguments: str) -> dict[str, object]:
    return parse([command, *arguments]).overrides


@pytest.mark.parametrize("command", ROLES)
@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (("--distributed-mode", "jaccl"), "world.backend", "jaccl"),
        (("--distributed-strict",), "world.jaccl_fallback", "none"),
        (("--no-distributed-strict",), "world.jaccl_fallback", "ring"),
        (("--distributed-hostfile", "h.json"), "world.hostfile", "h.json"),
        (("--distributed-ibv-devices", "d.json"), "world.jaccl_devices", "d.json"),
        (("--distributed-jaccl-coordinator", "a:1"), "world.jaccl_coordinator", "a:1"),
        (("--distributed-sharding", "pipeline"), "world.sharding", "pipeline"),
        (("--expert-parallel",), "world.sharding", "expert"),
        (("--distributed-sharding", "tensor+expert"), "world.sharding", "tensor+expert"),
        (("--enable-pipeline-distributed",), "world.enable_pipeline", True),
        (("--speculative-method", "eagle"), "speculation.method", "eagle"),
        (("--draft-model", "a/b"), "speculation.draft_model", "a/b"),
    ],
)
def test_flag_of_service_command_overrides_one_setting_and_no_other(
    command: str, arguments: tuple[str, ...], key: str, value: object
) -> None:
    """A flag overrides its setting in the command of every service, and no other setting."""
    assert _settings(command, *arguments) == {key: value}


def test_every_flag_of_service_commands_overrides_an_existing_setting() -> None:
    """Every flag in the groups of flags overrides a setting that exists."""
    known = {f"{name}.{key}" for name, kind in sections().items() for key in kind.__struct_fields__}

    assert {flag.key for group in flags.GROUPS.values() for flag in group.values()} <= known


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("--distributed-mode", "mpi"), limits.EXIT_CONFIG, "auto, off, ring, nccl, jaccl"),
        (("--distributed-sharding", "x"), limits.EXIT_CONFIG, "auto, tensor, expert, tensor"),
        (("--speculative-method", "x"), limits.EXIT_CONFIG, "off, ngram, draft_model, eagle"),
        (
            ("--distributed-sharding", "tensor", "--expert-parallel"),
            limits.EXIT_USAGE,
            "not allowed together with --distributed-sharding",
        ),
        (
            ("--distributed-strict", "--no-distributed-strict"),
            limits.EXIT_USAGE,
            "not allowed together with --distributed-strict",
        ),
        (("--distributed-mode", "off", "--ranks", "2"), limits.EXIT_CONFIG, "world.size is 2"),
        (("--distributed-mode", "jaccl", "--ranks", "2"), limits.EXIT_CONFIG, "it needs"),
        (("--distributed-hostfile", "nowhere.json"), limits.EXIT_CONFIG, "nowhere.json"),
        (("--distributed-sharding", "pipeline"), limits.EXIT_CONFIG, "--enable-pipeline"),
        (("--speculative-method", "eagle"), limits.EXIT_CONFIG, "--draft-model"),
    ],
)
def test_role_with_wrong_flag_exits_with_usage_code_and_one_line_error(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, expected: str
) -> None:
    """The one line of the error names the allowed values or the missing flag."""
    assert main.main(["up", *arguments]) == code

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert expected in captured.err


def test_flags_of_lockstep_up_apply_to_its_child_processes(tmp_path: Path) -> None:
    """The file that children read holds the values of flags and hostfile."""
    hostfile = tmp_path / "hosts.json"
    pair = [
        {"ssh": "a", "ips": ["10.0.0.1"], "rdma": [None, "x"]},
        {"ssh": "b", "ips": ["10.0.0.2"], "rdma": ["x", None]},
    ]
    hostfile.write_text(json.dumps({"backend": "jaccl", "envs": [], "hosts": pair}))
    given = ["--distributed-hostfile", str(hostfile), "--no-distributed-strict"]
    given += ["--expert-parallel", "--speculative-method", "draft_model", "--draft-model", "a/b"]
    merged = load_config(flags=_settings("up", *given))

    files = effective_config.RunFiles(merged, tmp_path)
    files.restore()
    # On a host without the hostfile the children's settings are the same.
    hostfile.unlink()
    read = load_config(str(files.config_file))

    assert structs.replace(read.world, hostfile=str(hostfile)) == merged.world
    assert Path(read.world.hostfile).parent == tmp_path
    assert (read.backend, read.world.size, read.sharding) == ("jaccl", 2, "expert")
    assert (read.world.jaccl_fallback, read.speculation.draft_model) == ("ring", "a/b")


def test_lockstep_up_warns_of_setting_without_effect(tmp_path: Path) -> None:
    """`lockstep up` prints a one-line warning and continues (here to a missing model)."""
    arguments = ["--distributed-mode", "off", "--distributed-hostfile", "h.json", "--model", "./no"]
    done = subprocess.run(
        [sys.executable, "-m", "services.commands.main", "up", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        env={"LOCKSTEP_PATHS_RUN_DIR": str(tmp_path / "run")},
    )  # fmt: skip

    warning, refusal = done.stderr.splitlines()
    assert warning == ("lockstep: warning: world.hostfile has no effect: world.backend is off.")
    assert "./no" in refusal
    assert done.returncode == limits.EXIT_CONFIG


def test_commands_refuse_model_with_lora_adapter_when_there_are_several_ranks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up` refuses the adapter before it starts anything, and so does a single rank worker."""
    monkeypatch.setenv("LOCKSTEP_PATHS_RUN_DIR", str(tmp_path / "run"))
    for name in ("config.json", "adapters.safetensors"):
        (tmp_path / name).write_text("{}")

    for command in ("up", "rank-worker"):
        assert main.main([command, "--ranks", "2", "--model", str(tmp_path)]) == limits.EXIT_CONFIG
        assert "mlx_lm.fuse" in capsys.readouterr().err


def test_help_lists_every_flag_below_a_group_heading(capsys: pytest.CaptureFixture[str]) -> None:
    """Every group has a heading, and every flag stands below one."""
    assert main.main(["up", "--help"]) == limits.EXIT_OK

    text = capsys.readouterr().out
    body = text.partition("Options:")[2]
    for title, group in flags.GROUPS.items():
        assert f"\n{title}:\n" in body
        for name in group:
            assert f"  --{name}" in body
