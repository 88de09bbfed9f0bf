"""`lockstep cache stats|list|verify|clear`: what to ask, and what to say about the answer."""

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from services.cache_store.files.check import CheckReport, check_directory
from services.commands.cache import tables
from services.commands.cache.client import Store, opened
from shared import limits
from shared.configuration.settings import Config
from shared.errors import UnavailableError, UsageError
from shared.messages import (
    BlocksCleared,
    BlocksListed,
    ClearBlocks,
    ListBlocks,
    QueryStore,
    StoredFolder,
    StoreReported,
)

Verb = Literal["stats", "list", "verify", "clear"]

EXIT_BAD_RECORDS = 1
"""`check_directory` has found records that are not what they should be."""


@dataclasses.dataclass(frozen=True, slots=True)
class CommandOutput:
    """What to print, in both forms, and the exit code."""

    text: str
    facts: dict[str, Any]
    exit_code: int = limits.EXIT_OK


def run(config: Config, verb: Verb, namespace: str) -> CommandOutput:
    """Answer one question about the stored blocks of this host, or delete them.

    Args:
        config: names the directory and the store's address.
        verb: what to do; `check_directory` deletes nothing.
        namespace: a namespace or how one begins; "": all.

    Raises:
        UsageError: `namespace` is no beginning of exactly one.
        UnavailableError: a store runs that is off or does not answer, or the disk refuses.
        ConfigError: the directory cannot be this user's.
    """
    if not re.fullmatch(r"[0-9a-f]{0,64}", namespace):
        raise UsageError(f"A namespace has hexadecimal digits, and {namespace!r} has others.")
    with opened(config) as store:
        if store is None:
            return _nothing(config.cache_directory, verb)
        report = store.ask(QueryStore(), StoreReported)
        if verb == "stats":
            text = tables.stats(report, is_running=store.is_running)
            facts = {"running": store.is_running, **msgspec.to_builtins(report)}
            return CommandOutput(text, facts)
        if not report.on:
            raise UnavailableError(f"The cache store is off: {report.cause}")
        directory = Path(report.directory)
        folders = _folders(store)
        if namespace:
            full = _full_name(namespace, folders)
            if full is None:
                return _nothing(directory, verb, namespace)
            namespace = full
            folders = [folder for folder in folders if folder.namespace == namespace]
        if verb == "list":
            return _list(folders, directory)
        if verb == "clear":
            return _clear(store, namespace)
        return _verify(directory, namespace)


def _folders(store: Store) -> list[StoredFolder]:
    folders: list[StoredFolder] = []
    page = 0
    while True:
        listed = store.ask(ListBlocks(page=page), BlocksListed)
        folders += listed.folders
        if not listed.more:
            return folders
        page += 1


def _full_name(beginning: str, folders: list[StoredFolder]) -> str | None:
    found = sorted({f.namespace for f in folders if f.namespace.startswith(beginning)})
    if beginning in found:
        return beginning
    if len(found) > 1:
        raise UsageError(f"{len(found)} namespaces begin with {beginning}: give more digits.")
    return found[0] if found else None


def _list(folders: list[StoredFolder], directory: Path) -> CommandOutput:
    if not folders:
        return _nothing(directory, "list")
    return CommandOutput(tables.listing(folders), {"folders": msgspec.to_builtins(folders)})


def _clear(store: Store, namespace: str) -> CommandOutput:
    cleared = store.ask(ClearBlocks(namespace=namespace), BlocksCleared)
    count, size = tables.counted(cleared.records, "record"), tables.size(cleared.size_bytes)
    text = f"Cleared {count} ({size})." if cleared.size_bytes else "There is nothing to clear."
    return CommandOutput(text, msgspec.to_builtins(cleared))


def _verify(directory: Path, namespace: str) -> CommandOutput:
    try:
        verified = check_directory(directory, namespace)
    except OSError as error:
        raise UnavailableError(f"{directory} cannot be read: {error.strerror}.") from None
    code = EXIT_BAD_RECORDS if verified.bad else limits.EXIT_OK
    return CommandOutput(tables.verification(verified), dataclasses.asdict(verified), code)


def _nothing(directory: Path, verb: Verb, namespace: str = "") -> CommandOutput:
    what = f"Nothing of namespace {namespace} is stored" if namespace else "Nothing is stored"
    empty: dict[Verb, dict[str, Any]] = {
        "stats": {"running": False, "on": False, "directory": str(directory), "records": 0},
        "list": {"folders": []},
        "verify": dataclasses.asdict(CheckReport()),
        "clear": msgspec.to_builtins(BlocksCleared(records=0, size_bytes=0)),
    }
    facts = {name: value for name, value in empty[verb].items() if name != "type"}
    return CommandOutput(f"{what} in {directory}.", facts)
