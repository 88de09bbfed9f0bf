"""Text of `lockstep up --dry-run`: the processes of each host. Starts nothing."""

import contextlib
import os
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from services.commands.cli.flags import SettingSources
from services.commands.deployment import installation
from services.supervisor.children import child, effective_config, process_group
from shared.configuration import host_selection, host_share, inventory
from shared.configuration.host_share import HostShare
from shared.configuration.inventory import HostEntry, Inventory
from shared.configuration.loading import API_KEYS_VARIABLE
from shared.errors import UsageError
from shared.transport.addresses import is_tcp

_HEAD = "Nothing is started. `lockstep up` would run:"
_WIDTH = 12


def describe_machine(share: HostShare) -> str:
    """Return the processes that `lockstep up` would start on a machine without inventory.

    The text also names their addresses and the files that they read and write.
    """
    title = f"this machine ({socket.gethostname()})"
    python = str(Path(installation.console_script()).parent / "python")
    return "\n".join([_HEAD, "", title, *_lines(share, python, is_here=True)])


def describe_hosts(file: str, sources: SettingSources) -> str:
    """Return the processes that `lockstep up` would start on each host of an inventory.

    The text also names their addresses and the files that they read and write. This machine need
    not be one of the hosts.

    Args:
        file: the inventory.
        sources: other sources of settings; only the name of a host is allowed.

    Raises:
        ConfigError: when the inventory or a host's settings are wrong.
        UsageError: when settings are given in addition to the inventory.
    """
    host_selection.check_no_overrides(sources.config, sources.overrides, os.environ)
    hosts = inventory.read(file)
    here = host_selection.selected_host(hosts, sources.overrides)
    if here is None:
        with contextlib.suppress(UsageError):
            here = hosts.this_host(socket.gethostname())
    has_keys = bool(os.environ.get(API_KEYS_VARIABLE))
    lines = [_HEAD]
    for host in hosts.hosts:
        share = host_share.share_of_host(hosts, host, has_api_keys=has_keys)
        where = installation.find_installation(share, None, file, host.user or "-")
        lines += ["", _title(hosts, host, is_here=host is here)]
        command = [where.executable, "up", *where.settings]
        lines.append(_line("command", shlex.join(command)))
        lines += _lines(share, where.python, is_here=host is here)
    return "\n".join(lines)


def _title(hosts: Inventory, host: HostEntry, *, is_here: bool) -> str:
    facts = [
        *(["this host"] if is_here else []),
        *([host.address] if host.address else []),
        *([f"collectives on {host.data_address}"] if host.data_address else []),
        *([f"ssh {host.ssh}"] if host.ssh else []),
    ]
    ranks = hosts.ranks[host.name]
    numbers = ", ".join(map(str, ranks)) or "none"
    return f"{host.name} ({'; '.join([*facts, f'ranks: {numbers}'])})"


def _lines(share: HostShare, python: str, *, is_here: bool) -> Iterator[str]:
    config = share.config
    run_dir = str(config.run_dir) if is_here or config.paths.run_dir else "RUN_DIR"
    settings = str(PurePosixPath(run_dir) / effective_config.FILE_NAME)
    for role in process_group.roles(share):
        yield _line(role.name, shlex.join(child.command(python, role, settings)))
    yield _line("environment", "PYTHONUNBUFFERED=1, and that of `lockstep up`")
    for what, address in _listens(share):
        yield _line("listens", f"{address} ({what})")
    if not share.roles.scheduler:
        yield _line("dials", config.gateway_address)
        if share.roles.ranks:
            yield _line("dials", config.rank_address)
    yield _line("writes", f"{settings} (settings, for its processes)")
    for path in share.files:
        yield _line("writes", f"{path} (which RDMA device leads where)")
    if share.roles.cache_store:
        blocks = config.cache.directory or _default(config.cache_directory, is_here=is_here)
        yield _line("writes", f"{blocks} (blocks)")
    if is_tcp(config.rank_address):
        keys_dir = config.paths.keys_dir or _default(config.keys_dir, is_here=is_here)
        yield _line("reads", f"{keys_dir} (keys)")
    if share.roles.ranks or share.roles.gateway:
        yield _line("reads", f"{config.model.path} (model)")
    if run_dir == "RUN_DIR":
        yield _line("note", "RUN_DIR is in the state folder there: set run_dir to name it")


def _listens(share: HostShare) -> Iterator[tuple[str, str]]:
    config = share.config
    if share.roles.scheduler:
        yield "gateways", config.gateway_address
        yield "ranks", config.rank_address
    if share.roles.cache_store:
        yield "ranks of this host", config.store_address
    if share.roles.gateway:
        yield "clients", f"http://{config.gateway.host}:{config.gateway.port}"


def _default(folder: Path | None, *, is_here: bool) -> str:
    return str(folder) if folder and is_here else "the default folder there"


def _line(name: str, text: str) -> str:
    return f"  {name:<{_WIDTH}} {text}"
