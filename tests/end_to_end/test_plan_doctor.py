"""`lockstep plan` and `lockstep doctor` as processes, with two processes in place of two hosts."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from services.commands.keys import host_keys
from services.commands.main import main
from shared.transport import keys

ROOT = Path(__file__).resolve().parents[2]
LOCKSTEP = [sys.executable, "-m", "services.commands.main"]

INVENTORY = """
[model]
path = "demo"
[cache]
ssd = false
[[hosts]]
name = "alpha"
address = "192.0.2.1"
data_address = "192.0.2.11"
roles = ["gateway", "scheduler"]
ranks = 1
keys_dir = "{folder}/alpha"
run_dir = "{folder}/run-alpha"
[[hosts]]
name = "beta"
address = "192.0.2.2"
data_address = "192.0.2.12"
ranks = 1
keys_dir = "{folder}/beta"
run_dir = "{folder}/run-beta"
"""

OTHER_VERSION = """
import importlib.metadata as metadata, sys
sys.path.insert(0, {root!r})
real = metadata.version
metadata.version = lambda name: "9.9.9" if name == "mlx" else real(name)
from services.commands.main import main
sys.exit(main(sys.argv[1:]))
"""


def _run_lockstep(*arguments: str) -> "subprocess.CompletedProcess[str]":
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("LOCKSTEP_", "MLX_"))}
    return subprocess.run(
        [*LOCKSTEP, *arguments],
        cwd=ROOT, env=clean, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def _write_two_hosts(folder: Path) -> Path:
    """Write an inventory and keys of two hosts that allow each other; return the inventory file."""
    roles = {"alpha": ["rank", "gateway"], "beta": ["scheduler"]}
    for name in roles:
        host_keys.new(folder / name)
    for name, allowed in roles.items():
        peer = "beta" if name == "alpha" else "alpha"
        public = keys.read_public(folder / peer)
        assert public is not None
        host_keys.allow(folder / name, public, peer, allowed)
    file = folder / "hosts.toml"
    file.write_text(INVENTORY.format(folder=folder))
    return file


def _problems_found_by_doctor(
    file: Path, program: list[str], *variables: str
) -> list[dict[str, Any]]:
    """Examine both hosts from alpha; return the findings of their comparison that are not OK."""
    remote = shlex.join(["env", *variables, *program])
    remote += " doctor --json --alone --inventory {inventory} --host {name}"
    done = _run_lockstep(
        "doctor", "--json", "--inventory", str(file), "--host", "alpha", "--remote", remote
    )
    examination = json.loads(done.stdout)
    assert [one["facts"]["host"] for one in examination["hosts"]] == ["alpha", "beta"], done.stderr
    found: list[dict[str, Any]] = examination["findings"]
    return [one for one in found if one["verdict"] != "OK"]


def test_plan_command_recommends_number_of_ranks_for_this_machine() -> None:
    """The built-in model gets a table and a recommendation; a memory list changes the
    recommendation."""
    done = _run_lockstep("plan")
    as_json = json.loads(_run_lockstep("plan", "--memory", "2x64GB", "--json").stdout)

    assert done.returncode == 0, done.stderr
    assert "Recommended: 1 rank" in done.stdout
    assert as_json["recommendation"]["ranks"] == 2
    assert [one["sharding"] for one in as_json["options"]] == [
        "none", "tensor", "expert", "tensor+expert", "pipeline",
    ]  # fmt: skip


def test_lockstep_up_accepts_flags_that_plan_recommends() -> None:
    """`lockstep up --dry-run` accepts the flags of a recommendation."""
    plan = json.loads(_run_lockstep("plan", "--ranks", "2", "--device", "cpu", "--json").stdout)

    done = _run_lockstep("up", "--dry-run", *plan["recommendation"]["flags"])

    assert done.returncode == 0, done.stderr
    assert "rank-worker" in done.stdout


def test_doctor_gives_verdict_for_every_check_of_this_machine() -> None:
    """Every check has a verdict: MLX starts, and checks that need a Mac cannot run on Linux."""
    done = _run_lockstep("doctor", "--json")

    (report,) = json.loads(done.stdout)["hosts"]
    by_check = {one["check"]: one["verdict"] for one in report["findings"]}
    assert by_check["MLX"] == "OK"
    assert by_check["model"] == "OK"
    assert done.returncode == (1 if "FAIL" in by_check.values() else 0)
    if sys.platform == "linux":
        assert by_check["rdma"] == by_check["sleep"] == "CANNOT CHECK"


def test_doctor_reports_no_problem_between_equal_hosts(tmp_path: Path) -> None:
    """Two equal hosts whose keys allow each other have no findings."""
    file = _write_two_hosts(tmp_path)

    assert _problems_found_by_doctor(file, LOCKSTEP) == []


def test_doctor_reports_exactly_the_planted_differences_between_hosts(tmp_path: Path) -> None:
    """Another MLX version, another variable and a key that is not allowed give exactly three
    findings."""
    file = _write_two_hosts(tmp_path)
    program = tmp_path / "other_version.py"
    program.write_text(OTHER_VERSION.format(root=str(ROOT)))
    host_keys.new(tmp_path / "beta", force=True)

    found = _problems_found_by_doctor(file, [sys.executable, str(program)], "MLX_BFS_MAX_WIDTH=7")

    causes = {one["check"]: one["cause"] for one in found if one["verdict"] == "FAIL"}
    assert set(causes) == {"version of mlx", "environment", "keys"}
    assert "9.9.9 on beta" in causes["version of mlx"]
    assert "MLX_BFS_MAX_WIDTH is none on alpha, 7 on beta" in causes["environment"]
    assert "alpha does not allow beta, which needs rank" in causes["keys"]
    remedy = next(one["remedy"] for one in found if one["check"] == "keys")
    public = keys.read_public(tmp_path / "beta")
    assert f"--host alpha --role rank -- '{public}' beta" in remedy

    command = shlex.split(remedy.partition("`")[2].partition("`")[0])
    host_keys.remove(tmp_path / "alpha", "beta")
    assert main(command[1:]) == 0
    assert public in keys.read_allowed(tmp_path / "alpha")


def test_doctor_names_unreachable_host_and_failed_command(tmp_path: Path) -> None:
    """The exit code is 1, and the output names the host and the command that failed."""
    file = _write_two_hosts(tmp_path)

    done = _run_lockstep(
        "doctor", "--inventory", str(file), "--host", "alpha",
        "--remote", f"{sys.executable} -c 'raise SystemExit(255)' {{name}}",
    )  # fmt: skip

    assert done.returncode == 1
    assert "beta cannot be examined: it ended with exit code 255" in done.stdout
    assert "SystemExit(255)" in done.stdout
