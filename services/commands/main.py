"""The one console script: reads the command line, picks a role and imports only that role.

Errors that an operator can act on are one sentence on standard error and an exit code; a traceback
means a bug in Lockstep.
"""

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Sequence
from importlib import metadata

import msgspec

from services.commands import flags
from services.commands.command_line import Parser
from services.commands.role_process import found_as
from shared import limits
from shared.configuration import host_selection
from shared.configuration.host_share import HostShare
from shared.configuration.loading import read_world_files
from shared.configuration.setting_rules import settings_without_effect
from shared.configuration.settings import Config
from shared.errors import LockstepError
from shared.model import adapters
from shared.os import standard_streams
from shared.os.standard_streams import print_line

_ROLES = {
    "gateway": "run one gateway: HTTP and text",
    "scheduler": "run the scheduler: queue, batch membership, step plans",
    "rank-worker": "run one rank worker: one device's share of the model",
    "cache-store": "run the cache store of this host: KV blocks on its SSD",
}

_RESTARTED = ("gateway", "scheduler", "store", "rank", "ranks")

_CACHE_VERBS = {
    "stats": "say how the cache store is",
    "list": "list namespaces and ranks with their records",
    "verify": "read and check every record; exit code 1 if one is bad",
    "clear": "delete records",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    standard_streams.replace_closed()
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = limits.EXIT_OK
    try:
        code = _dispatch(arguments)
        standard_streams.flush()
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return limits.EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone (`lockstep status | head -1`).
        standard_streams.discard_output()
    return code


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["bench"]:
        from services.commands.bench import main as bench

        return bench.run(arguments[1:])
    options = _parser().parse_args(arguments)
    command: str = options.command
    if command in ("launchd", "systemd"):
        from services.commands.deployment import main as deployment

        print_line(deployment.run(command, options, lambda: _share(options), os.environ))
        return limits.EXIT_OK
    if command == "up" and options.dry_run and options.inventory:
        from services.commands.deployment import dry_run

        given = flags.settings(options)
        print_line(dry_run.all_hosts(options.inventory, options.config, given, os.environ))
        return limits.EXIT_OK
    if command in ("plan", "doctor"):
        return _look(command, options)
    share = _share(options)
    config = share.config
    if command == "up":
        return _up(share, options)
    if command in _ROLES:
        _prepare(share, command, options)
        with found_as(config, command, getattr(options, "rank", None), _warn):
            return _run_role(config, command, options)
    if command in ("restart", "drain"):
        return _operate(config, options)
    if command == "keys":
        from services.commands import host_keys

        print_line(host_keys.run(config.keys_dir, options))
        return limits.EXIT_OK
    if command == "api-key":
        from services.commands import api_key

        print_line(api_key.run(config, options))
        return limits.EXIT_OK
    if command == "cache":
        return _cache(config, options)
    if command == "verify":
        from services.commands.verify import command as verify
        from services.supervisor.console.console import Console

        console = Console(sys.stdout)
        return standard_streams.exit_code_if_written(
            verify.run(config, options, console), console.lost
        )
    assert command == "status"
    return _status(config, as_json=options.json)


def _look(command: str, options: argparse.Namespace) -> int:
    """Say what can be said of model and hosts before anything runs."""
    if command == "plan":
        from services.commands.planning import main as planning

        text, code = planning.run(options, os.environ)
    else:
        from services.commands.doctor import command as doctor

        text, code = doctor.run(options, os.environ)
    print_line(text)
    return code


def _up(share: HostShare, options: argparse.Namespace) -> int:
    if options.dry_run:
        from services.commands.deployment import dry_run

        print_line(dry_run.one_machine(share))
        return limits.EXIT_OK
    from services.supervisor import main as supervisor

    _look_ahead(share)
    return supervisor.run(share)


def _prepare(share: HostShare, command: str, options: argparse.Namespace) -> None:
    if command == "rank-worker":
        host_selection.check_rank_is_here(share, options.rank)
    if command == "scheduler":
        share.place_files()


def _look_ahead(share: HostShare) -> None:
    """Refuse what cannot work before anything is started, and say what has no effect."""
    said = adapters.check(share.config) if share.roles.ranks else []
    said += settings_without_effect(share.config)
    # An inventory's own table is checked already, and is not written yet.
    if share.roles.scheduler and not share.files:
        said += read_world_files(share.config).left_aside
    for sentence in said:
        _warn(sentence)


def _warn(sentence: str) -> None:
    print(f"lockstep: warning: {sentence}", file=sys.stderr)


def _run_role(config: Config, command: str, options: argparse.Namespace) -> int:
    if command == "gateway":
        from services.gateway import main as gateway

        return gateway.run(config)
    if command == "scheduler":
        from services.scheduler import main as scheduler

        return scheduler.run(config)
    if command == "rank-worker":
        from services.rank_worker import main as rank_worker

        adapters.check(config)
        return rank_worker.run(config, options.rank)
    assert command == "cache-store"
    from services.cache_store import main as cache_store

    return cache_store.run(config)


def _operate(config: Config, options: argparse.Namespace) -> int:
    from services.commands import lifecycle
    from services.supervisor.console.console import Console

    console = Console(sys.stdout)
    if options.command == "restart":
        code = lifecycle.restart(config, options.role, options.number, console)
    else:
        is_on = not options.off
        code = lifecycle.drain(config, is_on=is_on, wait_s=options.wait, console=console)
    return standard_streams.exit_code_if_written(code, console.lost)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="lockstep",
        description="Serves one large language model from many machines as if it were one.",
    )
    parser.add_argument("--version", action="version", version=f"lockstep {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    up = commands.add_parser("up", help="start everything on this machine and keep it running")
    flags.add_to(up)
    up.add_argument("--dry-run", action="store_true", help="only say what would run, and where")
    for role, summary in _ROLES.items():
        flags.add_to(commands.add_parser(role, help=summary))
    commands.choices["rank-worker"].add_argument(
        "--rank", metavar="R", type=int, default=-1, help="the rank to be (default: any)"
    )
    status = commands.add_parser("status", help="say how a running Lockstep is")
    flags.add_to(status)
    status.add_argument("--json", action="store_true", help="as one JSON object")
    _add_orders(commands)
    cache = commands.add_parser("cache", help="look at stored KV blocks, check or delete them")
    _add_cache_verbs(cache)
    keys = commands.add_parser("keys", help="make keys for links between hosts, and allow others'")
    _add_keys_actions(keys)
    api_key = commands.add_parser("api-key", help="make, list and remove API keys of clients")
    _add_api_key_actions(api_key)
    _add_services(commands)
    _add_verify(commands)
    _add_looking_ahead(commands)
    commands.add_parser(
        "bench",
        help="measure: overhead, peers, steps, gateway, cache, speculation, ranks",
        add_help=False,
    )
    return parser


def _add_verify(commands: "argparse._SubParsersAction[Parser]") -> None:
    from services.commands.verify import arguments

    verify = commands.add_parser("verify", help="check that a running Lockstep does all it should")
    flags.add_to(verify)
    arguments.add_arguments(verify)


def _add_looking_ahead(commands: "argparse._SubParsersAction[Parser]") -> None:
    from services.commands.doctor import arguments as doctor
    from services.commands.planning import arguments as planning

    planning.add_arguments(
        commands.add_parser("plan", help="say what of a model fits where, before it is loaded")
    )
    doctor.add_arguments(commands.add_parser("doctor", help="check hosts, cables and settings"))


def _add_orders(commands: "argparse._SubParsersAction[Parser]") -> None:
    restart = commands.add_parser("restart", help="have a role start anew; no stream is lost")
    restart.add_argument(
        "role",
        metavar="ROLE",
        choices=_RESTARTED,
        help="gateway, scheduler, store, rank N, or ranks (all)",
    )
    restart.add_argument("number", metavar="N", nargs="?", type=int, help="which rank")
    flags.add_to(restart)
    drain = commands.add_parser("drain", help="refuse new requests and let those that run finish")
    drain.add_argument("--off", action="store_true", help="take new requests again")
    drain.add_argument(
        "--wait",
        metavar="SECONDS",
        type=_seconds,
        help="how long to wait until none is open, 0: not at all (default: scheduler.drain_s)",
    )
    flags.add_to(drain)


def _add_services(commands: "argparse._SubParsersAction[Parser]") -> None:
    from services.commands.deployment import main as deployment

    for kind, summary in deployment.KINDS.items():
        deployment.add_arguments(commands.add_parser(kind, help=summary))


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        seconds = float(text)
        if 0.0 <= seconds < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")


def _add_cache_verbs(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, summary in _CACHE_VERBS.items():
        verb = verbs.add_parser(name, help=summary)
        flags.add_to(verb)
        verb.add_argument("--json", action="store_true", help="as one JSON object")
        if name == "stats":
            verb.set_defaults(namespace="")
        else:
            verb.add_argument(
                "--namespace",
                metavar="NS",
                default="",
                help="only this one; the first digits will do (default: all)",
            )


def _add_keys_actions(parser: argparse.ArgumentParser) -> None:
    from services.commands import host_keys

    for action in host_keys.add_arguments(parser):
        action.add_argument(
            "--config", metavar="FILE", help="TOML file with settings for every role"
        )
        action.add_argument("--inventory", metavar="FILE", help="TOML file of several hosts")
        action.add_argument("--host", metavar="H", help="with --inventory: which host this is")


def _add_api_key_actions(parser: argparse.ArgumentParser) -> None:
    from services.commands import api_key

    for action in api_key.add_arguments(parser):
        flags.add_to(action)


def _share(options: argparse.Namespace) -> HostShare:
    """Merge file, environment and flags into what this machine runs."""
    inventory = getattr(options, "inventory", None)
    return host_selection.select_share(
        inventory, options.config, flags.settings(options), os.environ
    )


def _status(config: Config, *, as_json: bool) -> int:
    from services.supervisor.status.service_queries import ask_status
    from services.supervisor.status.status_table import render

    status = ask_status(config)
    if as_json:
        print_line(msgspec.json.format(msgspec.json.encode(status)).decode())
    else:
        print_line(render(status))
    return limits.EXIT_OK


def _cache(config: Config, options: argparse.Namespace) -> int:
    from services.commands.cache import command

    answer = command.run(config, options.verb, options.namespace)
    if options.json:
        print_line(msgspec.json.format(msgspec.json.encode(answer.facts)).decode())
    else:
        print_line(answer.text)
    return answer.exit_code


def _version() -> str:
    try:
        return metadata.version("lockstep")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
