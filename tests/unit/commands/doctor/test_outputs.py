"""Commands run in processes of their own: missing, crashing and hanging ones are answers too."""

import sys
import time
from pathlib import Path

from services.commands.doctor.checks import device
from services.commands.doctor.facts import Findings
from services.commands.doctor.system_commands import CommandOutcome, run_command
from tests.chaos.processes import wait_gone


def _python(program: str, deadline_s: float = 20.0) -> CommandOutcome:
    return run_command([sys.executable, "-c", program], deadline_s)


def test_what_a_command_says() -> None:
    """Text, errors and exit code come back; bytes that are no text do no harm."""
    said = _python("import sys; sys.stdout.buffer.write(b'a\\xffb'); sys.exit('no')")

    assert (said.text, said.code, said.ok) == ("a\ufffdb", 1, False)
    assert said.why == "it ended with exit code 1 (no)"


def test_a_missing_command() -> None:
    """It is said by name."""
    assert (
        run_command(["lockstep-no-such-tool"], 5.0).why
        == "lockstep-no-such-tool is not on this machine"
    )


def test_a_crash_stays_in_the_child() -> None:
    """A segmentation fault, as looking for RDMA has caused, is a finding."""
    said = _python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    found = Findings("a")

    device.check_device(found, said, "jaccl")

    assert said.why == "it was ended by SIGSEGV"
    assert [(one.check, one.verdict) for one in found.all] == [("MLX", "FAIL")]
    assert "SIGSEGV" in found.all[0].detail


def test_a_hang_ends_at_the_deadline_with_all_its_children(tmp_path: Path) -> None:
    """Nothing of it is left: a child that it started is gone too."""
    sign = tmp_path / "sign"
    program = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(sign)!r}).write_text(str(child.pid))\n"
        "time.sleep(60)"
    )
    begin_s = time.monotonic()

    said = _python(program, 1.0)

    assert "did not answer within 1 s" in said.why
    assert time.monotonic() - begin_s < 40.0
    # A machine that was held up for all of the deadline has not come as far as the child.
    children = [int(text) for text in [sign.read_text() if sign.exists() else ""] if text]
    assert wait_gone(children, 10.0) == []


def test_a_program_gone_wild_is_ended_early() -> None:
    """What is too much is not kept until the deadline: the process ends there."""
    begin_s = time.monotonic()

    said = _python("import sys\nwhile True: sys.stdout.write('x' * 65536)", 60.0)

    assert "printed more than 8,388,608 bytes" in said.why
    assert time.monotonic() - begin_s < 40.0


def test_both_streams_are_read_to_their_end() -> None:
    """More than a pipe holds, on both, arrives whole."""
    said = _python("import sys; sys.stdout.write('a' * 300000); sys.stderr.write('b' * 300000)")

    assert (said.text, said.errors) == ("a" * 300_000, "b" * 300_000)


def test_streams_closed_do_not_end_the_wait() -> None:
    """A process that has closed its output and stays is held to the deadline."""
    said = _python("import os, time; os.close(1); os.close(2); time.sleep(60)", 2.0)

    assert "did not answer within 2 s" in said.why


def test_mlx_starts_here() -> None:
    """The real child starts the real MLX, computes, and knows that it has the ring."""
    found = Findings("a")

    device.check_device(found, device.run_mlx_probe(run_command), "ring")

    assert {one.check: one.verdict for one in found.all} == {"MLX": "OK", "backend": "OK"}


def test_a_backend_that_is_not_there() -> None:
    """What there is instead is named."""
    found = Findings("a")
    text = '{"right": true, "device": "cpu", "has": {"ring": true, "jaccl": false}}'

    device.check_device(found, CommandOutcome(text), "jaccl")

    assert found.all[-1].detail == "MLX has no jaccl here, only ring"
    assert "`pip install '.[cuda13]'` in the checkout" in found.all[-1].remedy


def test_a_wrong_product_fails() -> None:
    """A device that computes something else is no rank."""
    found = Findings("a")

    device.check_device(
        found, CommandOutcome('{"right": false, "device": "gpu", "has": {}}'), "ring"
    )

    assert [one.verdict for one in found.all] == ["FAIL"]
