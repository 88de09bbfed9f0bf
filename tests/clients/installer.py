"""Commands that install programs for tests: of npm, of Python, of Debian."""

import os
import subprocess
from collections.abc import Sequence

NPM_INSTALL = (
    *("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock"),
    # npm waits up to a minute between attempts, for each package.
    "--fetch-retries=1",
)
"""Runs no script of a package."""
_DEADLINE_S = 600.0


def problem_of(command: Sequence[str]) -> str:
    """Run a command, and return why it failed; "" if it did not."""
    name = " ".join(command[:3])
    try:
        ended = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )
    except subprocess.TimeoutExpired:
        return f"`{name}` took more than {_DEADLINE_S:.0f} s."
    if ended.returncode == 0:
        return ""
    said = (ended.stderr or ended.stdout).strip().splitlines()[-3:]
    return f"`{name}` failed: {' '.join(said)}"
