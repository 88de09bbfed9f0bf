"""`lockstep bench …`: the command lines of the benchmarks.

Contenders run in turn within one run (A B A B …), so that what else the machine does hits all of
them alike; every figure is the median over the repeats with its range, and ratios are taken repeat
by repeat.

`--json` prints one document on standard output, whose shape is stable:

    {
      "schema": "lockstep.bench/1",
      "benchmark": "overhead" | "peers" | "steps" | "gateway" | "cache" | "speculation" | "ranks" |
                   "splits",
      "machine": {"system": …, "processor": …, "cores": …, "memory_gib": …, "mlx": …, …},
      "settings": {…},                    what was asked for
      "cases": [
        {
          "conditions": {"prompt_tokens": 64, "clients": 16},
          "series": {                     contender -> metric -> figure
            "lockstep": {
              "tokens_per_s": {"median": …, "low": …, "high": …, "values": [one per repeat]}
            }
          },
          "ratios": {"lockstep/batch_generator tokens_per_s": figure}
        }
      ],
      "notes": ["…"]
    }

A metric's unit is in its name; `ttft` is the time to the first token, `itl` the time between
tokens, `p50` and `p95` are percentiles within one repeat. A metric that could not be had is left
out.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from services.bench import (
    cache,
    gateway,
    model_folder,
    overhead,
    overload,
    peers,
    random_model,
    ranks,
    speculation,
    speculation_check,
    speculation_texts,
    splits,
    steps,
)
from services.bench.cache_setup import CachePlan
from services.bench.report import Report, to_json, to_text
from shared import limits
from shared.errors import LockstepError, UsageError
from shared.model_location import DEMO, local_folder

_CACHE = "what reused prefixes save, in memory, on SSD and after a restart, and what keeping costs"
_SPECULATION = "tokens/s with and without drafts, on text that repeats itself and on text that not"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[:1].upper()}{message[1:]}. See `{self.prog} --help`.")


def run(argv: list[str]) -> int:
    """Run one benchmark; return an exit code."""
    try:
        arguments = parse(argv)
        # Unwinds, so that everything that was started is stopped.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        report, columns = _measure(arguments)
    except LockstepError as error:
        print(f"lockstep bench: {error}", file=sys.stderr)
        return error.exit_code
    print(to_json(report) if arguments.json else to_text(report, columns))
    return limits.EXIT_OK


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments, defaults filled in.

    Raises:
        UsageError: they cannot be understood.
    """
    parser = _Parser(prog="lockstep bench", description="Measure Lockstep on this machine.")
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, text in (
        ("overhead", "the whole stack over HTTP against mlx_lm's BatchGenerator in one process"),
        ("peers", "the whole stack against mlx_lm.server and, where installed, vllm-mlx"),
    ):
        one = commands.add_parser(name, help=text, description=text)
        _common(one, repeats=5)
        _model(one)
        one.add_argument("--clients", type=_counts, help="comma-separated (default 1,4,8,16)")
        one.add_argument("--prompt-tokens", type=_counts, help="comma-separated (default 64,1024)")
        one.add_argument("--new-tokens", type=_count, default=64, help="completion length")
        one.add_argument("--rounds", type=_count, default=3, help="requests per client and repeat")
        one.add_argument("--ranks", type=_count, default=1)
        _settings(one)
        if name == "peers":
            one.add_argument("--vllm-mlx", metavar="PROGRAM", help="path of vllm-mlx's program")
    text = "what scheduling exposes to the device, with a rank that sleeps"
    one = commands.add_parser("steps", help=text, description=text)
    _common(one, repeats=5)
    one.add_argument("--step-ms", type=_milliseconds, default=[2.0, 10.0], help="comma-separated")
    one.add_argument("--sequences", type=_count, default=16)
    one.add_argument("--steps", type=_count, default=500, help="steps per repeat")
    one.add_argument("--spin", action="store_true", help="also with a device that spins")
    text = "how many streamed tokens per second one gateway writes"
    one = commands.add_parser("gateway", help=text, description=text)
    _common(one, repeats=5)
    _model(one)
    one.add_argument("--streams", type=_counts, default=[16, 64], help="comma-separated")
    one.add_argument("--windows", type=_counts, default=[4, 64], help="steps under way")
    one.add_argument("--tokens", type=_count, default=300_000, help="over all streams, per repeat")
    _cache(commands.add_parser("cache", help=_CACHE, description=_CACHE))
    one = commands.add_parser("ranks", help=ranks.SUMMARY, description=ranks.SUMMARY)
    _common(one, repeats=3)
    _model(one)
    ranks.add_arguments(one, _counts)
    one.add_argument("--new-tokens", type=_count, default=128, help="completion length")
    one.add_argument("--ranks", type=_count, default=2)
    _settings(one)
    one = commands.add_parser("overload", help=overload.SUMMARY, description=overload.SUMMARY)
    _common(one, repeats=3)
    _model(one)
    overload.add_arguments(one, _counts)
    _settings(one)
    one = commands.add_parser("splits", help=splits.SUMMARY, description=splits.SUMMARY)
    _common(one, repeats=3)
    _model(one)
    splits.add_arguments(one, _counts)
    _speculation(commands.add_parser("speculation", help=_SPECULATION, description=_SPECULATION))
    return _quickened(parser.parse_args(argv))


def _cache(parser: argparse.ArgumentParser) -> None:
    _common(parser, repeats=3)
    _model(parser)
    parser.add_argument(
        "--parts", type=_parts, help=f"comma-separated (default {','.join(cache.PARTS)})"
    )
    parser.add_argument("--prefixes", type=_counts, help="tokens (default 1024,4096,16384)")
    parser.add_argument("--turns", type=_count, help="of the replayed session (default 12)")
    parser.add_argument("--tokens", type=_count, help="of its last request (default 6000)")
    parser.add_argument("--ranks", type=_count, default=1)
    parser.add_argument(
        "--directory", metavar="FOLDER", type=Path, help="where blocks are stored for the run"
    )
    _settings(parser)


def _speculation(parser: argparse.ArgumentParser) -> None:
    _common(parser, repeats=5)
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        default=DEMO,
        help="a trained model's folder (default demo): random weights write no such texts",
    )
    parser.add_argument("--method", choices=speculation.METHODS, default=speculation.NGRAM)
    parser.add_argument("--draft-model", metavar="FOLDER", help="a draft model or head to compare")
    text = "only compare the texts of so many requests of all kinds, with drafts and without"
    parser.add_argument("--check", type=_count, metavar="N", help=text)
    kinds = ",".join(speculation_texts.KINDS)
    parser.add_argument("--texts", type=_texts, help=f"comma-separated (default {kinds})")
    parser.add_argument("--clients", type=_counts, default=[1, 8], help="comma-separated")
    parser.add_argument("--new-tokens", type=_count, default=256, help="longest completion")
    parser.add_argument("--rounds", type=_count, default=4, help="requests per client and repeat")
    parser.add_argument("--ranks", type=_count, default=1)
    _settings(parser)


def _common(parser: argparse.ArgumentParser, repeats: int) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--repeats", type=_count, default=repeats)
    parser.add_argument(
        "--quick", action="store_true", help="fewer cases and repeats: a smoke test"
    )
    parser.add_argument(
        "--tries",
        type=_count,
        default=1,
        help="measure a repeat up to so often while other processes use the machine (default 1)",
    )
    parser.add_argument("--logs", metavar="FOLDER", help="keep the processes' logs there")


def _settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="a setting for the stack, for example scheduler.decode_stall_ms=50",
    )


def _model(parser: argparse.ArgumentParser) -> None:
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--model", metavar="FOLDER", help='a model\'s folder, or "demo"')
    choice.add_argument(
        "--preset",
        choices=sorted(random_model.PRESETS),
        help="random weights, made on first use (default tiny; cache: long; splits: tiny-moe)",
    )


def _quickened(arguments: argparse.Namespace) -> argparse.Namespace:
    quick = arguments.quick
    if arguments.benchmark in ("overhead", "peers"):
        arguments.clients = arguments.clients or ([1, 16] if quick else [1, 4, 8, 16])
        arguments.prompt_tokens = arguments.prompt_tokens or ([64] if quick else [64, 1_024])
    if arguments.benchmark == "cache":
        arguments.parts = arguments.parts or list(cache.PARTS)
        arguments.prefixes = arguments.prefixes or ([1_024] if quick else [1_024, 4_096, 16_384])
        arguments.turns = arguments.turns or (4 if quick else 12)
        arguments.tokens = arguments.tokens or (1_500 if quick else 6_000)
    if arguments.benchmark == "speculation":
        arguments.texts = arguments.texts or list(speculation_texts.KINDS)
        arguments.rounds = min(arguments.rounds, 2) if quick else arguments.rounds
    if quick:
        arguments.repeats = min(arguments.repeats, 2)
        if arguments.benchmark == "steps":
            arguments.steps = min(arguments.steps, 200)
        if arguments.benchmark == "gateway":
            arguments.tokens = min(arguments.tokens, 50_000)
    return arguments


def _measure(arguments: argparse.Namespace) -> tuple[Report, list[str]]:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-logs-") as temporary:
        logs = Path(arguments.logs or temporary)
        logs.mkdir(parents=True, exist_ok=True)
        match arguments.benchmark:
            case "steps":
                plan = steps.StepsPlan(
                    step_ms=arguments.step_ms,
                    sequences=arguments.sequences,
                    steps=arguments.steps,
                    repeats=arguments.repeats,
                    spins=arguments.spin,
                    log_folder=logs,
                    tries=arguments.tries,
                )
                return steps.measure(plan), steps.COLUMNS
            case "gateway":
                flood = gateway.GatewayPlan(
                    model=_folder(arguments, logs),
                    streams=arguments.streams,
                    windows=arguments.windows,
                    tokens=arguments.tokens,
                    repeats=arguments.repeats,
                    log_folder=logs,
                    tries=arguments.tries,
                )
                return gateway.measure(flood), gateway.COLUMNS
            case "cache":
                return cache.measure(_cache_plan(arguments, logs)), cache.COLUMNS
            case "speculation":
                drafted = _speculation_plan(arguments, logs)
                if arguments.check:
                    checked = speculation_check.measure(drafted, arguments.check)
                    return checked, speculation_check.COLUMNS
                return speculation.measure(drafted), speculation.COLUMNS
            case "overload":
                flooded = overload.plan_of(arguments, _folder(arguments, logs), logs)
                flooded.settings.update(_setting(text) for text in arguments.set)
                return overload.measure(flooded), overload.COLUMNS
            case "ranks":
                before = ranks.earlier(arguments.compare)
                world = ranks.plan_of(arguments, _folder(arguments, logs), logs)
                world.settings.update(_setting(text) for text in arguments.set)
                return ranks.measure(world, before), ranks.COLUMNS
            case "splits":
                divided = splits.plan_of(arguments, _folder(arguments, logs), logs)
                return splits.measure(divided), splits.COLUMNS
            case "peers":
                return peers.measure(_plan(arguments, logs), arguments.vllm_mlx), peers.COLUMNS
            case _:
                return overhead.measure(_plan(arguments, logs)), overhead.COLUMNS


def _plan(arguments: argparse.Namespace, logs: Path) -> overhead.Plan:
    return overhead.Plan(
        model=_folder(arguments, logs),
        ranks=arguments.ranks,
        concurrencies=arguments.clients,
        prompt_tokens=arguments.prompt_tokens,
        new_tokens=arguments.new_tokens,
        repeats=arguments.repeats,
        rounds=arguments.rounds,
        log_folder=logs,
        tries=arguments.tries,
        settings=dict(_setting(text) for text in arguments.set),
    )


def _cache_plan(arguments: argparse.Namespace, logs: Path) -> CachePlan:
    if arguments.directory is not None and not arguments.directory.is_dir():
        raise UsageError(f"--directory {arguments.directory}: there is no such folder.")
    return CachePlan(
        model=_folder(arguments, logs),
        ranks=arguments.ranks,
        parts=arguments.parts,
        prefixes=arguments.prefixes,
        turns=arguments.turns,
        tokens=arguments.tokens,
        repeats=arguments.repeats,
        log_folder=logs,
        directory=arguments.directory,
        tries=arguments.tries,
        settings=dict(_setting(text) for text in arguments.set),
    )


def _speculation_plan(arguments: argparse.Namespace, logs: Path) -> speculation.SpeculationPlan:
    if (arguments.draft_model is None) != (arguments.method == speculation.NGRAM):
        raise UsageError("--draft-model: methods draft_model and eagle need it, ngram has none.")
    draft = local_folder(arguments.draft_model) if arguments.draft_model else None
    if arguments.draft_model and draft is None:
        raise UsageError(f"{arguments.draft_model} is no folder: benchmarks need the files here.")
    return speculation.SpeculationPlan(
        model=_folder(arguments, logs),
        method=arguments.method,
        draft_model=draft.resolve() if draft else None,
        ranks=arguments.ranks,
        texts=arguments.texts,
        clients=arguments.clients,
        new_tokens=arguments.new_tokens,
        rounds=arguments.rounds,
        repeats=arguments.repeats,
        log_folder=logs,
        tries=arguments.tries,
        settings=dict(_setting(text) for text in arguments.set),
    )


def _folder(arguments: argparse.Namespace, logs: Path) -> Path:
    # No default in the parser: argparse overlooks a conflict with a value equal to the default.
    usual = {"cache": "long", "splits": "tiny-moe"}.get(arguments.benchmark, "tiny")
    preset = getattr(arguments, "preset", None) or usual
    return model_folder.find_or_make(arguments.model, preset, logs)


def _setting(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    section, dot, name = key.partition(".")
    if not (separator and dot and section and name):
        raise UsageError(f"--set {text}: write SECTION.KEY=VALUE.")
    return f"LOCKSTEP_{section}_{name}".upper(), value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _parts(text: str) -> list[str]:
    return _known(text, "part", cache.PARTS)


def _texts(text: str) -> list[str]:
    return _known(text, "text", speculation_texts.KINDS)


def _known(text: str, what: str, names: Iterable[str]) -> list[str]:
    given = text.split(",")
    if unknown := set(given) - set(names):
        raise argparse.ArgumentTypeError(f"there is no {what} {min(unknown)!r}")
    return given


def _milliseconds(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if min(values) <= 0.0:
        raise argparse.ArgumentTypeError("milliseconds must be more than 0")
    return values
