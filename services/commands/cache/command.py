"""Command `lockstep cache`. Owns questions to the cache store and the text of its answers."""

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from services.cache_store.files.check import CheckReport, check_directory
from services.commands.cache import serving, tables
from services.commands.cache.client import Store, list_folders, opened
from services.commands.checks.text_table import counted, format_bytes
from services.commands.cli.click_support import Group, json_option, json_text
from services.commands.cli.flags import SettingSources, settings_options
from services.commands.cli.running_config import running_config
from shared import limits
from shared.configuration.settings import Config
from shared.errors import UnavailableError, UsageError
from shared.messages import (
    BlocksCleared,
    ClearBlocks,
    QueryStore,
    StoredFolder,
    StoreReported,
)
from shared.os.standard_streams import print_line

Action = Literal["stats", "list", "check", "clear"]

EXIT_BAD_RECORDS = 1
"""Exit code of `check` when a record is damaged."""

_namespace_option = click.option(
    "--namespace",
    metavar="NS",
    default="",
    help="Only this namespace; its first digits are enough (default: all).",
)


@dataclasses.dataclass(frozen=True, slots=True)
class CommandOutput:
    """Result of a cache command in both forms of output, and its exit code."""

    text: str
    facts: dict[str, Any]
    """The JSON document that `--json` prints in place of the text."""
    exit_code: int = limits.EXIT_OK


@click.group(cls=Group)
def cache() -> None:
    """List, check or delete stored KV blocks."""


@cache.command()
@settings_options
@json_option
def stats(sources: SettingSources, *, as_json: bool) -> int:
    """Show directory, size, records and counters of this host's cache store."""
    return _print(run(running_config(sources), "stats", ""), as_json=as_json)


@cache.command(name="list")
@settings_options
@json_option
@_namespace_option
def list_command(sources: SettingSources, *, as_json: bool, namespace: str) -> int:
    """List number, size and last use of the records of each namespace and rank."""
    return _print(run(running_config(sources), "list", namespace), as_json=as_json)


@cache.command()
@settings_options
@json_option
@_namespace_option
def check(sources: SettingSources, *, as_json: bool, namespace: str) -> int:
    """Read and check every record; the exit code is 1 if a record is damaged."""
    return _print(run(running_config(sources), "check", namespace), as_json=as_json)


@cache.command()
@settings_options
@json_option
@_namespace_option
def clear(sources: SettingSources, *, as_json: bool, namespace: str) -> int:
    """Delete all records, or those of one namespace."""
    return _print(run(running_config(sources), "clear", namespace), as_json=as_json)


def _print(output: CommandOutput, *, as_json: bool) -> int:
    print_line(json_text(output.facts) if as_json else output.text)
    return output.exit_code


def run(config: Config, action: Action, namespace: str) -> CommandOutput:
    """Answer one question about the stored blocks of this host, or delete them.

    Args:
        config: names the directory and the store's address.
        action: name of the subcommand; only `clear` deletes anything.
        namespace: a namespace or its first digits; "": all namespaces.

    Raises:
        UsageError: when `namespace` is malformed, or several namespaces begin with it.
        UnavailableError: when the running store is off or does not answer, or the disk fails.
        ConfigError: when the directory belongs to another user.
    """
    if not re.fullmatch(r"[0-9a-f]{0,64}", namespace):
        raise UsageError(f"A namespace consists of hexadecimal digits, but {namespace!r} does not.")
    with opened(config) as store:
        if store is None:
            return _nothing_stored(config.cache_directory, action)
        report = store.ask(QueryStore(), StoreReported)
        if action == "stats":
            text = tables.stats(report, is_running=store.is_running)
            facts = {"running": store.is_running, **msgspec.to_builtins(report)}
            return CommandOutput(text, facts)
        if not report.on:
            raise UnavailableError(f"The cache store is off: {report.cause}")
        directory = Path(report.directory)
        folders = list_folders(store)
        if namespace:
            full = _full_name(namespace, folders)
            if full is None:
                return _nothing_stored(directory, action, namespace)
            namespace = full
            folders = [folder for folder in folders if folder.namespace == namespace]
        if action == "list":
            return _list(folders, directory, serving.running_namespace(config))
        if action == "clear":
            return _clear(store, namespace)
        return _check(directory, namespace)


def _full_name(beginning: str, folders: list[StoredFolder]) -> str | None:
    """Return the namespace with this beginning, or None."""
    found = sorted({f.namespace for f in folders if f.namespace.startswith(beginning)})
    if beginning in found:
        return beginning
    if len(found) > 1:
        raise UsageError(f"{len(found)} namespaces begin with {beginning}: give more digits.")
    return found[0] if found else None


def _list(folders: list[StoredFolder], directory: Path, running: str) -> CommandOutput:
    if not folders:
        return _nothing_stored(directory, "list")
    facts = {"folders": msgspec.to_builtins(folders), "running_namespace": running}
    return CommandOutput(tables.listing(folders, running), facts)


def _clear(store: Store, namespace: str) -> CommandOutput:
    cleared = store.ask(ClearBlocks(namespace=namespace), BlocksCleared)
    count, size = counted(cleared.records, "record"), format_bytes(cleared.size_bytes)
    text = f"Cleared {count} ({size})." if cleared.size_bytes else "There is nothing to clear."
    return CommandOutput(text, msgspec.to_builtins(cleared))


def _check(directory: Path, namespace: str) -> CommandOutput:
    try:
        report = check_directory(directory, namespace)
    except OSError as error:
        raise UnavailableError(f"{directory} cannot be read: {error.strerror}.") from None
    code = EXIT_BAD_RECORDS if report.bad else limits.EXIT_OK
    return CommandOutput(tables.check_report(report), dataclasses.asdict(report), code)


def _nothing_stored(directory: Path, action: Action, namespace: str = "") -> CommandOutput:
    """Return an answer with the same fields as usual, all of them empty."""
    what = f"Nothing of namespace {namespace} is stored" if namespace else "Nothing is stored"
    empty: dict[Action, dict[str, Any]] = {
        "stats": {"running": False, "on": False, "directory": str(directory), "records": 0},
        "list": {"folders": [], "running_namespace": ""},
        "check": dataclasses.asdict(CheckReport()),
        "clear": msgspec.to_builtins(BlocksCleared(records=0, size_bytes=0)),
    }
    facts = {name: value for name, value in empty[action].items() if name != "type"}
    return CommandOutput(f"{what} in {directory}.", facts)
