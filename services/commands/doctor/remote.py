"""The other hosts: each is asked to examine itself, all at once, each with a deadline."""

import concurrent.futures
import dataclasses
import shlex
from collections.abc import Mapping, Sequence

import msgspec

from services.commands.doctor.comparing import check_clock
from services.commands.doctor.facts import Examination, HostReport
from services.commands.doctor.findings import Findings
from services.commands.doctor.outputs import Output, Run, run
from services.commands.doctor.shell import quoted
from shared.clock import unix_seconds
from shared.configuration.inventory import HostEntry
from shared.errors import UsageError

DEFAULT = (
    "ssh -o BatchMode=yes -o ConnectTimeout=10 {ssh} "
    "{executable} doctor --json --alone --inventory {inventory} --host {name}"
)
"""ssh hands everything after the host to a shell there; what others run is their own business."""
DEADLINE_S = 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class HostAnswer:
    """What one host has said."""

    report: HostReport | None
    findings: Findings


def command_for(template: str, host: HostEntry, inventory: str) -> list[str]:
    """Return the command that examines a host.

    Args:
        template: as DEFAULT; {ssh}, {name}, {address}, {executable} and {inventory} are filled in.
        host: which.
        inventory: the inventory's path here, used there unless the host names its own.

    Raises:
        UsageError: the template cannot be read.
    """
    word_of = quoted if template == DEFAULT else str
    values = {
        "name": host.name,
        "ssh": host.ssh or host.address,
        "address": host.address,
        "executable": word_of(host.executable or "lockstep"),
        "inventory": word_of(host.inventory or inventory),
    }
    try:
        words = [word.format(**values) for word in shlex.split(template)]
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        raise UsageError(
            f"--remote is no command ({error}): it may hold {{{'}, {'.join(values)}}}."
        ) from None
    if not words:
        raise UsageError("--remote is empty: leave it away for ssh.")
    return words


def ask_all(
    commands: Mapping[str, Sequence[str]], deadline_s: float, runner: Run = run
) -> dict[str, HostAnswer]:
    """Have every host examine itself.

    Args:
        commands: host -> command.
        deadline_s: how long each may take.
        runner: runs a command.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, len(commands))) as pool:
        waiting = {
            name: pool.submit(_ask, name, command, deadline_s, runner)
            for name, command in commands.items()
        }
        return {name: one.result() for name, one in waiting.items()}


def _ask(name: str, command: Sequence[str], deadline_s: float, runner: Run) -> HostAnswer:
    found = Findings(name)
    before_s = float(unix_seconds())
    said = runner(command, deadline_s)
    # Our own clock is read in whole seconds.
    after_s = float(unix_seconds()) + 1.0
    report = read_answer(said)
    shown = shlex.join(command)
    if report is None:
        found.fail(
            "reach",
            f"{name} does not examine itself: {said.why}",
            f"run this by hand until it works: `{shown}`",
        )
        return HostAnswer(None, found)
    check_clock(found, name, report.facts.time_s, before_s, after_s)
    # Whatever it calls itself, it is the host that we have asked.
    facts = msgspec.structs.replace(report.facts, host=name)
    findings = [msgspec.structs.replace(one, host=name) for one in report.findings]
    return HostAnswer(HostReport(facts=facts, findings=findings), found)


def read_answer(said: Output) -> HostReport | None:
    """Return the report in what a host has written; None: there is none.

    Its exit code is 1 when it has found something; login scripts may have written lines before.
    """
    start = said.text.find("{")
    if said.problem or start < 0:
        return None
    try:
        examination = msgspec.json.decode(said.text[start:].encode(), type=Examination)
    except (msgspec.DecodeError, RecursionError):
        return None
    return examination.hosts[0] if len(examination.hosts) == 1 else None
