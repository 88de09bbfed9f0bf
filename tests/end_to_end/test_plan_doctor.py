"""`lockstep plan` and `lockstep doctor` as processes; two hosts that are two processes here."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from services.commands import host_keys
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


def _run(*words: str) -> "subprocess.CompletedProcess[str]":
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("LOCKSTEP_", "MLX_"))}
    return subprocess.run(
        [*LOCKSTEP, *words],
        cwd=ROOT, env=clean, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def _two_hosts(folder: Path) -> Path:
    """Write an inventory and keys of hosts that allow each other."""
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


def _examine(file: Path, program: list[str], *variables: str) -> list[dict[str, Any]]:
    """Examine both hosts from alpha; return what comparing them has found ill."""
    remote = shlex.join(["env", *variables, *program])
    remote += " doctor --json --alone --inventory {inventory} --host {name}"
    done = _run("doctor", "--json", "--inventory", str(file), "--host", "alpha", "--remote", remote)
    examination = json.loads(done.stdout)
    assert [one["facts"]["host"] for one in examination["hosts"]] == ["alpha", "beta"], done.stderr
    found: list[dict[str, Any]] = examination["findings"]
    return [one for one in found if one["verdict"] != "OK"]


def test_plan_of_this_machine() -> None:
    """The built-in model on this machine: a table, a recommendation, exit code 0, and no MLX."""
    done = _run("plan")
    as_json = json.loads(_run("plan", "--memory", "2x64GB", "--json").stdout)

    assert done.returncode == 0, done.stderr
    assert "Recommended: 1 rank" in done.stdout
    assert as_json["recommendation"]["ranks"] == 2
    assert [one["sharding"] for one in as_json["options"]] == [
        "none", "tensor", "expert", "pipeline",
    ]  # fmt: skip


def test_what_plan_recommends_is_a_command_line() -> None:
    """The flags that it prints are flags of `lockstep up`."""
    plan = json.loads(_run("plan", "--ranks", "2", "--device", "cpu", "--json").stdout)

    done = _run("up", "--dry-run", *plan["recommendation"]["flags"])

    assert done.returncode == 0, done.stderr
    assert "rank-worker" in done.stdout


def test_doctor_of_this_machine() -> None:
    """Every check has a verdict; MLX has really started; what only Macs have is unknown."""
    done = _run("doctor", "--json")

    (report,) = json.loads(done.stdout)["hosts"]
    by_check = {one["check"]: one["verdict"] for one in report["findings"]}
    assert by_check["MLX"] == "OK"
    assert by_check["model"] == "OK"
    assert done.returncode == (1 if "FAIL" in by_check.values() else 0)
    if sys.platform == "linux":
        assert by_check["rdma"] == by_check["sleep"] == "CANNOT CHECK"


def test_two_hosts_that_are_alike(tmp_path: Path) -> None:
    """Two processes alike, with keys that allow each other: nothing to complain about."""
    file = _two_hosts(tmp_path)

    assert _examine(file, LOCKSTEP) == []


def test_planted_differences_are_found(tmp_path: Path) -> None:
    """Another MLX, another variable and a key that nobody has allowed: three findings, no more."""
    file = _two_hosts(tmp_path)
    program = tmp_path / "other_version.py"
    program.write_text(OTHER_VERSION.format(root=str(ROOT)))
    host_keys.new(tmp_path / "beta", force=True)

    found = _examine(file, [sys.executable, str(program)], "MLX_BFS_MAX_WIDTH=7")

    said = {one["check"]: one["cause"] for one in found if one["verdict"] == "FAIL"}
    assert set(said) == {"version of mlx", "environment", "keys"}
    assert "9.9.9 on beta" in said["version of mlx"]
    assert "MLX_BFS_MAX_WIDTH is none on alpha, 7 on beta" in said["environment"]
    assert "alpha does not allow beta, which needs rank" in said["keys"]
    remedy = next(one["remedy"] for one in found if one["check"] == "keys")
    public = keys.read_public(tmp_path / "beta")
    assert f"--host alpha --role rank -- '{public}' beta" in remedy

    words = shlex.split(remedy.partition("`")[2].partition("`")[0])
    host_keys.remove(tmp_path / "alpha", "beta")
    assert main(words[1:]) == 0
    assert public in keys.read_allowed(tmp_path / "alpha")


def test_a_host_that_cannot_be_reached(tmp_path: Path) -> None:
    """Exit code 1, the host by name, and the very command that failed."""
    file = _two_hosts(tmp_path)

    done = _run(
        "doctor", "--inventory", str(file), "--host", "alpha",
        "--remote", f"{sys.executable} -c 'raise SystemExit(255)' {{name}}",
    )  # fmt: skip

    assert done.returncode == 1
    assert "beta cannot be examined: it ended with exit code 255" in done.stdout
    assert "SystemExit(255)" in done.stdout
