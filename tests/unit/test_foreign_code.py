"""No received data is run as code, and no received URL is fetched.

The test reads the syntax trees of `services` and `shared`. It finds every module, function and
keyword that could run bytes as code or open a URL, and allows them in named files only.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Modules that create objects or code from bytes, or that fetch URLs.
_MODULES = {
    "pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "multiprocessing", "copyreg",
    "code", "codeop", "runpy", "imp", "yaml", "torch", "xmlrpc", "builtins", "ctypes", "cffi",
    "urllib.request", "http.client", "ftplib", "smtplib", "telnetlib", "imaplib", "poplib",
    "nntplib", "requests", "httpx", "urllib3", "openai", "huggingface_hub", "importlib.util",
    "importlib.machinery", "importlib.import_module", "aiohttp.ClientSession", "aiohttp.client",
    "os.system", "os.popen", "subprocess.getoutput",
}  # fmt: skip
# Every use counts: a call, a reference, or a `getattr` with a constant name.
_NAMES = {"eval", "exec", "compile", "__import__", "breakpoint", "__builtins__"}
_ATTRIBUTES = {
    "ClientSession", "urlopen", "import_module", "exec_module", "run_path", "run_module",
    "__globals__", "__subclasses__", "__builtins__", "__reduce__", "create_subprocess_shell",
}  # fmt: skip
_KEYWORDS = {"allow_pickle", "shell"}

# Allowed names by file or folder. The comment gives the reason.
_ALLOWED = {
    # Sends bytes between a gateway and the process that tries grammars; nothing is pickled.
    "services/gateway/structured/trial": {"multiprocessing"},
    # The bench sends HTTP requests to servers that it has started.
    "services/commands/bench/measuring/processes.py": {"http.client"},
    "services/commands/bench/serving/recovery.py": {"http.client"},
    # Imports a command when it is called; the module names are constants of `services/commands`.
    "services/commands/cli/click_support.py": {"importlib.import_module", "import_module"},
    # `lockstep up` asks its own gateway for its readiness.
    "services/supervisor/status/service_queries.py": {"http.client"},
    # Loads a BLAS library that is installed as a package before MLX does.
    "services/rank_worker/device/blas.py": {"ctypes", "importlib.util"},
    # Views page-locked memory, of which CUDA's driver gives the address.
    "services/rank_worker/kv_cache/blocks/host_copier.py": {"ctypes"},
    # Allocates and shares memory with CUDA's driver.
    "services/rank_worker/device/cuda/driver.py": {"ctypes"},
    # Checks the calls of the driver and of the compiler.
    "services/rank_worker/device/cuda/library.py": {"ctypes"},
    # Calls the compiler that MLX has loaded, and the hash of the C++ library that MLX is linked to.
    "services/rank_worker/device/cuda/kept_kernels/": {"ctypes"},
    # Reports the progress of downloads.
    "services/rank_worker/model/download.py": {"huggingface_hub"},
    # Calls prctl once, with constants: the kernel ends this process with its parent.
    "shared/os/lifeline.py": {"ctypes"},
    # Finds mlx-lm's source, to read it as text.
    "shared/model/sharding/families.py": {"importlib.util"},
    # Looks for a model in the local download cache; sends no requests.
    "services/commands/planning/command.py": {"huggingface_hub"},
    # `lockstep verify` sends requests to the gateway that the operator has named.
    "services/commands/verify/gateway.py": {"http.client"},
    # `lockstep launch` asks the server that the operator has named for its model.
    "services/commands/launch/served_model.py": {"http.client"},
    # Downloads the model that the operator has named.
    "shared/model/hub.py": {"huggingface_hub"},
}


def _found(tree: ast.AST) -> Iterator[str]:
    """Yield each forbidden name in a syntax tree."""
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
                # `_NAMES` are built-in functions: `mx.eval` and `re.compile` run no text.
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


def _allowed(path: str) -> set[str]:
    return {name for prefix, names in _ALLOWED.items() if path.startswith(prefix) for name in names}


@cache
def _found_in_sources() -> dict[str, set[str]]:
    """Return the forbidden names in each source file, by its path."""
    paths = (path for folder in ("services", "shared") for path in (ROOT / folder).rglob("*.py"))
    return {
        path.relative_to(ROOT).as_posix(): set(_found(ast.parse(path.read_text(encoding="utf-8"))))
        for path in sorted(paths)
    }


def test_sources_use_pickle_eval_and_url_libraries_only_where_allowed() -> None:
    """No file uses pickle, eval, exec, marshal or a URL library, except those in `_ALLOWED`."""
    found = _found_in_sources()

    assert {name.partition("/")[0] for name in found} == {"services", "shared"}
    for path, names in found.items():
        assert names - _allowed(path) == set(), path


def test_every_allowed_use_of_code_loading_library_occurs_in_its_file() -> None:
    """Each name in `_ALLOWED` is in its file: an entry without use would hide a later breach."""
    used: dict[str, set[str]] = {prefix: set() for prefix in _ALLOWED}
    for path, names in _found_in_sources().items():
        for prefix in _ALLOWED:
            if path.startswith(prefix):
                used[prefix] |= names

    assert {prefix: names - used[prefix] for prefix, names in _ALLOWED.items()} == {
        prefix: set() for prefix in _ALLOWED
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
def test_check_finds_forbidden_imports_under_aliases_and_in_functions(breach: str) -> None:
    """The test finds imports at the top, in functions and under aliases, and plain references."""
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
def test_check_does_not_report_harmless_code_with_similar_names(harmless: str) -> None:
    """Names that only resemble forbidden ones are not reported."""
    assert list(_found(ast.parse(harmless))) == []
