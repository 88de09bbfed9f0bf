"""Command `lockstep profile`. Owns the steps that it measures, and how their parts are shown."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec
from msgspec import Struct

from services.commands.checks.text_table import table_lines
from services.commands.cli.click_support import Command, json_option, json_text
from services.commands.cli.flags import SettingSources, settings_options
from services.commands.cli.running_config import running_config
from services.commands.verify.gateway import Gateway, NoAnswer
from services.supervisor.console.console import Console
from services.supervisor.status.profile_query import ProfileQuery
from services.supervisor.status.progress_text import base_url
from shared import limits
from shared.configuration.settings import Config
from shared.errors import UnavailableError, UsageError
from shared.measurements.step_losses import Loss, find_losses, mean_seconds
from shared.messages import MeasuredStep
from shared.messages.step_profile import PARTS
from shared.os.standard_streams import exit_code_if_written

KEY_VARIABLE = "LOCKSTEP_API_KEY"
DEADLINE_S = 120.0
_KINDS = ("prefill", "decode", "verify")
_REQUEST = "Describe how a cluster of computers can answer as one large language model."
_TIMEOUT_S = 60.0


class PartProfile(Struct, frozen=True, kw_only=True):
    """One part of a step on one rank; seconds are means, the others are of the last step."""

    part: str
    seconds: float = 0.0
    """Without the parts within it."""
    share: float = 0.0
    """Of the rank's step."""
    runs: int = 0
    bytes: int = 0
    """Of the weights that it reads; of collectives, that the rank contributes."""
    primitives: int = 0
    """MLX operations."""


class RankProfile(Struct, frozen=True, kw_only=True):
    """All parts of a step on one rank."""

    rank: int
    seconds: float
    kv_bytes: int
    """Of keys and values that attention reads in the last step."""
    bytes_per_s: float
    """That the device can read and write; 0: not measured."""
    parts: list[PartProfile]


class KindProfile(Struct, frozen=True, kw_only=True):
    """The steps of one kind, on average."""

    kind: str
    steps: int
    prefill_tokens: float
    decodes: float
    """Rows that decode."""
    ranks: list[RankProfile]
    losses: list[Loss]
    """The largest first."""


class Profile(Struct, frozen=True, kw_only=True):
    """The result of the command."""

    model: str
    kinds: list[KindProfile]


@click.command(cls=Command)
@settings_options
@json_option
@click.option(
    "--steps",
    type=click.IntRange(1, limits.PROFILES_PER_MESSAGE_MAX),
    default=20,
    help="How many steps to measure (default: 20).",
)
@click.option(
    "--request",
    "text",
    metavar="TEXT",
    default="",
    help="Prompt of a request to measure; without it, one is sent if no request runs.",
)
@click.option(
    "--compare",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Result of an earlier `lockstep profile --json`: show the ratio of each part to it.",
)
@click.option(
    "--api-key",
    metavar="KEY",
    default="",
    help=f"API key of this server (default: {KEY_VARIABLE}).",
)
def profile(
    sources: SettingSources,
    *,
    as_json: bool,
    steps: int,
    text: str,
    compare: Path | None,
    api_key: str,
) -> int:
    """Show where the time of a step goes, by part and rank, and the largest loss.

    The ranks wait for the device between the parts of a measured step, so it takes two to four
    times as long as others; the tokens are the same.
    """
    config, console = running_config(sources), Console(sys.stderr)
    key = api_key or os.environ.get(KEY_VARIABLE, "")
    before = _read(compare) if compare is not None else None
    with ProfileQuery(config) as query:
        status = query.status()
        needs_request = bool(text) or status.running == 0
        problems: list[str] = []
        try:
            with contextlib.ExitStack() as requests:
                if needs_request:
                    sending = _requesting(config, text or _REQUEST, steps, key)
                    problems = requests.enter_context(sending)
                found = query.measure(
                    steps, DEADLINE_S, lambda count: console.show_progress(f"{count} of {steps}")
                )
        finally:
            console.show_progress("")
    if not found:
        said = f" {problems[0]}" if problems else ""
        raise UnavailableError(f"No step was executed within {DEADLINE_S:.0f} s.{said}")
    result = summarize(status.model, found)
    lines = json_text(result) if as_json else "\n".join(render(result, before))
    output = Console(sys.stdout)
    output.print_line(lines)
    return exit_code_if_written(limits.EXIT_OK, output.write_error)


def summarize(model: str, steps: Sequence[MeasuredStep]) -> Profile:
    """Return the parts of measured steps, averaged by kind of step and rank.

    Args:
        model: name of the model.
        steps: measured steps that all ranks have reported.
    """
    by_kind = {kind: [one for one in steps if one.kind == kind] for kind in _KINDS}
    kinds = [_summarize_kind(kind, found) for kind, found in by_kind.items() if found]
    return Profile(model=model, kinds=kinds)


def render(result: Profile, before: Profile | None = None) -> list[str]:
    """Return the lines of the command's output.

    Args:
        result: the parts of the steps.
        before: another result, with which each part is compared.
    """
    lines: list[str] = []
    for kind in result.kinds:
        tokens = f"{kind.prefill_tokens:.0f} prompt tokens, " if kind.prefill_tokens else ""
        lines.append(f"{kind.kind}: {kind.steps} steps, {tokens}{kind.decodes:.1f} rows")
        earlier = (
            next((one for one in before.kinds if one.kind == kind.kind), None) if before else None
        )
        lines += table_lines(_rows(kind, earlier), indent=2)
        lines += [f"  {loss.sentence}" for loss in kind.losses[:1]]
        lines.append("")
    return lines[:-1]


def _summarize_kind(kind: str, steps: Sequence[MeasuredStep]) -> KindProfile:
    ranks = []
    for rank, parts in mean_seconds(steps).items():
        profiles = [one for step in steps for one in step.profiles if one.rank == rank]
        last = {total.part: total for total in profiles[-1].parts}
        seconds = sum(parts.values())
        ranks.append(
            RankProfile(
                rank=rank,
                seconds=seconds,
                kv_bytes=profiles[-1].kv_bytes,
                bytes_per_s=profiles[-1].bytes_per_s,
                parts=[
                    PartProfile(
                        part=part,
                        seconds=parts[part],
                        share=parts[part] / seconds,
                        runs=last[part].runs if part in last else 0,
                        bytes=last[part].bytes if part in last else 0,
                        primitives=last[part].primitives if part in last else 0,
                    )
                    for part in PARTS
                    if part in parts
                ],
            )
        )
    return KindProfile(
        kind=kind,
        steps=len(steps),
        prefill_tokens=sum(one.prefill_tokens for one in steps) / len(steps),
        decodes=sum(one.decodes for one in steps) / len(steps),
        ranks=ranks,
        losses=find_losses(steps),
    )


def _rows(kind: KindProfile, before: KindProfile | None) -> list[list[str]]:
    ratios = before is not None
    known = {
        (rank.rank, part.part): part.seconds
        for rank in (before.ranks if before else [])
        for part in rank.parts
    }
    header, total = ["part"], ["step"]
    for rank in kind.ranks:
        header += [f"rank {rank.rank}", "", *(["ratio"] if ratios else [])]
        total += [_ms(rank.seconds), "100%", *([""] if ratios else [])]
    rows = [[*header, "runs", "operations"]]
    for name in dict.fromkeys(part.part for rank in kind.ranks for part in rank.parts):
        row, runs, operations = [name], 0, 0
        for rank in kind.ranks:
            found = next((one for one in rank.parts if one.part == name), PartProfile(part=name))
            row += [_ms(found.seconds), f"{found.share:.0%}"]
            runs, operations = max(runs, found.runs), max(operations, found.primitives)
            if ratios:
                old = known.get((rank.rank, name))
                row.append(f"{found.seconds / old:.2f}" if old else "-")
        rows.append([*row, f"{runs}", f"{operations or '-'}"])
    return [*rows, [*total, "", ""]]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _read(file: Path) -> Profile:
    """Read an earlier result.

    Raises:
        UsageError: when the file has another content.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=Profile)
    except (OSError, msgspec.MsgspecError):
        raise UsageError(f"--compare: {file} is no result of `lockstep profile --json`.") from None


@contextlib.contextmanager
def _requesting(config: Config, text: str, steps: int, key: str) -> Iterator[list[str]]:
    """Send requests, one after another, until the end of the block.

    Yields:
        A list that gets a sentence if a request fails, which ends the sending.
    """
    problems: list[str] = []
    is_over = threading.Event()
    gateway = Gateway(base_url(config).removeprefix("http://"), config.served_name, key, _TIMEOUT_S)

    def send() -> None:
        while not is_over.is_set() and not problems:
            try:
                with gateway.started(prompt=text, max_tokens=2 * steps + 10) as events:
                    for _ in events:
                        if is_over.is_set():
                            break
            except NoAnswer as error:
                problems.append(str(error))

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield problems
    finally:
        is_over.set()
        thread.join(_TIMEOUT_S)
