"""Command `lockstep profile`. Owns the steps that it measures, and how their parts are shown."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
import msgspec
from msgspec import Struct

from services.commands.checks.text_table import counted, format_bytes, table_lines
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
from shared.measurements.step_losses import (
    READING_PARTS,
    Exchanges,
    Loss,
    find_losses,
    mean_exchanges,
    mean_seconds,
)
from shared.messages import MeasuredStep, StepProfile
from shared.messages.telemetry.step_profile import NO_LAYER, PARTS, Part, unpack_spans
from shared.os.standard_streams import exit_code_if_written

KEY_VARIABLE = "LOCKSTEP_API_KEY"
DEADLINE_S = 120.0
_KINDS = ("prefill", "decode", "verify")
_LAYER_PARTS = ("attention", "kv_write", "mlp", "experts", "norms")
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
    layers: int
    """That this rank computes."""
    primitives_per_layer: float
    """MLX operations of a layer, without those of collectives."""
    kv_bytes: int
    """Of keys and values that attention reads in the last step."""
    read_bytes_per_s: float
    """Weights, keys and values that its parts read, by the time of these parts."""
    bytes_per_s: float
    """That the device can read and write; 0: not measured."""
    transfer_seconds: float
    """Of its collectives and messages, even where no rank is late."""
    waiting_seconds: float
    """Of its collectives and messages, for other ranks."""
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
        # The time makes its prefix one that no cache has.
        text = text or f"{time.time_ns()}: {_REQUEST}" if needs_request else ""
        try:
            found = _measured(query, config, steps, text, key, console)
        finally:
            console.show_progress("")
    if not found:
        raise UnavailableError(f"No step was executed within {DEADLINE_S:.0f} s.")
    result = summarize(status.model, found)
    lines = json_text(result) if as_json else "\n".join(render(result, before))
    output = Console(sys.stdout)
    output.print_line(lines)
    return exit_code_if_written(limits.EXIT_OK, output.write_error)


def _measured(
    query: ProfileQuery, config: Config, steps: int, text: str, key: str, console: Console
) -> list[MeasuredStep]:
    """Measure the next steps, and if these are all prefills of our request, as many decodes.

    Args:
        query: the link to the scheduler.
        config: the settings of the Lockstep.
        steps: number of steps.
        text: prompt of the request to send; "": the requests that run are measured.
        key: API key.
        console: for the progress.

    Raises:
        UnavailableError: when the request fails.
    """
    sent = _Requests()

    def progress(count: int) -> None:
        if sent.problem:
            raise UnavailableError(sent.problem)
        console.show_progress(f"{count} of {steps}")

    with contextlib.ExitStack() as requests:
        query.begin(steps)
        if text:
            requests.enter_context(sent.sending(config, text, 2 * steps + 10, key))
        found = query.collect(steps, DEADLINE_S, progress)
        if text and {one.kind for one in found} == {"prefill"}:
            if not sent.has_tokens.wait(DEADLINE_S):
                return found
            query.begin(steps)
            found += query.collect(steps, DEADLINE_S, progress)
    return found


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
        lines.append(f"{kind.kind}: {counted(kind.steps, 'step')}, {tokens}{kind.decodes:.1f} rows")
        earlier = (
            next((one for one in before.kinds if one.kind == kind.kind), None) if before else None
        )
        lines += table_lines(_rows(kind, earlier), indent=2)
        lines += ["", *table_lines(_rank_rows(kind), indent=2)]
        lines += ["", f"  {_largest(kind)}", ""]
    return lines[:-1]


def _summarize_kind(kind: str, steps: Sequence[MeasuredStep]) -> KindProfile:
    shared = mean_exchanges(steps)
    return KindProfile(
        kind=kind,
        steps=len(steps),
        prefill_tokens=sum(one.prefill_tokens for one in steps) / len(steps),
        decodes=sum(one.decodes for one in steps) / len(steps),
        ranks=[
            _summarize_rank(
                parts,
                [one for step in steps for one in step.profiles if one.rank == rank][-1],
                shared[rank],
            )
            for rank, parts in mean_seconds(steps).items()
        ],
        losses=find_losses(steps),
    )


def _summarize_rank(
    seconds: Mapping[Part, float], last: StepProfile, shared: Exchanges
) -> RankProfile:
    totals = {total.part: total for total in last.parts}
    whole_s = sum(seconds.values())
    layers = len({one.layer for one in unpack_spans(last.spans)} - {NO_LAYER})
    primitives = sum(total.primitives for part, total in totals.items() if part in _LAYER_PARTS)
    read_s = sum(seconds.get(part, 0.0) for part in READING_PARTS)
    read = sum(total.bytes for part, total in totals.items() if part in READING_PARTS)
    return RankProfile(
        rank=last.rank,
        seconds=whole_s,
        layers=layers,
        primitives_per_layer=primitives / layers if layers else 0.0,
        kv_bytes=last.kv_bytes,
        read_bytes_per_s=(read + last.kv_bytes) / read_s if read_s else 0.0,
        bytes_per_s=last.bytes_per_s,
        transfer_seconds=shared.transfer_s,
        waiting_seconds=shared.waiting_s,
        parts=[
            PartProfile(
                part=part,
                seconds=seconds[part],
                share=seconds[part] / whole_s,
                runs=totals[part].runs if part in totals else 0,
                bytes=totals[part].bytes if part in totals else 0,
                primitives=totals[part].primitives if part in totals else 0,
            )
            for part in PARTS
            if part in seconds
        ],
    )


def _largest(kind: KindProfile) -> str:
    """Return the sentence about the largest loss; without one, about the largest part."""
    if kind.losses:
        return kind.losses[0].sentence
    rank = max(kind.ranks, key=lambda one: one.seconds)
    part = max(rank.parts, key=lambda one: one.share)
    return f"No loss was found: the largest part of a step is {part.part}, {part.share:.0%}."


def _rank_rows(kind: KindProfile) -> list[list[str]]:
    """Say what each rank's layers consist of, what its device moves, and how long it waits."""
    rows = [["rank", "layers", "operations a layer", "reads", "its device can", "share"]]
    shares = any(one.transfer_seconds for one in kind.ranks)
    rows[0] += ["waits for others", "transfers"] if shares else []
    for one in kind.ranks:
        known = one.bytes_per_s > 0.0
        row = [f"{one.rank}", f"{one.layers}", f"{one.primitives_per_layer:.0f}"]
        row += [f"{one.read_bytes_per_s / 1e9:.2f} GB/s"]
        row += [f"{one.bytes_per_s / 1e9:.2f} GB/s" if known else "-"]
        row += [f"{one.read_bytes_per_s / one.bytes_per_s:.0%}" if known else "-"]
        row += [_ms(one.waiting_seconds), _ms(one.transfer_seconds)] if shares else []
        rows.append(row)
    return rows


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
    rows = [[*header, "runs", "operations", "bytes"]]
    for name in dict.fromkeys(part.part for rank in kind.ranks for part in rank.parts):
        row, runs, operations, size = [name], 0, 0, 0
        for rank in kind.ranks:
            found = next((one for one in rank.parts if one.part == name), PartProfile(part=name))
            row += [_ms(found.seconds), f"{found.share:.0%}"]
            runs, operations = max(runs, found.runs), max(operations, found.primitives)
            size = max(size, found.bytes)
            if ratios:
                old = known.get((rank.rank, name))
                row.append(f"{found.seconds / old:.2f}" if old else "-")
        rows.append([*row, f"{runs}", f"{operations or '-'}", format_bytes(size) if size else "-"])
    return [*rows, [*total, "", "", ""]]


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


class _Requests:
    """Requests that are sent so that there are steps to measure."""

    def __init__(self) -> None:
        self.problem = ""
        """Why a request failed, which ends the sending."""
        self.has_tokens = threading.Event()
        """Set at the first token."""

    @contextlib.contextmanager
    def sending(self, config: Config, text: str, max_tokens: int, key: str) -> Iterator[None]:
        """Send requests, one after another, until the end of the block."""
        is_over = threading.Event()
        address = base_url(config).removeprefix("http://")
        gateway = Gateway(address, config.served_name, key, _TIMEOUT_S)

        def send() -> None:
            while not is_over.is_set() and not self.problem:
                try:
                    with gateway.started(prompt=text, max_tokens=max_tokens) as events:
                        for _ in events:
                            self.has_tokens.set()
                            if is_over.is_set():
                                break
                except NoAnswer as error:
                    self.problem = str(error)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(_TIMEOUT_S)
