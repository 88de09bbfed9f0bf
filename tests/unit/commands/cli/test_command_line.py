"""Exit codes and one-line errors of the console script, and the imports of each service."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.commands import main
from services.commands.checks.check_results import EXIT_FAILED
from shared import limits
from shared.configuration.settings import SpeculationConfig
from tests.unit.commands.command_lines import parse, run

ROOT = Path(__file__).resolve().parents[4]

_VERIFY = "verify --port 9"
"""No gateway listens on this port."""


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ((), limits.EXIT_USAGE, "Missing command"),
        (("fly",), limits.EXIT_USAGE, "'fly'"),
        (("up", "--prot", "1"), limits.EXIT_USAGE, "--prot"),
        (("rank-worker", "--rank", "first"), limits.EXIT_USAGE, "--rank"),
        (("up", "--port", "0"), limits.EXIT_CONFIG, "gateway.port"),
        (("up", "--port", "http"), limits.EXIT_CONFIG, "gateway.port"),
        (("up", "--ranks", "1000"), limits.EXIT_CONFIG, "world.size"),
        (("up", "--config", "nowhere.toml"), limits.EXIT_CONFIG, "nowhere.toml"),
        (("up", "--model", "./nowhere"), limits.EXIT_CONFIG, "./nowhere"),
        (("scheduler", "--ranks", "-1"), limits.EXIT_CONFIG, "world.size"),
        (("up", "--speculative-method", "medusa"), limits.EXIT_CONFIG, "speculation.method"),
        (("up", "--num-speculative-tokens", "17"), limits.EXIT_CONFIG, "speculation.tokens_max"),
        (("up", "--num-speculative-tokens", "0"), limits.EXIT_CONFIG, "speculation.tokens_max"),
        (("up", "--num-speculative-tokens", "few"), limits.EXIT_CONFIG, "speculation.tokens_max"),
        (("up", "--num-speculative-tokens"), limits.EXIT_USAGE, "--num-speculative-tokens"),
        (
            ("rank-worker", "--speculative-disable-batch-size", "-1"),
            limits.EXIT_CONFIG,
            "speculation.disable_above_sequences",
        ),
        (("restart",), limits.EXIT_USAGE, "ROLE"),
        (("restart", "galaxy"), limits.EXIT_USAGE, "'galaxy'"),
        (("restart", "rank"), limits.EXIT_USAGE, "restart rank 0"),
        (("restart", "rank", "first"), limits.EXIT_USAGE, "'first'"),
        (("restart", "gateway", "1"), limits.EXIT_USAGE, "restart gateway"),
        (("drain", "--wait", "soon"), limits.EXIT_USAGE, "'soon'"),
        (("drain", "--wait", "-1"), limits.EXIT_USAGE, "'-1'"),
        (("drain", "--wait", "inf"), limits.EXIT_USAGE, "'inf'"),
        (("cache",), limits.EXIT_USAGE, "Missing command"),
        (("cache", "burn"), limits.EXIT_USAGE, "'burn'"),
        (("cache", "stats", "--namespace", "ab"), limits.EXIT_USAGE, "--namespace"),
        (("cache", "list", "--namespace", "../x"), limits.EXIT_USAGE, "hexadecimal"),
    ],
)
def test_wrong_command_line_exits_with_documented_code_and_one_line_error(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, expected: str
) -> None:
    """The exit code tells the kind of mistake, and the one line names the flag or setting."""
    found, out, err = run(capsys, *arguments)

    assert found == code
    assert out == ""
    assert err.startswith("lockstep: ")
    assert expected in err
    assert err.count("\n") == 1


def test_status_command_exits_with_69_when_no_scheduler_answers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When no scheduler answers until the deadline, the exit code is 69 and the error has a
    remedy."""
    monkeypatch.setenv("LOCKSTEP_PATHS_RUN_DIR", str(tmp_path))

    code, _, err = run(capsys, "status")

    assert code == limits.EXIT_UNAVAILABLE
    assert "lockstep up" in err


def test_version_and_help_flags_print_text_and_exit_with_0(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`--version` and `--help` print their text and exit with 0."""
    for arguments, expected in ((["--version"], "lockstep "), (["up", "--help"], "--ranks N")):
        assert main.main(arguments) == limits.EXIT_OK
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("lockstep be", "bench"),
        ("lockstep bench ov", "overhead"),
        ("lockstep bench cache --parts replay,d", "replay,decode"),
    ],
)
def test_shell_completion_offers_benchmark_names_and_their_options(
    words: str, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Completion covers `lockstep bench` as it covers every other command."""
    monkeypatch.setenv("_LOCKSTEP_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))

    code, out, _ = run(capsys)

    assert code == limits.EXIT_OK
    assert f"plain,{expected}" in out.splitlines()


@pytest.mark.parametrize(
    "command",
    [
        *("up", "gateway", "scheduler", "rank-worker", "cache-store"),
        *("cache list", "status", "restart ranks", "drain"),
    ],
)
def test_every_command_accepts_the_common_setting_flags(command: str) -> None:
    """All roles and operator commands accept the same flags."""
    options = parse(
        [
            *command.split(),
            "--model",
            "m",
            "--ranks",
            "2",
            "--host",
            "::1",
            "--port",
            "9",
            "--config",
            "f",
        ]
    ).options

    assert [options[name] for name in ("model", "ranks", "host", "port")] == ["m", "2", "::1", "9"]


@pytest.mark.parametrize("command", ["up", "scheduler", "rank-worker"])
def test_speculation_flags_override_values_of_configuration_file(
    command: str, tmp_path: Path
) -> None:
    """Flags override the file; settings without a flag keep the file's value."""
    file = tmp_path / "lockstep.toml"
    file.write_text('[speculation]\nmethod = "off"\ntokens_max = 3\ndisable_above_sequences = 4\n')
    flags = ["--speculative-method", "ngram", "--speculative-disable-batch-size", "0"]

    config = parse([command, "--config", str(file), *flags]).sources.share().config

    assert config.speculation == SpeculationConfig(
        method="ngram", tokens_max=3, disable_above_sequences=0
    )
    sources = parse([command, *flags, "--num-speculative-tokens", "16"]).sources
    assert sources.share().config.speculation.tokens_max == 16


@pytest.mark.parametrize("service", ["gateway", "scheduler", "cache_store", "supervisor"])
def test_service_other_than_rank_worker_imports_no_mlx(service: str) -> None:
    """Only the rank worker imports MLX; the other services start where it is not installed."""
    script = (
        f"import sys, json, services.commands.roles, services.{service}.main; "
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, timeout=60
    )

    loaded = set(json.loads(done.stdout))
    assert not loaded & {"mlx", "mlx_lm"}
    if service != "gateway":
        assert not loaded & {"aiohttp", "transformers", "tokenizers", "numpy"}


def test_command_prints_no_traceback_when_output_pipe_closes(tmp_path: Path) -> None:
    """`lockstep ... | head -1` ends without a traceback."""
    done = subprocess.run(
        f"'{sys.executable}' -m services.commands.main --help | true; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip

    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "line", ["plan --model models/demo", "--version", "plan --help", "bench --help", _VERIFY]
)
def test_command_exits_with_output_error_code_when_output_cannot_be_written(
    tmp_path: Path, line: str, unbuffered: str
) -> None:
    """A command that cannot write its output, as on a full disk, reports it and fails."""
    done = subprocess.run(
        f"ulimit -f 0; '{sys.executable}' -m services.commands.main {line} > '{tmp_path}/output'",
        shell=True, executable="/bin/bash", cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False, env={**os.environ, "PYTHONUNBUFFERED": unbuffered,
                          "LOCKSTEP_PATHS_RUN_DIR": str(tmp_path)},
    )  # fmt: skip

    assert done.returncode == limits.EXIT_OUTPUT
    assert done.stderr.endswith(": Cannot write to standard output: File too large.\n")
    assert done.stderr.startswith("lockstep")
    assert done.stderr.count("\n") == 1


def test_failed_verify_keeps_its_exit_code_when_output_pipe_closes(tmp_path: Path) -> None:
    """`lockstep verify | head -1` keeps the exit code of a FAIL when no gateway answers."""
    done = subprocess.run(
        f"'{sys.executable}' -m services.commands.main {_VERIFY} | true; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False, env={**os.environ, "LOCKSTEP_PATHS_RUN_DIR": str(tmp_path)},
    )  # fmt: skip

    assert done.returncode == EXIT_FAILED
    assert "Traceback" not in done.stderr
