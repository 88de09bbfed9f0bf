"""Check of the jobs that start Lockstep at boot: whether they start this installation."""

import plistlib
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.parsers.expat import ExpatError

from services.commands.doctor.facts import Findings

FOLDERS = (Path("/Library/LaunchDaemons"), Path("/etc/systemd/system"))
_START = re.compile(r"^ExecStart=[-@:+!]*\"?([^\s\"]+)\"?[ \t]*\"?([\w-]*)", re.MULTILINE)


def installed_job_files(folders: Iterable[Path] = FOLDERS) -> list[Path]:
    """Return the LaunchDaemons and systemd units of Lockstep in `folders`, found by file name."""
    found: list[Path] = []
    for folder in folders:
        found += sorted(folder.glob("*lockstep*.plist")) + sorted(folder.glob("lockstep*.service"))
    return found


def read_job_command(data: bytes) -> tuple[str, str]:
    """Return the start command of a job's file.

    Args:
        data: content of a LaunchDaemon (property list) or a systemd unit.

    Returns:
        (path of the program, its first argument); "" for each that is missing.
    """
    if b"<plist" in data[:512] or data[:6] == b"bplist":
        try:
            tree = plistlib.loads(data)
        except (ValueError, TypeError, ExpatError, LookupError, OverflowError):
            return "", ""
        words = tree.get("ProgramArguments") if isinstance(tree, dict) else None
        padded: list[object] = [*(words if isinstance(words, list) else []), "", ""]
        first, second, *_ = padded
        return first if isinstance(first, str) else "", second if isinstance(second, str) else ""
    match = _START.search(data.decode(errors="replace"))
    return (match[1], match[2]) if match else ("", "")


def check_jobs(found: Findings, files: Sequence[Path], here: str, flags: str = "") -> None:
    """Check that the program that each installed job starts is the console script `here`.

    A job without a program or with a missing one is a FAIL, one that starts another program than
    `here` is a WARN. Arguments of jobs are not compared.

    Args:
        found: collects one finding per job, and an OK without any job.
        files: files of the jobs, as `installed_job_files` returns them.
        here: path of this installation's console script; links are followed.
        flags: flags with which commands find this host's settings; they only complete the
            command in the remedy.
    """
    for path in files:
        try:
            program, command = read_job_command(path.read_bytes())
        except OSError as error:
            found.cannot_check("jobs", f"{path} cannot be read: {error.strerror}", "run with sudo")
            continue
        kind = "launchd" if path.suffix == ".plist" else "systemd"
        supervised = " --supervised" if command == "up" else ""
        remedy = f"`sudo {shlex.quote(here)} {kind} install{supervised}{flags}` again"
        if not program:
            found.fail("jobs", f"{path} names no program", remedy)
        elif not Path(program).exists():
            found.fail("jobs", f"{path} starts {program}, which does not exist", remedy)
        elif Path(program).resolve() != Path(here).resolve():
            found.warn(
                "jobs", f"{path} starts {program}, which is not this installation ({here})", remedy
            )
        else:
            found.ok("jobs", f"{path} starts {program}")
    if not files:
        found.ok("jobs", "no job is installed: Lockstep is started by hand")
