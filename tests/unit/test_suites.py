"""`make test` runs every test there is: no suite and no mark is forgotten in the Makefile."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _variable(name: str) -> str:
    """Return what the Makefile gives to a variable, continuation lines too."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.search(rf"^{name} := (.*)$", text, re.MULTILINE)
    assert found, name
    return found[1]


def test_makefile_runs_every_folder_of_tests() -> None:
    """Each folder of tests is in a group, or beside the groups, or all of its tests run alone."""
    suites = {
        path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")
    }
    grouped = set(re.findall(r"[a-z_]{3,}", re.sub(r"\$\(\w+\)", "", _variable("TEST_GROUPS"))))
    beside = set(_variable("BESIDE").split())
    assert not grouped & beside
    grouped |= beside

    assert grouped | set(_variable("ALONE").split()) == suites
    for suite in suites - grouped:
        files = sorted((ROOT / "tests" / suite).rglob("test_*.py"))
        assert all("pytestmark = pytest.mark.alone\n" in file.read_text() for file in files)


def test_makefile_runs_every_folder_whose_tests_have_the_alone_mark() -> None:
    """The mark `alone` occurs only in folders that the Makefile searches for it."""
    mark = "pytest.mark." + "alone"
    marked = {
        path.relative_to(ROOT / "tests").parts[0]
        for path in (ROOT / "tests").rglob("test_*.py")
        if mark in path.read_text(encoding="utf-8") and path != Path(__file__)
    }

    assert marked == set(_variable("ALONE").split())
    assert not marked & set(_variable("BESIDE").split())
