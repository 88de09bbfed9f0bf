"""Check that names of hosts have addresses, in a child process: a resolver can take minutes."""

import ipaddress
import json
import sys
from collections.abc import Sequence

from services.commands.doctor.facts import Finding, Findings
from services.commands.doctor.system_commands import RunCommand, run_command

DEADLINE_S = 10.0
_PROGRAM = """
import json, socket, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = socket.getaddrinfo(name, None)[0][4][0]
    except OSError:
        found[name] = ""
print(json.dumps(found))
"""


def check_names(names: Sequence[str], runner: RunCommand = run_command) -> list[Finding]:
    """Check that this host's resolver finds an address for each host name.

    Args:
        names: names of hosts; IP addresses and "" among them are skipped.
        runner: runs the child process that asks the resolver.

    Returns:
        One finding, a WARN if any name has no address; none if there is no name to check.
    """
    wanted = list(dict.fromkeys(name for name in names if name and not _is_address(name)))
    found = Findings("")
    if not wanted:
        return []
    said = runner([sys.executable, "-c", _PROGRAM, *wanted], DEADLINE_S)
    try:
        answers = json.loads(said.text) if said.ok else {}
    except ValueError:
        answers = {}
    unknown = [name for name in wanted if not answers.get(name)]
    if unknown:
        found.warn(
            "host names",
            f"{', '.join(unknown)} have no address ({said.why if not said.ok else 'unknown'})",
            "use a name ending in .local on one network, an entry in /etc/hosts or ~/.ssh/config, "
            "or an IP address",
        )
    else:
        found.ok("host names", f"{', '.join(wanted)} have addresses")
    return found.all


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
