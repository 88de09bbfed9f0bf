"""Nothing that a stranger sends becomes code, and nothing is fetched because a stranger says so.

A gate over the syntax trees of all services: what could run bytes from elsewhere or open a URL is
found however it is imported, and is allowed in named files only.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]

# Modules that make objects or code of bytes, or that fetch.
_MODULES = {
    "pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "multiprocessing", "copyreg",
    "code", "codeop", "runpy", "imp", "yaml", "torch", "xmlrpc", "builtins", "ctypes", "cffi",
    "urllib.request", "http.client", "ftplib", "smtplib", "telnetlib", "imaplib", "poplib",
    "nntplib", "requests", "httpx", "urllib3", "openai", "huggingface_hub", "importlib.util",
    "importlib.machinery", "importlib.import_module", "aiohttp.ClientSession", "aiohttp.client",
    "os.system", "os.popen", "subprocess.getoutput",
}  # fmt: skip
# Their use is found wherever they stand: called, passed on, or asked for by `getattr`.
_NAMES = {"eval", "exec", "compile", "__import__", "breakpoint", "__builtins__"}
_ATTRIBUTES = {
    "ClientSession", "urlopen", "import_module", "exec_module", "run_path", "run_module",
    "__globals__", "__subclasses__", "__builtins__", "__reduce__", "create_subprocess_shell",
}  # fmt: skip
_KEYWORDS = {"allow_pickle", "shell"}

# File or folder: what it may, and why.
_ALLOWED = {
    # The bench measures servers that it has started, and asks them over HTTP.
    "services/commands/bench/": {"http.client"},
    # `lockstep up` asks its own gateway whether it is ready.
    "services/supervisor/status/gateway_probe.py": {"http.client"},
    # Loads a BLAS library that is installed as a package before MLX does.
    "services/rank_worker/device/blas.py": {"ctypes", "importlib.util"},
    # Asks CUDA's driver for page-locked memory, and views it.
    "services/rank_worker/kv_cache/blocks/host_copier.py": {"ctypes"},
    # The progress of downloads.
    "services/rank_worker/model/download.py": {"huggingface_hub"},
    # Asks the kernel to end this process with its parent; one call with constants.
    "shared/os/lifeline.py": {"ctypes"},
    # Finds where mlx-lm's source lies, to read it as text.
    "shared/model/sharding/families.py": {"importlib.util"},
    # Looks what of a model has been downloaded; asks nobody.
    "services/commands/planning/local_model.py": {"huggingface_hub"},
    # `lockstep verify` asks the gateway that the operator has named.
    "services/commands/verify/gateway.py": {"http.client"},
    # Downloads the model that the operator has named.
    "shared/model/hub.py": {"huggingface_hub"},
}


def _found(tree: ast.AST) -> Iterator[str]:
    """Yield the name of each forbidden thing in a syntax tree."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                for alias in node.names:
                    yield from _forbidden(alias.name)
            case ast.ImportFrom():
                for alias in node.names:
                    yield from _forbidden(f"{node.module}.{alias.name}")
                    yield from {alias.name} & _ATTRIBUTES
            case ast.Name():
                yield from {node.id} & _NAMES
            case ast.Attribute():
                # `mx.eval` and `re.compile` run no text; what is meant by these names is built in.
                yield from {node.attr} & _ATTRIBUTES
                yield from {ast.unparse(node)} & _MODULES
            case ast.keyword(arg=str(name)) if not _is_false(node.value):
                yield from {name} & _KEYWORDS
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                yield from {name} & (_ATTRIBUTES | _NAMES)


def _forbidden(module: str) -> set[str]:
    parts = module.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts) + 1)} & _MODULES


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _allowed(name: str) -> set[str]:
    return {what for place, whats in _ALLOWED.items() if name.startswith(place) for what in whats}


@cache
def _found_in_sources() -> dict[str, set[str]]:
    """Return what is found in each file, by its name."""
    paths = (path for folder in ("services", "shared") for path in (ROOT / folder).rglob("*.py"))
    return {
        path.relative_to(ROOT).as_posix(): set(_found(ast.parse(path.read_text(encoding="utf-8"))))
        for path in sorted(paths)
    }


def test_no_file_runs_or_fetches_what_others_send() -> None:
    """No pickle, eval, exec, marshal, URL: but for what is named above with its reason."""
    found = _found_in_sources()

    assert {name.partition("/")[0] for name in found} == {"services", "shared"}
    for name, whats in found.items():
        assert whats - _allowed(name) == set(), name


def test_no_allowance_is_left_over() -> None:
    """What is allowed above is used: an allowance that nobody needs is a hole."""
    used: dict[str, set[str]] = {place: set() for place in _ALLOWED}
    for name, found in _found_in_sources().items():
        for place in _ALLOWED:
            if name.startswith(place):
                used[place] |= found

    assert {place: whats - used[place] for place, whats in _ALLOWED.items()} == {
        place: set() for place in _ALLOWED
    }


@pytest.mark.parametrize(
    "breach",
    [
        "import pickle",
        "import os, marshal as m",
        "from dill import loads",
        "from multiprocessing import Queue",
        "def f():\n    import shelve",
        "eval(text)",
        "run = eval",
        "[exec][0](text)",
        "getattr(thing, '__globals__')",
        "getattr(thing, 'eval', None)",
        "compile(text, '', 'exec')",
        "__import__(name)",
        "import builtins",
        "import importlib\nimportlib.import_module(name)",
        "from importlib import import_module",
        "import urllib.request",
        "from urllib import request",
        "from urllib.request import urlopen as get",
        "import http.client as web",
        "from http import client",
        "import aiohttp\naiohttp.ClientSession()",
        "from aiohttp import ClientSession",
        "import requests",
        "import httpx",
        "numpy.load(file, allow_pickle=True)",
        "numpy.load(file, allow_pickle=flag)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "from os import popen",
        "run = os.system",
        "import yaml",
        "import torch",
    ],
)
def test_a_planted_breach_is_found(breach: str) -> None:
    """However it is written: at the top, inside a function, under another name, as a value."""
    assert list(_found(ast.parse(breach)))


@pytest.mark.parametrize(
    "harmless",
    [
        "mx.eval(array)",
        "re.compile('x')",
        "numpy.load(file, allow_pickle=False)",
        "import urllib.parse",
        "from http import HTTPStatus",
        "from aiohttp import web",
        "import json",
        "import importlib.metadata",
        "platform.system()",
        "role = 'system'",
    ],
)
def test_what_is_harmless_is_not_found(harmless: str) -> None:
    """The gate does not cry at what only has a similar name."""
    assert list(_found(ast.parse(harmless))) == []
