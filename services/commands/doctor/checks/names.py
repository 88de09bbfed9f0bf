"""Names of hosts must lead to addresses. Asked in a child: a resolver can take minutes."""

import ipaddress
import json
import sys
from collections.abc import Sequence

from services.commands.doctor.facts import Finding, Findings
from services.commands.doctor.outputs import Run, run

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


def check_names(names: Sequence[str], runner: Run = run) -> list[Finding]:
    """Check that each name that is no address is known to this host's resolver."""
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
            f"{', '.join(unknown)} lead to no address ({said.why if not said.ok else 'unknown'})",
            "use a name ending in .local on one network, an entry in /etc/hosts or ~/.ssh/config, "
            "or an IP address",
        )
    else:
        found.ok("host names", f"{', '.join(wanted)} lead to addresses")
    return found.all


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
