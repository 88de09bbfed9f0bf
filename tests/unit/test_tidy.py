"""Style that no linter knows: sizes, words, docstrings. It fails with the place and the rule."""

import ast
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
LINE_COLUMNS_MAX = 100

_GRAIN = {"Shell", "TimePassed", "WriteLog"}
"""Class names that every room with a shell and a core has."""
_FOLDER_ENTRIES_MAX = {"services/rank_worker": 15, "tests": 14, "tests/unit": 14}
"""Folders that show more than 13 entries, because each is a part of its own."""

_FOLDERS = ("services", "shared", "tools", "tests")
_TEXTS = ("*.md", "*.toml", "*.txt", "Makefile", "docs/*.md", ".ci/run")
_SPEAKS_TO_TERMINALS = (
    "services/commands/main.py",
    "services/supervisor/",
    "services/commands/bench/",
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


@cache
def _sources() -> dict[str, str]:
    """Return the text of each Python file of the repository by its name."""
    paths = sorted(path for folder in _FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {_name(path): path.read_text(encoding="utf-8") for path in paths}


@dataclass(frozen=True)
class Function:
    """A function somewhere in a file."""

    name: str
    place: str
    lines: int
    documented: bool


@dataclass
class Facts:
    """What the rules ask of a file's syntax tree, which is read once and not kept."""

    documented: bool
    functions: list[Function] = field(default_factory=list)
    banned: list[str] = field(default_factory=list)
    prints: list[str] = field(default_factory=list)


@cache
def _facts() -> dict[str, Facts]:
    """Return the facts of each Python file by its name."""
    return {name: _read(name, ast.parse(text)) for name, text in _sources().items()}


def _read(name: str, tree: ast.Module) -> Facts:
    facts = Facts(documented=bool(ast.get_docstring(tree)))
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                facts.functions.append(_function(name, node))
            case ast.Import():
                roots = {_root(alias.name) for alias in node.names}
                facts.banned += [
                    f"{name}:{node.lineno}: {root}" for root in roots & _BANNED_MODULES
                ]
            case ast.ImportFrom() if _root(node.module or "") in _BANNED_MODULES:
                facts.banned.append(f"{name}:{node.lineno}: {node.module}")
            case ast.Call(func=ast.Name(id="print")):
                facts.prints.append(f"{name}:{node.lineno}")
            case ast.Call(func=ast.Name(id=called)) if called in _BANNED_CALLS:
                facts.banned.append(f"{name}:{node.lineno}: {called}")
    return facts


def _function(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
    assert node.end_lineno is not None
    lines = node.end_lineno - node.lineno + 1
    place = f"{name}:{node.lineno}: {node.name}"
    return Function(node.name, place, lines, documented=bool(ast.get_docstring(node)))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _root(module: str) -> str:
    return module.partition(".")[0]


def _none(faults: list[str]) -> None:
    """Fail with all places at which a rule is broken: all can be mended at once."""
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)


def test_source_checks_read_files_of_every_source_folder() -> None:
    """Each folder has files: a rule that reads no file finds no fault."""
    folders = {name.partition("/")[0] for name in _sources()}

    assert folders == set(_FOLDERS)
    assert "tests/unit/test_tidy.py" in _sources()


def test_source_files_have_at_most_400_lines_of_100_columns() -> None:
    """A file holds one idea: at most 400 lines of at most 100 columns."""
    long = []
    for name, text in _sources().items():
        lines = text.splitlines()
        long += [f"{name}: {len(lines)} lines"] if len(lines) > FILE_LINES_MAX else []
        long += [f"{name}:{n}" for n, line in enumerate(lines, 1) if len(line) > LINE_COLUMNS_MAX]

    _none(long)


def test_functions_have_at_most_60_lines() -> None:
    """A function fits on a screen: at most 60 lines."""
    long = [
        f"{function.place} has {function.lines} lines"
        for facts in _facts().values()
        for function in facts.functions
        if function.lines > FUNCTION_LINES_MAX
    ]

    _none(long)


def test_every_module_has_a_docstring() -> None:
    """Every module begins with a docstring."""
    _none([name for name, facts in _facts().items() if not facts.documented])


def test_every_test_function_has_a_docstring() -> None:
    """Every test function has a docstring that states the promise."""
    silent = [
        function.place
        for name, facts in _facts().items()
        if name.rpartition("/")[2].startswith("test_")
        for function in facts.functions
        if function.name.startswith("test_") and not function.documented
    ]

    _none(silent)


def test_sources_contain_no_pickle_eval_or_exec() -> None:
    """No pickle or its kin, no eval, no exec: bytes from elsewhere never become code."""
    _none([place for facts in _facts().values() for place in facts.banned])


def test_services_call_print_only_in_modules_for_terminals() -> None:
    """Services log; only the command line, the supervisor, the bench and tools print."""
    prints = [
        place
        for name, facts in _facts().items()
        if not name.startswith(_SPEAKS_TO_TERMINALS)
        for place in facts.prints
    ]

    _none(prints)


def test_no_test_is_skipped_or_expected_to_fail() -> None:
    """A test runs or does not exist; what the machine lacks is decided inside the test."""
    skipping = re.compile(r"pytest\.(mark\.)?(skip|skipif|xfail|importorskip)\b\(")

    _none(
        [
            name
            for name, text in _sources().items()
            if name.startswith("tests/") and skipping.search(text)
        ]
    )


def test_files_contain_no_todo_marks_and_no_paths_of_developer_machine() -> None:
    """No file has a mark of unfinished work or a path of the machine on which it was written."""
    texts = {_name(path): path for pattern in _TEXTS for path in ROOT.glob(pattern)}
    read = _sources() | {name: path.read_text(encoding="utf-8") for name, path in texts.items()}

    _none([name for name, text in read.items() if _UNFINISHED.search(text)])
    _none([name for name, text in read.items() if _MACHINE_PATHS.search(text)])


def test_public_class_names_differ_between_services() -> None:
    """Each public class name belongs to one service, except the names in `_GRAIN`."""
    owners: dict[str, set[str]] = {}
    for name, text in _sources().items():
        if name.startswith(("services/", "shared/")):
            room = "/".join(name.split("/")[: 2 if name.startswith("services/") else 1])
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    owners.setdefault(node.name, set()).add(room)

    shared = {name: rooms for name, rooms in owners.items() if len(rooms) > 1}
    _none([f"{name}: {sorted(rooms)}" for name, rooms in shared.items() if name not in _GRAIN])


def test_folders_have_at_most_13_entries_and_three_listed_ones_15() -> None:
    """A folder shows at most 13 files and folders at one level; the three folders of a list hold up
    to 15."""
    entries: dict[str, set[str]] = {}
    for name in _sources():
        parts = name.split("/")
        for depth in range(1, len(parts)):
            entries.setdefault("/".join(parts[:depth]), set()).add(parts[depth])
    large = {
        folder: len(children - {"__init__.py"})
        for folder, children in entries.items()
        if len(children - {"__init__.py"}) > _FOLDER_ENTRIES_MAX.get(folder, 13)
    }

    _none([f"{folder}: {count} entries" for folder, count in large.items()])
