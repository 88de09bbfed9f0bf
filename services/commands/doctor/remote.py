"""Examination of other hosts. Owns the command that runs there, and reads its answer."""

import concurrent.futures
import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence

import msgspec

from services.commands.doctor.comparing import check_clock
from services.commands.doctor.facts import Examination, Findings, HostReport
from services.commands.doctor.system_commands import CommandOutcome, RunCommand, run_command
from shared.clock import unix_seconds
from shared.configuration.inventory import HostEntry
from shared.errors import UsageError

DEFAULT_COMMAND = (
    "ssh -o BatchMode=yes -o ConnectTimeout=10 {ssh} "
    "{executable} doctor --json --alone --inventory {inventory} --host {name}"
)
"""Arguments after the host are interpreted by a shell there, so they are quoted."""
DEADLINE_S = 120.0

_HOME = re.compile(r"~[A-Za-z0-9._-]*(?:/|$)")


@dataclasses.dataclass(frozen=True, slots=True)
class HostAnswer:
    """Answer of another host that was asked to examine itself."""

    report: HostReport | None
    """None: the host has not answered."""
    findings: Findings
    """Findings of the asking host: the host cannot be reached, or its clock differs."""


def command_for(template: str, host: HostEntry, inventory: str) -> list[str]:
    """Return the words of the command that makes another host examine itself.

    Args:
        template: command line like DEFAULT_COMMAND; {name}, {ssh}, {address}, {executable} and
            {inventory} are filled in.
        host: the host to examine.
        inventory: path of the inventory here, used there unless the host names its own.

    Raises:
        UsageError: when the template is malformed or empty.
    """
    word_of = quoted if template == DEFAULT_COMMAND else str
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
            f"--remote is malformed ({error}): it may hold {{{'}, {'.join(values)}}}."
        ) from None
    if not words:
        raise UsageError("--remote is empty: leave it out to use ssh.")
    return words


def ask_all(
    commands: Mapping[str, Sequence[str]], deadline_s: float, runner: RunCommand = run_command
) -> dict[str, HostAnswer]:
    """Run the commands that make other hosts examine themselves, all at once.

    Args:
        commands: name of the host -> its command, from `command_for`.
        deadline_s: seconds that each may take.
        runner: runs a command.

    Returns:
        Name of the host -> its answer.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, len(commands))) as pool:
        answers = pool.map(lambda name: _ask(name, commands[name], deadline_s, runner), commands)
        return dict(zip(commands, answers, strict=True))


def _ask(name: str, command: Sequence[str], deadline_s: float, runner: RunCommand) -> HostAnswer:
    found = Findings(name)
    before_s = float(unix_seconds())
    said = runner(command, deadline_s)
    # This clock is read in whole seconds.
    after_s = float(unix_seconds()) + 1.0
    report = read_answer(said)
    if report is None:
        remedy = f"run this until it works: `{shlex.join(command)}`"
        found.fail("reach", f"{name} cannot be examined: {said.why}", remedy)
        return HostAnswer(None, found)
    check_clock(found, name, report.facts.time_s, before_s, after_s)
    # The inventory's name counts, not the one that the host gives itself.
    facts = msgspec.structs.replace(report.facts, host=name)
    findings = [msgspec.structs.replace(one, host=name) for one in report.findings]
    return HostAnswer(HostReport(facts=facts, findings=findings), found)


def read_answer(said: CommandOutcome) -> HostReport | None:
    """Parse the output of `lockstep doctor --json --alone` on another host.

    Lines that login scripts print before it are skipped, and exit code 1 (a check failed) is
    accepted.

    Returns:
        The host's report; None if the output has none.
    """
    start = said.text.find("{")
    if said.problem or start < 0:
        return None
    try:
        examination = msgspec.json.decode(said.text[start:].encode(), type=Examination)
    except (msgspec.DecodeError, RecursionError):
        return None
    return examination.hosts[0] if len(examination.hosts) == 1 else None


def quoted(path: str) -> str:
    """Quote a path for a shell, except a leading `~/` or `~NAME/`, which the shell expands."""
    home = _HOME.match(path)
    if home is None:
        return shlex.quote(path)
    rest = path[home.end() :]
    return home[0] + (shlex.quote(rest) if rest else "")


def settings_flags(config: str | None, inventory: str | None, host: str) -> str:
    """Return the command-line flags that select these sources of settings, quoted for a shell.

    Args:
        config: path of the configuration file, used without an inventory; None: no file.
        inventory: path of the inventory; None: no inventory.
        host: name of the host in the inventory.

    Returns:
        The flags, with a space before each word; "" without any source.
    """
    if inventory:
        return f" --inventory {quoted(inventory)} --host {shlex.quote(host)}"
    return f" --config {quoted(config)}" if config else ""
