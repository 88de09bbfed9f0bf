"""Jobs that start Lockstep at boot: are they there, and do they start what is installed now?"""

import plistlib
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from xml.parsers.expat import ExpatError

from services.commands.doctor.facts import Findings

FOLDERS = (Path("/Library/LaunchDaemons"), Path("/etc/systemd/system"))
_START = re.compile(r"^ExecStart=[-@:+!]*\"?([^\s\"]+)\"?[ \t]*\"?([\w-]*)", re.MULTILINE)


def installed(folders: Iterable[Path] = FOLDERS) -> list[Path]:
    """Return the files of Lockstep's jobs."""
    found: list[Path] = []
    for folder in folders:
        found += sorted(folder.glob("*lockstep*.plist")) + sorted(folder.glob("lockstep*.service"))
    return found


def read_start(data: bytes) -> tuple[str, str]:
    """Return the program that a LaunchDaemon or a unit starts, and its command; "": none."""
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


def check_jobs(found: Findings, files: Iterable[Path], here: str, flags: str = "") -> None:
    """Check every job.

    Args:
        found: takes the findings.
        files: from `installed`.
        here: the console script of this installation.
        flags: what commands need to find the settings of this host.
    """
    count = 0
    for path in files:
        count += 1
        try:
            program, command = read_start(path.read_bytes())
        except OSError as error:
            found.cannot_check("jobs", f"{path} cannot be read: {error.strerror}", "run with sudo")
            continue
        kind = "launchd" if path.suffix == ".plist" else "systemd"
        supervised = " --supervised" if command == "up" else ""
        remedy = f"`sudo {shlex.quote(here)} {kind} install{supervised}{flags}` again"
        if not program:
            found.fail("jobs", f"{path} names no program", remedy)
        elif not Path(program).exists():
            found.fail("jobs", f"{path} starts {program}, which is not there", remedy)
        elif Path(program).resolve() != Path(here).resolve():
            found.warn("jobs", f"{path} starts {program}, and this is {here}", remedy)
        else:
            found.ok("jobs", f"{path} starts {program}")
    if not count:
        found.ok("jobs", "none installed: Lockstep is started by hand")
