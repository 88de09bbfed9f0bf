"""The one console script: reads the command line, picks a role and imports only that role.

Errors that an operator can act on are one sentence on standard error and an exit code; a traceback
means a bug in Lockstep.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NoReturn

import msgspec

from shared import limits
from shared.config import Config, load_config
from shared.errors import LockstepError, UsageError

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""

_FLAGS = {
    "model": ("model.path", "PATH_OR_HF_ID", "the model: a folder, a Hugging Face id, or demo"),
    "ranks": ("world.size", "N", "number of ranks"),
    "host": ("gateway.host", "H", "address on which the gateway listens"),
    "port": ("gateway.port", "P", "port on which the gateway listens"),
}
"""Flag -> the setting that it overrides, the name of its value, its help."""

_ROLES = {
    "gateway": "run one gateway: HTTP and text",
    "scheduler": "run the scheduler: queue, batch membership, step plans",
    "rank-worker": "run one rank worker: one device's share of the model",
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
    if command == "gateway":
        from services.gateway import main as gateway

        return gateway.run(config)
    if command == "scheduler":
        from services.scheduler import main as scheduler

        return scheduler.run(config)
    if command == "rank-worker":
        from services.rank_worker import main as rank_worker

        return rank_worker.run(config, options.rank)
    assert command == "status"
    return _status(config, as_json=options.json)


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
    commands.add_parser("bench", help="measure: overhead, peers, steps, gateway", add_help=False)
    return parser


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings for every role")
    for flag, (_, metavar, summary) in _FLAGS.items():
        parser.add_argument(f"--{flag}", metavar=metavar, help=summary)


def _config(options: argparse.Namespace) -> Config:
    """Merge file, environment and flags. Values stay strings: the check names key and range."""
    flags: dict[str, Any] = {key: getattr(options, flag) for flag, (key, *_) in _FLAGS.items()}
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


def _version() -> str:
    try:
        return metadata.version("lockstep")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
