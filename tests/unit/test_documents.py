"""Documents agree with the code: paths, links, flags, settings, metrics, symbols, pages."""

import ast
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from services.commands.cli.flags import GROUPS
from shared.configuration import loading
from tools.write_reference import PAGES

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_CODE = re.compile(r"`([^`\n]+)`")
_HOP = re.compile(r"((?:services|shared|tests|tools)/[\w/]+\.py):([\w.]+)")
_SYMBOL = re.compile(r"(?:[A-Z][a-z0-9]+){2,}")
_CLASS = re.compile(r"^ *class (\w+)", re.MULTILINE)
_MODULE = re.compile(r"(?:services|shared|tests|tools)(?:\.\w+)+")
_FOREIGN_SYMBOLS = {
    "BatchGenerator", "DecodeStream", "LaunchDaemons", "WorkingDirectory", "KeepAlive",
    "ProcessType", "SuccessfulExit", "SoftResourceLimits", "PipelineMixin", "SwitchLinear",
    "QuantizedSwitchLinear",
}  # fmt: skip
"""Names of other projects and systems."""
_FIELD_PAGE = "docs/reference/ignored-fields.md"
"""Page whose dotted names are fields of requests; `test_ignored_fields.py` sends every one."""
_PATH = re.compile(r"`((?:services|shared|tests|tools|docs|models)/[\w/.-]+)`")
_LINK = re.compile(r"\]\(([^)#\s]+)\)")
_VERB = re.compile(r"\bmake ([a-z]+)\b")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_and_link_in_documents_leads_to_existing_file(document: Path) -> None:
    """Files and folders that a document names are there, and so are its relative links."""
    text = document.read_text(encoding="utf-8")
    named = [ROOT / path for path in _PATH.findall(text)]
    links = [link for link in _LINK.findall(text) if "://" not in link]

    missing = [str(path) for path in named if not path.exists()]
    missing += [link for link in links if not (document.parent / link).exists()]

    assert missing == []


def _code_spans() -> list[tuple[str, str]]:
    """Return each `code span` of the documents with its document's name, without code blocks."""
    spans = []
    for document in DOCUMENTS:
        text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
        name = document.relative_to(ROOT).as_posix()
        spans += [(name, span) for span in _CODE.findall(text)]
    return spans


def test_every_code_location_in_documents_exists() -> None:
    """Each `file.py:function` of a document names a definition in that file."""
    missing = []
    for document, span in _code_spans():
        for path, symbol in _HOP.findall(span):
            file = ROOT / path
            if not file.exists() or not _defines(file, symbol):
                missing.append(f"{document}: {path}:{symbol}")

    assert missing == []


def test_every_feature_of_lockstep_names_its_test() -> None:
    """Each row of the feature tables with a yes has a test function, and one with a no has none."""
    page = (ROOT / "docs/reference/features.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    features = [(name, own, test) for name, own, test, *_ in rows if own != "Lockstep"]

    assert len(features) > 40
    assert [name for name, own, _ in features if own not in ("yes", "no")] == []
    named = [name for name, own, test in features if bool(_HOP.search(test)) != (own == "yes")]
    assert named == []


def _defines(file: Path, symbol: str) -> bool:
    """Return whether a file defines `function`, `Class` or `Class.method`."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for part in symbol.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [node for node in body if isinstance(node, kinds) and node.name == part]
        if not found:
            return False
        body = found[0].body
    return True


def test_every_class_and_module_named_in_documents_exists() -> None:
    """Each `ClassName` and each `package.module` of a document is defined in the code."""
    defined = set(_FOREIGN_SYMBOLS)
    modules = set()
    for folder in ("services", "shared", "tests", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            modules |= {dotted.removesuffix(".__init__"), dotted.rpartition(".")[0]}
            defined |= set(_CLASS.findall(path.read_text(encoding="utf-8")))
    missing = []
    for document, span in _code_spans():
        missing += [
            f"{document}: {name}"
            for name in (span,)
            if (_SYMBOL.fullmatch(name) and name not in defined)
            or (_MODULE.fullmatch(name) and name not in modules and document != _FIELD_PAGE)
        ]

    assert missing == []


def test_every_setting_named_in_documents_exists() -> None:
    """Each `section.key` and each LOCKSTEP_ variable of a document is a setting."""
    sections = loading.sections()
    keys = {
        f"{section}.{field.name}"
        for section, struct in sections.items()
        for field in msgspec.structs.fields(struct)
    }
    variables = {f"LOCKSTEP_{key.upper().replace('.', '_')}" for key in keys}
    variables |= {"LOCKSTEP_API_KEY", "LOCKSTEP_API_KEYS", "LOCKSTEP_LIFELINE_FD"}
    pattern = re.compile(rf"({'|'.join(sections)})\.([a-z][a-z0-9_]+)")
    missing = []
    for document, span in _code_spans():
        setting = re.match(rf"{pattern.pattern}(?:$|[ =])", span)
        if setting and f"{setting[1]}.{setting[2]}" not in keys | _NOT_SETTINGS:
            missing.append(f"{document}: {span}")
        missing += [
            f"{document}: {name}"
            for name in re.findall(r"LOCKSTEP_[A-Z][A-Z_]+[A-Z]", span)
            if name not in variables
        ]

    assert missing == []


_NOT_SETTINGS = {"model.safetensors", "cache.py", "gateway.py"}


def test_every_metric_named_in_documents_is_exposed_by_gateway() -> None:
    """Each `lockstep_...` metric of a document is one that the gateway exposes."""
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    exposed = set(re.findall(r"`(lockstep_\w+)`", page))
    missing = [
        f"{document}: {name}"
        for document, span in _code_spans()
        for name in re.findall(r"lockstep_[a-z0-9_]*[a-z0-9]", span)
        if name not in exposed and f"{name}_total" not in exposed
    ]

    assert missing == []


def test_every_lockstep_flag_in_documents_exists() -> None:
    """Each `--flag` after `lockstep` in a document is an option of some command."""
    commands = (ROOT / "services" / "commands").rglob("*.py")
    texts = "\n".join(path.read_text(encoding="utf-8") for path in commands)
    known = set(re.findall(r"--[a-z][a-z0-9-]+", texts)) | {
        f"--{name}" for group in GROUPS.values() for name in group
    }
    missing = [
        f"{document}: {flag}"
        for document, span in _code_spans()
        if span.startswith(("lockstep ", "--"))
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", span)
        if flag not in known
    ]

    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_reference_page_equals_page_generated_from_code(page: Path) -> None:
    """`make generated` would not change a page of the reference."""
    assert page.read_text(encoding="utf-8") == PAGES[page]()


def test_every_make_target_named_in_documents_exists() -> None:
    """Every `make verb` in a document is a target of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    code = "\n".join(
        match
        for path in DOCUMENTS
        for match in re.findall(r"`[^`\n]+`|```.*?```", path.read_text(encoding="utf-8"), re.DOTALL)
    )

    assert set(_VERB.findall(code)) <= targets


def test_architecture_document_explains_every_dependency() -> None:
    """ARCHITECTURE.md says why each package is needed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[\[<>=;\s]", line)[0] for line in needed}
    explained = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("## Dependencies")

    assert {name for name in names if name not in explained[2]} == set()


def test_constraints_file_pins_exact_version_of_every_dependency() -> None:
    """constraints.txt has an exact version of everything that pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[\[<>=;\s]", line)[0] for line in needed}
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = {_normal(name) for name in re.findall(r"^([\w.-]+)==", pins, re.MULTILINE)}

    assert {name for name in names if _normal(name) not in pinned} == set()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
