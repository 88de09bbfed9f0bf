"""Installation of the real clients from their registries, into a folder that git ignores.

Run by `make clients`, which needs all of them, and by `make proofs`, which runs those that are
there. Owns which programs there are and why others are missing; no script of a package is run, and
no client fetches anything itself.
"""

import shutil
import sys
from pathlib import Path

from tests.clients.agents.catalog import AGENTS, Agent
from tests.clients.agents.isolation import namespaces
from tests.clients.installer import NPM_INSTALL, problem_of
from tests.support.captured_process import ROOT

FOLDER = ROOT / "build" / "clients"
PROGRAMS = FOLDER / "bin"
"""Where each program is found under its own name."""
TRANSCRIPTS = FOLDER / "transcripts"
PYTHON = FOLDER / "python" / "bin" / "python"
"""Interpreter with the clients of Python."""
_PACKAGES = Path(__file__).with_name("package.json")
_PYTHON_PACKAGES = Path(__file__).with_name("requirements.txt")


def missing_requirement(agent: Agent) -> str:
    """Return why a client cannot be run here; "" if it can."""
    if not (PROGRAMS / agent.program).exists():
        return "not installed: `make clients` does it, with npm, Python and their registries"
    return namespaces.missing_requirement()


def install() -> list[str]:
    """Install the missing packages; return one line per failure, with its reason."""
    problems = [_install_npm_packages(), _install_python_packages()]
    PROGRAMS.mkdir(parents=True, exist_ok=True)
    for agent in AGENTS:
        found = next((one for glob in agent.binaries for one in sorted(FOLDER.glob(glob))), None)
        link = PROGRAMS / agent.program
        link.unlink(missing_ok=True)
        if found is not None:
            link.symlink_to(found)
    return [problem for problem in problems if problem]


def _install_npm_packages() -> str:
    wanted = _PACKAGES.read_text()
    installed = FOLDER / "installed.json"
    if installed.exists() and installed.read_text() == wanted:
        return ""
    if shutil.which("npm") is None:
        return "The clients of npm are not installed: there is no `npm`."
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "package.json").write_text(wanted)
    problem = problem_of([*NPM_INSTALL, "--prefix", str(FOLDER)])
    if not problem:
        installed.write_text(wanted)
    return problem


def _install_python_packages() -> str:
    wanted = _PYTHON_PACKAGES.read_text()
    environment = FOLDER / "python"
    installed = environment / "installed.txt"
    if installed.exists() and installed.read_text() == wanted:
        return ""
    python = environment / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    problem = problem_of([sys.executable, "-m", "venv", "--clear", str(environment)]) or problem_of(
        [*pip, "--requirement", str(_PYTHON_PACKAGES)]
    )
    if not problem:
        installed.write_text(wanted)
    return problem


def main(arguments: list[str]) -> int:
    """Install the clients, name the missing ones, and return the exit code.

    Args:
        arguments: `--all`: a missing client is an error.
    """
    problems = install()
    missing = [
        f"MISSING: {agent.program} ({reason})"
        for agent in AGENTS
        if (reason := missing_requirement(agent))
    ]
    for line in [*problems, *missing]:
        print(line)
    return 1 if missing and "--all" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
