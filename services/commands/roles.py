"""Commands that run a role: one process of Lockstep, or all of a host. Imports only that role."""

import contextlib
import functools
import os
import signal
from collections.abc import Iterator

import click

from services.commands.cli.click_support import Command
from services.commands.cli.flags import SettingSources, settings_options
from services.supervisor.status import running
from shared import limits, log
from shared.configuration import host_selection
from shared.configuration.host_share import HostShare
from shared.configuration.loading import prepare_run_dir, read_world_files
from shared.configuration.setting_rules import settings_without_effect
from shared.configuration.settings import Config
from shared.errors import LockstepError
from shared.model import adapters
from shared.os.process_file import ProcessFile
from shared.os.standard_streams import print_line

_EXIT_CODES: dict[int, int] = {
    signal.SIGTERM: limits.EXIT_OK,
    signal.SIGINT: limits.EXIT_INTERRUPTED,
}
_ANY_RANK = -1


@click.command(cls=Command)
@settings_options
@click.option("--dry-run", is_flag=True, help="Only print what would run, and where.")
def up(sources: SettingSources, *, dry_run: bool) -> int:
    """Start everything on this machine and keep it running."""
    if dry_run:
        from services.commands.deployment import dry_run as planned

        if sources.inventory:
            print_line(planned.describe_hosts(sources.inventory, sources))
        else:
            print_line(planned.describe_machine(sources.share()))
        return limits.EXIT_OK
    share = sources.share()
    from services.supervisor import main as supervisor
    from services.supervisor import replacement

    try:
        check_before_start(share)
        return replacement.run(share, supervisor.run)
    except LockstepError as error:
        log.report(str(error), share.config.log, "error")
        return error.exit_code


@click.command(cls=Command)
@settings_options
def gateway(sources: SettingSources) -> int:
    """Run one gateway: HTTP and text."""
    config = sources.share().config
    with process_file_held(config, "gateway"):
        from services.gateway import main

        return main.run(config)


@click.command(cls=Command)
@settings_options
def scheduler(sources: SettingSources) -> int:
    """Run the scheduler: queue, batch membership, step plans."""
    share = sources.share()
    share.write_files()
    with process_file_held(share.config, "scheduler"):
        from services.scheduler import main

        return main.run(share.config)


@click.command(cls=Command)
@settings_options
@click.option(
    "--rank", metavar="R", type=int, default=_ANY_RANK, help="Number of the rank (default: any)."
)
@click.option("--spare", is_flag=True, hidden=True)
def rank_worker(sources: SettingSources, *, rank: int, spare: bool) -> int:
    """Run one rank worker: one device's share of the model."""
    share = sources.share()
    host_selection.check_rank_is_here(share, rank)
    blas_library = None
    name = f"rank-{rank}" if rank >= 0 else "rank"
    if spare:
        from services.rank_worker import main

        # It has no file in the run folder before it has the place.
        if share.config.rank_worker.spare == "loaded":
            adapters.check(share.config)
            claim = functools.partial(_create_process_file, share.config, name)
            return main.run_as_loaded_spare(share.config, rank, claim)
        blas_library = main.wait_as_spare(share.config, rank)
    with process_file_held(share.config, name, by_pid=rank == _ANY_RANK):
        from services.rank_worker import main

        adapters.check(share.config)
        return main.run(share.config, rank, blas_library=blas_library)


@click.command(cls=Command)
@settings_options
def cache_store(sources: SettingSources) -> int:
    """Run the cache store of this host: KV blocks on its SSD."""
    config = sources.share().config
    with process_file_held(config, "store"):
        from services.cache_store import main

        return main.run(config)


@contextlib.contextmanager
def process_file_held(config: Config, name: str, *, by_pid: bool = False) -> Iterator[None]:
    """Keep a file with this process's id in the run folder while the block runs.

    `lockstep restart` finds the process by it.

    Until the role installs its own handlers, SIGTERM and Ctrl-C end the process at once and remove
    the file: no request has been accepted yet.

    Args:
        config: gives the run folder.
        name: name of the file, without its suffix.
        by_pid: whether the file's name also holds the process id, for roles without a number.
    """
    file: ProcessFile | None = None

    def end(number: int, _frame: object) -> None:
        try:
            if file:
                file.path.unlink(missing_ok=True)
        finally:
            # An exception could be raised inside a library that suppresses all exceptions, as some
            # do while they are imported: the process would continue and serve.
            os._exit(_EXIT_CODES[number])

    numbers = [signal.SIGTERM]
    # A process that a script starts with `&` ignores SIGINT, and must still ignore it here.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        try:
            file = _create_process_file(config, name, by_pid=by_pid)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        yield
    finally:
        for number, handler in before.items():
            # The role's own handler stays until the process ends; ours could remove another
            # process's file.
            if signal.getsignal(number) is end:
                signal.signal(number, handler)
        if file:
            file.release()


def _create_process_file(config: Config, name: str, *, by_pid: bool = False) -> ProcessFile | None:
    """Write the file of `process_file_held`; None, with a warning, if it cannot be written."""
    try:
        folder = prepare_run_dir(config)
        running.register(folder)
        return ProcessFile(folder, name, by_pid=by_pid, facts=running.facts(config))
    except OSError as error:
        # A role can serve without its file, for example on a full disk.
        log.report(
            f"Cannot write to {config.run_dir}: {error.strerror}. `lockstep restart` will not "
            "find this process.",
            config.log,
            "warning",
        )
        return None


def check_before_start(share: HostShare) -> None:
    """Refuse settings that cannot work, and warn about those without effect.

    Raises:
        ConfigError: when the model or the files of the world do not fit the settings.
    """
    _check_folders(share)
    warnings = adapters.check(share.config) if share.roles.ranks else []
    warnings += settings_without_effect(share.config)
    # The files of an inventory are checked already, and are not written yet.
    if share.roles.scheduler and not share.files:
        warnings += read_world_files(share.config).ignored_settings
    for warning in warnings:
        log.report(warning, share.config.log, "warning")


def _check_folders(share: HostShare) -> None:
    """Find out now whether a folder depends on a home folder that does not exist.

    Raises:
        ConfigError: when it does.
    """
    config = share.config
    if share.roles.cache_store:
        _ = config.cache_directory
    if config.paths.keys_dir:
        _ = config.required_keys_dir
