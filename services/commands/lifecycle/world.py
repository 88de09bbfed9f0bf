"""`lockstep restart world`: another world for a Lockstep that runs. Owns checks, drain and report.

Everything is checked before anything changes, as `lockstep up` checks it.
"""

import contextlib
import dataclasses
import shlex
import sys
from pathlib import Path

import msgspec
import psutil

from services.commands import roles
from services.commands.cache.serving import stored_blocks
from services.commands.cli.flags import SettingSources
from services.commands.cli.running_config import PORT, running_config
from services.commands.lifecycle.drain import OperatorDrain
from services.supervisor.console.console import Console
from services.supervisor.status.service_queries import ask_status
from services.supervisor.world_restart import WorldRestart
from shared import limits
from shared.configuration import host_share, inventory
from shared.configuration.host_addresses import is_loopback
from shared.configuration.host_share import HostShare
from shared.configuration.loading import change_config, with_absolute_paths
from shared.configuration.settings import Config
from shared.errors import UnavailableError, UsageError
from shared.messages import StatusReported
from shared.model import checkpoint_files
from shared.model.location import local_folder
from shared.model.sharding.feasibility import check_sharding
from shared.os import process_file
from shared.os.process_file import RoleProcess
from shared.os.standard_streams import exit_code_if_written
from shared.transport.addresses import is_tcp


def restart_world(sources: SettingSources, wait_s: float | None) -> int:
    """Drain, restart all roles of this host with new settings, and report which blocks serve.

    Args:
        sources: a configuration or an inventory with its flags, as for `lockstep up`; flags alone
            change settings of the Lockstep that runs.
        wait_s: longest wait for the end of open requests; 0: no wait; None: scheduler.drain_s.

    Returns:
        The exit code.

    Raises:
        ConfigError: when the new settings are wrong. Nothing has changed then.
        UsageError: when flags alone cannot say what every host has to do.
        UnavailableError: when no `lockstep up` runs, requests are open for too long (nothing has
            changed then), or the new world does not start.
    """
    console = Console(sys.stdout)
    is_whole = bool(sources.config or sources.inventory)
    whole = sources.share() if is_whole else None
    folder = (whole.config if whole else _place(sources)).run_dir
    supervisor = _supervisor(folder, sources)
    before = _settings_of(supervisor)
    share = _absolute(whole) if whole else _changed(sources, before, supervisor)
    _check(share)
    _check_other_hosts(share, before)
    restart = WorldRestart(before, share, supervisor, console)
    longest_s = before.scheduler.drain_s if wait_s is None else wait_s
    try:
        if process_file.find_processes(folder, "scheduler"):
            _order_after_drain(before, restart, longest_s, console)
        else:
            _check_scheduler_is_first(share, sources)
            restart.order()
        for line in _other_hosts(share, sources):
            console.print_line(line)
        status = restart.wait()
    finally:
        console.show_progress("")
    for line in _report(share, status):
        console.print_line(line)
    if not is_whole and sources.overrides:
        console.print_line(
            "`lockstep up` keeps these settings until it ends: start it with them the next time."
        )
    return exit_code_if_written(limits.EXIT_OK, console.write_error)


def _place(sources: SettingSources) -> Config:
    """Return the settings of the running Lockstep that flags without a file mean."""
    by_port = {key: value for key, value in sources.overrides.items() if key == PORT}
    return running_config(SettingSources(overrides=by_port))


def _supervisor(folder: Path, sources: SettingSources) -> RoleProcess:
    """Return the process of `lockstep up` with this run folder, or explain what to do instead."""
    found = process_file.find_all(folder) if folder.is_dir() else []
    if found and found[0].name == process_file.SUPERVISOR:
        return found[0]
    if found:
        names = ", ".join(one.name for one in found)
        file = sources.inventory or sources.config or "FILE"
        raise UnavailableError(
            f"No `lockstep up` keeps the roles with the run folder {folder} ({names}): they are "
            "jobs or processes of their own. Make the jobs again with `lockstep launchd install` "
            f"or `lockstep systemd install` and the changed {file}, which restarts them."
        )
    raise UnavailableError(
        f"No Lockstep runs with the run folder {folder}: start `lockstep up`, or give the "
        "--config, --inventory or --port that it was started with."
    )


def _settings_of(supervisor: RoleProcess) -> Config:
    try:
        return msgspec.json.decode(supervisor.facts, type=Config)
    except msgspec.MsgspecError:
        raise UnavailableError(
            f"The `lockstep up` that runs (process {supervisor.pid}) is of another version: stop "
            "it, and start it again."
        ) from None


def _changed(sources: SettingSources, before: Config, supervisor: RoleProcess) -> HostShare:
    """Return the running settings with the changes of the command line."""
    host = before.rank_address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if is_tcp(before.rank_address) and not is_loopback(host):
        raise UsageError(
            "This Lockstep may have several hosts, which need equal settings: change the file that "
            "it was started with, and give it with --inventory or --config."
        )
    with contextlib.suppress(psutil.Error):
        before = with_absolute_paths(before, Path(psutil.Process(supervisor.pid).cwd()))
    changes = {key: value for key, value in sources.overrides.items() if key != PORT}
    changed = change_config(before, changes)
    return _absolute(host_share.single_host_share(changed))


def _absolute(share: HostShare) -> HostShare:
    return dataclasses.replace(share, config=with_absolute_paths(share.config, Path.cwd()))


def _check(share: HostShare) -> None:
    """Check the settings as `lockstep up` and the ranks do. Raises ConfigError."""
    config = share.config
    roles.check_before_start(share)
    if share.roles.ranks and (folder := local_folder(config.model.path)) is not None:
        check_sharding(checkpoint_files.read_config(folder), config.sharding, config.world.size)


def _check_other_hosts(share: HostShare, before: Config) -> None:
    """Check that ranks of other hosts, which still have the old settings, may join the new world.

    Raises:
        UsageError: when the ranks would refuse each other.
    """
    config = share.config
    if len(share.roles.ranks) == config.world.size:
        return
    changed = {
        "model": config.model != before.model,
        "speculation": config.speculation != before.speculation,
        "rank_worker.kv_bits": config.rank_worker.kv_bits != before.rank_worker.kv_bits,
    }
    if found := [key for key, is_changed in changed.items() if is_changed]:
        raise UsageError(
            f"The new settings also change {', '.join(found)}, which must be equal on all hosts at "
            "all times: stop `lockstep up` on every host, and start it again."
        )


def _check_scheduler_is_first(share: HostShare, sources: SettingSources) -> None:
    """Check that the scheduler's host has the new world already, where streams are drained."""
    if share.roles.scheduler:
        return
    try:
        status = ask_status(share.config)
    except UnavailableError:
        return
    config = share.config
    if (status.world_size, status.sharding) != (config.world.size, config.sharding):
        raise UnavailableError(
            f"The scheduler still has a world of {status.world_size} ranks (split: "
            f"{status.sharding}): run `lockstep restart world --inventory {sources.inventory}` on "
            "its host first."
        )


def _order_after_drain(
    before: Config, restart: WorldRestart, wait_s: float, console: Console
) -> None:
    """Order the restart when no request is open. Raises UnavailableError if it takes too long."""
    try:
        ask_status(before)
    except UnavailableError:
        console.print_line("The scheduler does not answer, so nothing is drained")
        restart.order()
        return
    with OperatorDrain(before, console) as drain:
        console.print_line("New requests are refused until the new world is ready")
        if drain.wait(wait_s) and wait_s:
            raise UnavailableError(
                f"Requests are still open after {wait_s:g} s, so nothing was changed: give a "
                "longer --wait, or --wait 0 to give them only the time of a stop "
                "(scheduler.drain_s)."
            )
        restart.order()


def _other_hosts(share: HostShare, sources: SettingSources) -> list[str]:
    """Return what to run on the other hosts."""
    if not sources.inventory:
        return []
    words = ["lockstep", "restart", "world", "--inventory"]
    return [
        f"Run on {host.name}: "
        + shlex.join([*words, host.inventory or sources.inventory, "--host", host.name])
        for host in inventory.read(sources.inventory).hosts
        if host.name != share.name
    ]


def _report(share: HostShare, status: StatusReported | None) -> list[str]:
    if status is None or not share.roles.scheduler:
        numbers = ", ".join(map(str, share.roles.ranks)) or "none"
        return [f"The roles of this host run again (ranks: {numbers})."]
    plural = "s" if status.world_size > 1 else ""
    split = f", split by {status.sharding}" if status.world_size > 1 else ""
    lines = [f"The world is ready: {status.world_size} rank{plural}{split} ({status.backend})."]
    if status.world_change:
        lines.append(status.world_change)
    stored = stored_blocks(share.config, status.namespace)
    if stored is not None:
        lines.append(stored.explain())
    return lines
