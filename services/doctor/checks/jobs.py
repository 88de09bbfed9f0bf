"""Jobs that start Lockstep at boot: are they there, and do they start what is installed now?"""

import plistlib
import re
from collections.abc import Iterable
from pathlib import Path
from xml.parsers.expat import ExpatError

from services.doctor.findings import Findings

FOLDERS = (Path("/Library/LaunchDaemons"), Path("/etc/systemd/system"))
_START = re.compile(r"^ExecStart=[-@:+!]*\"?([^\s\"]+)", re.MULTILINE)


def installed(folders: Iterable[Path] = FOLDERS) -> list[Path]:
    """Return the files of Lockstep's jobs."""
    found: list[Path] = []
    for folder in folders:
        found += sorted(folder.glob("*lockstep*.plist")) + sorted(folder.glob("lockstep*.service"))
    return found


def read_program(data: bytes) -> str:
    """Return the program that a LaunchDaemon or a unit starts; "": it names none."""
    if b"<plist" in data[:512] or data[:6] == b"bplist":
        try:
            tree = plistlib.loads(data)
        except (ValueError, TypeError, ExpatError, LookupError, OverflowError):
            return ""
        words = tree.get("ProgramArguments") if isinstance(tree, dict) else None
        first = words[0] if isinstance(words, list) and words else ""
        return first if isinstance(first, str) else ""
    match = _START.search(data.decode(errors="replace"))
    return match[1] if match else ""


def check_jobs(found: Findings, files: Iterable[Path], here: str) -> None:
    """Check every job.

    Args:
        found: takes the findings.
        files: from `installed`.
        here: the console script of this installation.
    """
    count = 0
    for path in files:
        count += 1
        try:
            program = read_program(path.read_bytes())
        except OSError as error:
            found.unknown("jobs", f"{path} cannot be read: {error.strerror}", "run with sudo")
            continue
        remedy = "`sudo lockstep launchd install` or `sudo lockstep systemd install` again"
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
