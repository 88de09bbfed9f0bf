"""The walls between rooms hold: a planted breach is refused by the tool that `make check` runs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(sys.executable).parent

IMPORT_BREACHES = [
    ("services/gateway/app.py", "import services.scheduler.core", "Rooms do not import each other"),
    (
        "services/scheduler/core.py",
        "import services.commands.main",
        "Rooms do not import each other",
    ),
    ("services/supervisor/main.py", "import services.gateway.app", "Only the gateway knows HTTP"),
    (
        "services/supervisor/main.py",
        "import services.rank_worker.joining.join",
        "Rooms do not import",
    ),
    (
        "shared/transport/codec.py",
        "import services.scheduler.cache.kv_rows",
        "shared imports no service",
    ),
    ("shared/limits.py", "import shared.transport.codec", "shared is layered"),
    ("services/scheduler/main.py", "import mlx.core", "Only the rank worker (and the bench)"),
    ("services/gateway/app.py", "import mlx.core", "Only the rank worker (and the bench)"),
    (
        "services/rank_worker/scheduler_link.py",
        "import transformers",
        "Only the gateway knows HTTP",
    ),
    (
        "services/rank_worker/device/blas.py",
        "import services.rank_worker.peers.collectives",
        "rank_worker is layered",
    ),
    ("services/scheduler/cache/kv_rows.py", "import time", "The cores do no input"),
    (
        "services/scheduler/core.py",
        "from shared import clock",
        "The cores do no input",
    ),
    ("services/scheduler/batch/running_batch.py", "import random", "The cores do no input"),
    ("shared/messages/base.py", "import os", "The cores do no input"),
    ("services/cache_store/core.py", "import os", "The cores do no input"),
    (
        "services/cache_store/records/stored_files.py",
        "from shared import clock",
        "The cores do no input",
    ),
    ("services/cache_store/records/index.py", "from pathlib import Path", "The cores do no input"),
    ("shared/block_record.py", "import time", "The cores do no input"),
    ("shared/block_record.py", "import shared.transport.links", "shared is layered"),
    ("services/cache_store/main.py", "import mlx.core", "Only the rank worker (and the bench)"),
    ("services/cache_store/main.py", "import services.scheduler.core", "Rooms do not import"),
]
CALL_BREACHES = [
    ("services/gateway/app.py", "import zmq"),
    ("shared/transport/links.py", "import zmq"),
    (
        "services/rank_worker/execution/executor.py",
        "import mlx.core as mx\n\nmx.distributed.init()",
    ),
    ("services/scheduler/main.py", "import time\n\ntime.time()"),
    ("services/rank_worker/main.py", "import pickle"),
    ("services/gateway/app.py", "eval('1')"),
    ("services/supervisor/main.py", "import os\n\nos.system('ls')"),
    ("services/supervisor/main.py", "import subprocess\n\nsubprocess.run('ls', shell=True)"),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source tree, to be broken."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("services", "shared"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def _check(folder: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(TOOLS / command[0]), *command[1:]],
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_all_import_contracts_are_kept(copy: Path) -> None:
    """Without a breach every contract is kept."""
    done = _check(copy, "lint-imports", "--no-cache", "--no-logo")

    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def broken_contracts(copy: Path) -> dict[str, str]:
    """The linter's report by contract, with all breaches at once: one run takes seconds."""
    texts = {file: (copy / file).read_text(encoding="utf-8") for file, _, _ in IMPORT_BREACHES}
    for file, line, _ in IMPORT_BREACHES:
        with (copy / file).open("a", encoding="utf-8") as source:
            source.write(f"\n{line}\n")
    done = _check(copy, "lint-imports", "--no-cache", "--no-logo")
    for file, text in texts.items():
        (copy / file).write_text(text, encoding="utf-8")
    assert done.returncode == 1, done.stdout
    report = done.stdout.partition("Broken contracts")[2]
    parts = re.split(r"^(.+)\n-+\n", report, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(("file", "line", "wall"), IMPORT_BREACHES)
def test_forbidden_import_breaks_an_import_contract(
    broken_contracts: dict[str, str], file: str, line: str, wall: str
) -> None:
    """Each wall is named when it is breached, with the import that breaches it."""
    importer = file.removesuffix(".py").replace("/", ".")
    imported = line.removeprefix("from ").removeprefix("import ").replace(" import ", ".")
    if not imported.startswith(("services.", "shared.")):
        imported = imported.partition(".")[0]  # of other packages the linter names no module
    place = re.compile(rf"\b{re.escape(importer)} -> {re.escape(imported)}\b")
    reports = [report for name, report in broken_contracts.items() if name.startswith(wall)]

    assert any(map(place.search, reports)), broken_contracts


@pytest.mark.parametrize(("file", "lines"), CALL_BREACHES)
def test_linter_refuses_call_that_its_folder_forbids(copy: Path, file: str, lines: str) -> None:
    """Sockets, collectives, clocks, pickles, eval and shells stay where they are allowed."""
    path = copy / file
    text = path.read_text(encoding="utf-8")
    path.write_text(f"{text}\n{lines}\n", encoding="utf-8")
    try:
        done = _check(copy, "ruff", "check", "--no-cache", "--select", "TID251,S", file)
    finally:
        path.write_text(text, encoding="utf-8")

    assert done.returncode == 1, done.stdout
