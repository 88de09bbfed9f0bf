"""Installation of a browser and of the accessibility check, into a folder that git ignores.

Run by `make page`, which needs both, and by `make proofs`, which runs the browser's tests if both
are there. Chromium and its driver come from Debian's packages, axe-core from npm.
"""

import os
import shutil
import sys
from pathlib import Path

from tests.clients.installer import NPM_INSTALL, problem_of
from tests.support.captured_process import ROOT

FOLDER = ROOT / "build" / "page"
AXE = FOLDER / "node_modules" / "axe-core" / "axe.min.js"
_PACKAGES = Path(__file__).with_name("package.json")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def browser() -> str | None:
    """Return the path of the browser, None without one."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


def driver() -> str | None:
    """Return the path of the browser's driver, None without one."""
    return shutil.which("chromedriver")


def missing_requirement() -> str:
    """Return why the page cannot be tested here; "" if it can."""
    if browser() is None or driver() is None:
        return "Chromium and its driver are not installed: apt install chromium chromium-driver"
    if not AXE.exists():
        return "axe-core is not installed: `make page` does it, with npm and its registry"
    return ""


def install() -> list[str]:
    """Install the missing packages; return one line per failure, with its reason."""
    problems = []
    if browser() is None or driver() is None:
        problems.append(_install_browser())
    if not AXE.exists():
        problems.append(_install_axe())
    return [problem for problem in problems if problem]


def _install_browser() -> str:
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return "Chromium is not installed: only root can do it, with Debian's apt-get."
    install = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends"]
    packages = ["chromium", "chromium-driver", "fonts-dejavu-core"]
    return problem_of(["apt-get", "update", "--quiet"]) or problem_of([*install, *packages])


def _install_axe() -> str:
    if shutil.which("npm") is None:
        return "axe-core is not installed: there is no `npm`."
    FOLDER.mkdir(parents=True, exist_ok=True)
    shutil.copy(_PACKAGES, FOLDER / "package.json")
    return problem_of([*NPM_INSTALL, "--prefix", str(FOLDER)])


def main(arguments: list[str]) -> int:
    """Install browser and check, say if one is missing, and return the exit code.

    Args:
        arguments: `--all`: a missing one is an error.
    """
    for line in install():
        print(line)
    missing = missing_requirement()
    if missing:
        print(f"MISSING: {missing}")
    return 1 if missing and "--all" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
