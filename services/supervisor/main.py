"""`lockstep up` for one host. Owns the run folder's claim, the port check and the final cleanup.

It serves no requests. In production launchd or systemd start the same roles instead.
"""

import socket
import sys
from pathlib import Path

from services.supervisor.children import process_group
from services.supervisor.console.console import SUPERVISOR, Console, non_blocking
from services.supervisor.status import running
from services.supervisor.supervisor import Supervisor
from shared.configuration.host_share import HostShare
from shared.configuration.loading import prepare_run_dir
from shared.configuration.settings import Config
from shared.errors import ConfigError
from shared.log.files import LogFile
from shared.model import location
from shared.os import lifeline, process_file
from shared.os.process_file import NameTaken, ProcessFile


def run(share: HostShare) -> int:
    """Run the roles of this host until Ctrl-C or SIGTERM and return the exit code.

    Raises:
        ConfigError: when the model, the run folder or the port cannot be used. Nothing was started.
    """
    lifeline.exit_with_parent()
    config = share.config
    if share.roles.ranks or share.roles.gateway:
        location.local_folder(config.model.path)
    folder = prepare_run_dir(config)
    held = _claim_run_dir(folder, share)
    running.register(folder)
    try:
        process_file.delete_stale_files(folder)
        if share.roles.gateway:
            _check_port(config)
        console = _open_console(config)
        code = Supervisor(share, process_group.create_group(share, folder, console), console).run()
        _clean_run_dir(config, folder)
        return code
    finally:
        held.release()


def _open_console(config: Config) -> Console:
    """Return the output: standard output, or a log file, or on a terminal both.

    Raises:
        ConfigError: when the log file cannot be written.
    """
    directory, as_json = config.log_directory, config.log.format == "json"
    if directory is None:
        return Console(non_blocking(sys.stdout, as_json=as_json), as_json=as_json)
    is_terminal = sys.stdout.isatty()
    file = LogFile(directory, SUPERVISOR, config.log, takes_output=not is_terminal)
    stream = non_blocking(sys.stdout, as_json=as_json) if is_terminal else None
    return Console(stream, as_json=as_json, file=file)


def _claim_run_dir(folder: Path, share: HostShare) -> ProcessFile:
    """Take the supervisor's place in the run folder, which each folder has once.

    Raises:
        ConfigError: when another supervisor has it, or the folder cannot be written.
    """
    try:
        return ProcessFile(
            folder, process_file.SUPERVISOR, is_only=True, facts=running.facts(share.config)
        )
    except NameTaken as taken:
        raise ConfigError(
            f"Lockstep already runs with the run folder {folder} (process "
            f"{taken.pid or 'unknown'}): stop it, or choose another --port or paths.run_dir."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"Cannot write to the run folder {folder}: {error.strerror}. Free space there, or set "
            "paths.run_dir."
        ) from None


def _clean_run_dir(config: Config, folder: Path) -> None:
    """Delete the process files and sockets of ended or killed processes."""
    process_file.delete_stale_files(folder)
    # tcp addresses and other hosts have no socket file in this folder.
    for address in (config.gateway_address, config.rank_address, config.store_address):
        path = Path(address.removeprefix("ipc://"))
        if path.parent == folder:
            path.unlink(missing_ok=True)


def _check_port(config: Config) -> None:
    """Check that the gateway will be able to listen. Raises ConfigError."""
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
