"""The shell of `lockstep up`: claims the run folder and the port, starts, watches, stops all roles.

It serves nothing and decides nothing about requests. In production launchd or systemd starts the
roles instead; nothing else differs.
"""

import contextlib
import fcntl
import os
import socket
import sys
from pathlib import Path

from services.supervisor.children import process_group
from services.supervisor.console import leaky_stream
from services.supervisor.console.console import Console
from services.supervisor.supervisor import Supervisor
from shared.configuration.host_share import HostShare
from shared.configuration.loading import prepare_run_dir
from shared.configuration.settings import Config
from shared.errors import ConfigError
from shared.model import location
from shared.os import lifeline, process_file


def run(share: HostShare) -> int:
    """Serve this host's share until Ctrl-C or SIGTERM; return the exit code.

    Raises:
        ConfigError: the model, the run folder or the port cannot be used; nothing was started.
    """
    lifeline.exit_with_parent()
    config = share.config
    if share.roles.ranks or share.roles.gateway:
        location.local_folder(config.model.path)
    folder = prepare_run_dir(config)
    lock = _claim(folder)
    try:
        process_file.delete_stale_files(folder)
        if share.roles.gateway:
            _check_port(config)
        share.place_files()
        console = Console(leaky_stream.of(sys.stdout))
        code = Supervisor(share, process_group.create_group(share, folder, console), console).run()
        _tidy(config, folder)
        return code
    finally:
        os.close(lock)


def _claim(folder: Path) -> int:
    """Lock the run folder for as long as this process lives; return the lock's descriptor."""
    path = folder / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise ConfigError(
            f"Lockstep already runs with the run folder {folder} (process {holder}): stop it, "
            "or choose another --port or paths.run_dir."
        ) from None
    # The lock is what counts; who holds it is told as far as the disk has room for it.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _tidy(config: Config, folder: Path) -> None:
    """Delete what ended processes have left: ranks take no leave, and others may be killed."""
    process_file.delete_stale_files(folder)
    # Those over tcp, and those of other hosts, have no file here.
    for address in (config.gateway_address, config.rank_address, config.store_address):
        path = Path(address.removeprefix("ipc://"))
        if path.parent == folder:
            path.unlink(missing_ok=True)


def _check_port(config: Config) -> None:
    """Find out now whether the gateway will be able to listen."""
    host, port = config.gateway.host, config.gateway.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror:
        raise ConfigError(f"The host name {host} is unknown: set gateway.host (--host).") from None
    for family, kind, protocol, _name, address in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                raise ConfigError(
                    f"Cannot listen on {host} port {port}: {error.strerror}. "
                    "Choose another with --port."
                ) from None
