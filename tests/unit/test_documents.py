"""What the documents point at exists."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_PATH = re.compile(r"`((?:services|shared|tests|tools|docs|models)/[\w/.-]+)`")
_LINK = re.compile(r"\]\(([^)#\s]+)\)")
_VERB = re.compile(r"\bmake ([a-z]+)\b")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_and_links_lead_somewhere(document: Path) -> None:
    """Files and folders that a document names are there, and so are its relative links."""
    text = document.read_text(encoding="utf-8")
    named = [ROOT / path for path in _PATH.findall(text)]
    links = [link for link in _LINK.findall(text) if "://" not in link]

    missing = [str(path) for path in named if not path.exists()]
    missing += [link for link in links if not (document.parent / link).exists()]

    assert missing == []


def test_make_verbs_exist() -> None:
    """Every `make verb` in a document is a target of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    code = "\n".join(
        match
        for path in DOCUMENTS
        for match in re.findall(r"`[^`\n]+`|```.*?```", path.read_text(encoding="utf-8"), re.DOTALL)
    )

    assert set(_VERB.findall(code)) <= targets


def test_every_dependency_is_explained() -> None:
    """ARCHITECTURE.md says why each package is needed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[\[<>=;\s]", line)[0] for line in needed}
    explained = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("## Dependencies")

    assert {name for name in names if name not in explained[2]} == set()


def test_dependencies_are_pinned() -> None:
    """constraints.txt has an exact version of everything that pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[\[<>=;\s]", line)[0] for line in needed}
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = {_normal(name) for name in re.findall(r"^([\w.-]+)==", pins, re.MULTILINE)}

    assert {name for name in names if _normal(name) not in pinned} == set()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
