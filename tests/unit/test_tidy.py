"""Style that no linter knows: sizes, words, docstrings. It fails with the place and the rule."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
LINE_COLUMNS_MAX = 100

_FOLDERS = ("services", "shared", "tools", "tests")
_TEXTS = ("*.md", "*.toml", "*.txt", "Makefile", "docs/*.md", ".ci/run")
_SPEAKS_TO_TERMINALS = (
    "services/cli.py",
    "services/supervisor/",
    "services/bench/",
    "tools/",
    "tests/",
)
_BANNED_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
_BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
# Put together here, so that this file does not hold them itself.
_UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX")) + r")\b")
_MACHINE_PATHS = re.compile(
    "|".join(("/ro" + "ot/", "/wo" + "rk/", "/Us" + "ers/", "/opt/py" + "pi"))
)


def _sources() -> list[Path]:
    return sorted(path for folder in _FOLDERS for path in (ROOT / folder).rglob("*.py"))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(params=_sources(), ids=_name)
def source(request: pytest.FixtureRequest) -> Path:
    """One Python file of the repository."""
    path: Path = request.param
    return path


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_file_is_short(source: Path) -> None:
    """A file holds one idea: at most 400 lines of at most 100 columns."""
    lines = source.read_text(encoding="utf-8").splitlines()

    assert len(lines) <= FILE_LINES_MAX
    assert [n for n, line in enumerate(lines, 1) if len(line) > LINE_COLUMNS_MAX] == []


def test_functions_are_short(source: Path) -> None:
    """A function fits on a screen: at most 60 lines."""
    tree = ast.parse(source.read_text(encoding="utf-8"))

    long = [f"{node.name}: {_lines(node)}" for node in _functions(tree)]

    assert [entry for entry in long if int(entry.rpartition(" ")[2]) > FUNCTION_LINES_MAX] == []


def test_module_says_what_lives_there(source: Path) -> None:
    """Every module begins with a docstring."""
    assert ast.get_docstring(ast.parse(source.read_text(encoding="utf-8")))


def test_tests_state_their_promise(source: Path) -> None:
    """Every test function has a docstring that says what is promised."""
    if not source.name.startswith("test_"):
        return
    tree = ast.parse(source.read_text(encoding="utf-8"))

    silent = [
        node.name
        for node in _functions(tree)
        if node.name.startswith("test_") and not ast.get_docstring(node)
    ]

    assert silent == []


def test_nothing_can_run_foreign_code(source: Path) -> None:
    """No pickle or its kin, no eval, no exec: bytes from elsewhere never become code."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if _root(alias.name) in _BANNED_MODULES]
        elif isinstance(node, ast.ImportFrom) and _root(node.module or "") in _BANNED_MODULES:
            found.append(node.module or "")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found += [node.func.id] if node.func.id in _BANNED_CALLS else []

    assert found == []


def test_only_what_speaks_to_terminals_prints(source: Path) -> None:
    """Services log; only the command line, the supervisor, the bench and tools print."""
    if _name(source).startswith(_SPEAKS_TO_TERMINALS):
        return
    tree = ast.parse(source.read_text(encoding="utf-8"))

    calls = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]

    assert calls == []


def test_no_skipped_tests(source: Path) -> None:
    """A test runs or does not exist; what the machine lacks is decided inside the test."""
    if not _name(source).startswith("tests/"):
        return
    text = source.read_text(encoding="utf-8")

    assert re.search(r"pytest\.(mark\.)?(skip|skipif|xfail|importorskip)\b\(", text) is None


def _root(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize(
    "path",
    sorted({*_sources(), *(path for pattern in _TEXTS for path in ROOT.glob(pattern))}),
    ids=_name,
)
def test_words(path: Path) -> None:
    """Nothing is left unfinished, and no file knows the machine on which it was written."""
    text = path.read_text(encoding="utf-8")

    assert _UNFINISHED.search(text) is None
    assert _MACHINE_PATHS.search(text) is None
