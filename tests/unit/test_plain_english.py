"""Checks that docstrings, comments and documents contain none of a list of banned phrases.

A sentence names its subject, for example "the scheduler", and its object, for example "pending
requests". The banned phrases hide them.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("services", "shared", "tools", "tests")
_DOCUMENTS = ("*.md", "docs/**/*.md", "*.toml", "docs/**/*.toml", "Makefile")
_BANNED = re.compile(
    r"\b(?:who(?:m)?ever|whatever|nobody|somebody|anybody|so (?:many|much|few|long)"
    r"|what (?:is|was|are|were|has|have|had|must|may|can|does|do|did|stands|lies|comes|came|goes"
    r"|went|there|they|it|others|one|else)"
    r"|who (?:is|was|are|were|has|have|had|does|asks|asked|waits|waited|comes|came|goes|left|may"
    r"|must|can|else)"
    r"|(?:is|are|was|were) none|those who|how it is|as it was|is another)\b",
    re.IGNORECASE,
)
_SELF = Path(__file__).resolve()
_NONE = re.compile(r"\b(?:is|are|was|were) None\b")
"""Python's comparison, which looks like a banned phrase."""


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that are prose, with their numbers; no line if none is banned."""
    text = path.read_text(encoding="utf-8")
    if not _BANNED.search(_NONE.sub("", text)):
        return  # few files have such a phrase anywhere, and reading all trees takes long
    if path.suffix != ".py":
        yield from _document_prose(text)
        return
    strings = [
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    for string in strings:
        if isinstance(string.value, str):
            for offset, line in enumerate(string.value.splitlines()):
                yield string.lineno + offset, line
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _document_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a document outside of code blocks, without `code` and "quotations"."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, re.sub(r"`[^`]*`|\"[^\"]*\"", "", line)


def _files() -> list[Path]:
    sources = [path for folder in _FOLDERS for path in (ROOT / folder).rglob("*.py")]
    documents = [path for pattern in _DOCUMENTS for path in ROOT.glob(pattern)]
    return [path for path in [*sources, *documents] if path != _SELF]


def test_docstrings_comments_and_documents_contain_no_banned_phrase() -> None:
    """Docstrings, comments and documents contain no banned phrase."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in _files()
        for number, line in _prose(path)
        if _BANNED.search(line)
    ]

    if found:
        pytest.fail("\n".join(found), pytrace=False)


@pytest.mark.parametrize(
    "sentence",
    ["Whoever asks is answered.", "What is waited for comes.", "Nobody holds it.", "So many rows."],
)
def test_check_of_prose_finds_every_banned_phrase(sentence: str) -> None:
    """The rule sees the phrases that it exists for."""
    assert _BANNED.search(sentence)
