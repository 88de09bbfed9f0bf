"""Commands in child processes: their output, and failures by crash, hang or missing program."""

import sys
import time
from pathlib import Path

from services.commands.doctor.checks import device
from services.commands.doctor.facts import Findings
from services.commands.doctor.system_commands import CommandOutcome, run_command
from tests.chaos.cluster.processes import wait_gone


def _python(program: str, deadline_s: float = 20.0) -> CommandOutcome:
    return run_command([sys.executable, "-c", program], deadline_s)


def test_command_outcome_has_output_error_text_and_exit_code() -> None:
    """Bytes that are no UTF-8 become replacement characters."""
    outcome = _python("import sys; sys.stdout.buffer.write(b'a\\xffb'); sys.exit('no')")

    assert (outcome.text, outcome.code, outcome.ok) == ("a\ufffdb", 1, False)
    assert outcome.why == "it ended with exit code 1 (no)"


def test_command_outcome_names_command_that_is_not_installed() -> None:
    """The reason names the command that is not installed."""
    assert (
        run_command(["lockstep-no-such-tool"], 5.0).why
        == "lockstep-no-such-tool is not on this machine"
    )


def test_doctor_fails_mlx_check_when_its_child_process_crashes() -> None:
    """A segmentation fault in the child, as RDMA libraries have caused, is a finding."""
    outcome = _python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    found = Findings("a")

    device.check_device(found, outcome, "jaccl")

    assert outcome.why == "it was ended by SIGSEGV"
    assert [(one.check, one.verdict) for one in found.all] == [("MLX", "FAIL")]
    assert "SIGSEGV" in found.all[0].detail


def test_doctor_kills_hanging_command_and_its_children_at_deadline(tmp_path: Path) -> None:
    """At the deadline no process of the command is left."""
    pid_file = tmp_path / "pid"
    program = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))\n"
        "time.sleep(60)"
    )
    begin_s = time.monotonic()

    outcome = _python(program, 1.0)

    assert "did not answer within 1 s" in outcome.why
    assert time.monotonic() - begin_s < 40.0
    # On a busy machine the deadline may pass before the child is started.
    children = [int(text) for text in [pid_file.read_text() if pid_file.exists() else ""] if text]
    assert wait_gone(children, 10.0) == []


def test_doctor_kills_command_with_endless_output_before_deadline() -> None:
    """The process is killed when it has printed too much, before the deadline."""
    begin_s = time.monotonic()

    outcome = _python("import sys\nwhile True: sys.stdout.write('x' * 65536)", 60.0)

    assert "printed more than 8,388,608 bytes" in outcome.why
    assert time.monotonic() - begin_s < 40.0


def test_doctor_reads_all_output_when_both_streams_exceed_pipe_buffer() -> None:
    """Output longer than a pipe's buffer is read from both streams."""
    outcome = _python("import sys; sys.stdout.write('a' * 300000); sys.stderr.write('b' * 300000)")

    assert (outcome.text, outcome.errors) == ("a" * 300_000, "b" * 300_000)


def test_doctor_kills_command_at_deadline_after_it_closed_its_output() -> None:
    """A process that closes its output and continues is killed at the deadline."""
    outcome = _python("import os, time; os.close(1); os.close(2); time.sleep(60)", 2.0)

    assert "did not answer within 2 s" in outcome.why


def test_doctor_mlx_check_succeeds_on_this_machine() -> None:
    """The real probe computes with MLX and finds the ring backend."""
    found = Findings("a")

    device.check_device(found, device.run_mlx_probe(run_command), "ring")

    assert {one.check: one.verdict for one in found.all} == {"MLX": "OK", "backend": "OK"}


def test_doctor_names_available_mlx_backends_when_required_one_is_missing() -> None:
    """The remedy is the installation of another extra."""
    found = Findings("a")
    text = '{"right": true, "device": "cpu", "has": {"ring": true, "jaccl": false}}'

    device.check_device(found, CommandOutcome(text), "jaccl")

    assert found.all[-1].detail == "MLX has no jaccl here, only ring"
    assert "`pip install '.[cuda13]'` in the checkout" in found.all[-1].remedy


def test_doctor_fails_device_that_computes_wrong_matrix_product() -> None:
    """A device that computes a wrong product is a fault."""
    found = Findings("a")

    device.check_device(
        found, CommandOutcome('{"right": false, "device": "gpu", "has": {}}'), "ring"
    )

    assert [one.verdict for one in found.all] == ["FAIL"]
