"""The one console script: reads the command line, picks a role and imports only that role.

Errors that an operator can act on are one sentence on standard error and an exit code; a traceback
means a bug in Lockstep.
"""

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any, NoReturn

import msgspec

from shared import limits
from shared.config import load_config, prepare_run_dir
from shared.errors import LockstepError, UsageError
from shared.process_file import ProcessFile
from shared.settings import Config

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""

_FLAGS = {
    "model": ("model.path", "PATH_OR_HF_ID", "the model: a folder, a Hugging Face id, or demo"),
    "ranks": ("world.size", "N", "number of ranks"),
    "host": ("gateway.host", "H", "address on which the gateway listens"),
    "port": ("gateway.port", "P", "port on which the gateway listens"),
    "speculative-method": ("speculation.method", "M", "how drafts are proposed: ngram or off"),
    "num-speculative-tokens": ("speculation.tokens_max", "N", "most drafts per step"),
    "speculative-disable-batch-size": (
        "speculation.batch_max",
        "N",
        "with more running sequences none gets drafts; 0: as measured",
    ),
}
"""Flag -> the setting that it overrides, the name of its value, its help."""

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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Refuse a command line as every other error: one sentence, our exit code."""
        raise UsageError(f"{message[:1].upper()}{message[1:]}. See `{self.prog} --help`.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone (`lockstep status | head -1`). Python would complain once
        # more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return limits.EXIT_OK
    return code


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["bench"]:
        from services.bench import main as bench

        return bench.run(arguments[1:])
    options = _parser().parse_args(arguments)
    config = _config(options)
    command: str = options.command
    if command == "up":
        from services.supervisor import main as supervisor

        return supervisor.run(config)
    if command in _ROLES:
        with _found_as(config, command, options):
            return _run_role(config, command, options)
    if command in ("restart", "drain"):
        return _operate(config, options)
    if command == "keys":
        from services import keys_command

        print(keys_command.run(config.keys_dir, options))
        return limits.EXIT_OK
    if command == "api-key":
        from services.gateway import api_keys_command

        print(api_keys_command.run(config, options))
        return limits.EXIT_OK
    if command == "cache":
        return _cache(config, options)
    assert command == "status"
    return _status(config, as_json=options.json)


def _run_role(config: Config, command: str, options: argparse.Namespace) -> int:
    if command == "gateway":
        from services.gateway import main as gateway

        return gateway.run(config)
    if command == "scheduler":
        from services.scheduler import main as scheduler

        return scheduler.run(config)
    if command == "rank-worker":
        from services.rank_worker import main as rank_worker

        return rank_worker.run(config, options.rank)
    assert command == "cache-store"
    from services.cache_store import main as cache_store

    return cache_store.run(config)


@contextlib.contextmanager
def _found_as(config: Config, command: str, options: argparse.Namespace) -> Iterator[None]:
    """Hold the role's file in the run folder, by which `lockstep restart` finds this process."""
    rank = getattr(options, "rank", None)
    name = {"cache-store": "store", "rank-worker": "rank"}.get(command, command)
    if rank is not None and rank >= 0:
        name = f"rank-{rank}"
    try:
        file = ProcessFile(prepare_run_dir(config), name, by_pid=rank == -1)
    except OSError as error:
        # A full disk is no reason not to serve.
        print(
            f"lockstep: Cannot write to {config.run_dir}: {error.strerror}. `lockstep restart` "
            "will not find this process.",
            file=sys.stderr,
        )
        yield
        return
    try:
        yield
    finally:
        file.release()


def _operate(config: Config, options: argparse.Namespace) -> int:
    from services import operator_command
    from services.supervisor.console import Console

    console = Console(sys.stdout)
    if options.command == "restart":
        return operator_command.restart(config, options.role, options.number, console)
    is_on = not options.off
    return operator_command.drain(config, is_on=is_on, wait_s=options.wait, console=console)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lockstep",
        description="Serves one large language model from many machines as if it were one.",
    )
    parser.add_argument("--version", action="version", version=f"lockstep {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    up = commands.add_parser("up", help="start everything on this machine and keep it running")
    _add_overrides(up)
    for role, summary in _ROLES.items():
        _add_overrides(commands.add_parser(role, help=summary))
    commands.choices["rank-worker"].add_argument(
        "--rank", metavar="R", type=int, default=-1, help="the rank to be (default: any)"
    )
    status = commands.add_parser("status", help="say how a running Lockstep is")
    _add_overrides(status)
    status.add_argument("--json", action="store_true", help="as one JSON object")
    _add_orders(commands)
    cache = commands.add_parser("cache", help="look at stored KV blocks, check or delete them")
    _add_cache_verbs(cache)
    keys = commands.add_parser("keys", help="make keys for links between hosts, and allow others'")
    _add_keys_actions(keys)
    api_key = commands.add_parser("api-key", help="make, list and remove API keys of clients")
    _add_api_key_actions(api_key)
    commands.add_parser(
        "bench",
        help="measure: overhead, peers, steps, gateway, cache, speculation",
        add_help=False,
    )
    return parser


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings for every role")
    for flag, (_, metavar, summary) in _FLAGS.items():
        parser.add_argument(f"--{flag}", metavar=metavar, help=summary)


def _add_orders(commands: "argparse._SubParsersAction[_Parser]") -> None:
    restart = commands.add_parser("restart", help="have a role start anew; no stream is lost")
    restart.add_argument(
        "role",
        metavar="ROLE",
        choices=_RESTARTED,
        help="gateway, scheduler, store, rank N, or ranks (all)",
    )
    restart.add_argument("number", metavar="N", nargs="?", type=int, help="which rank")
    _add_overrides(restart)
    drain = commands.add_parser("drain", help="refuse new requests and let those that run finish")
    drain.add_argument("--off", action="store_true", help="take new requests again")
    drain.add_argument(
        "--wait",
        metavar="SECONDS",
        type=_seconds,
        help="how long to wait until none is open, 0: not at all (default: scheduler.drain_s)",
    )
    _add_overrides(drain)


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
        _add_overrides(verb)
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
    from services import keys_command

    for action in keys_command.add_arguments(parser):
        action.add_argument(
            "--config", metavar="FILE", help="TOML file with settings for every role"
        )


def _add_api_key_actions(parser: argparse.ArgumentParser) -> None:
    from services.gateway import api_keys_command

    for action in api_keys_command.add_arguments(parser):
        _add_overrides(action)


def _config(options: argparse.Namespace) -> Config:
    """Merge file, environment and flags. Values stay strings: the check names key and range."""
    flags: dict[str, Any] = {
        key: getattr(options, flag.replace("-", "_"), None) for flag, (key, *_) in _FLAGS.items()
    }
    return load_config(options.config, flags, os.environ)


def _status(config: Config, *, as_json: bool) -> int:
    from services.supervisor.status import ask_status
    from services.supervisor.status_table import render

    status = ask_status(config)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(status)).decode())
    else:
        print(render(status))
    return limits.EXIT_OK


def _cache(config: Config, options: argparse.Namespace) -> int:
    from services.cache_store import command

    answer = command.run(config, options.verb, options.namespace)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(answer.facts)).decode())
    else:
        print(answer.text)
    return answer.exit_code


def _version() -> str:
    try:
        return metadata.version("lockstep")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
