"""An agent's session, turn by turn: with the cache, without it, and on mlx_lm.server."""

import contextlib
import itertools

from services.commands.bench.cache.testbed import CHAT, CacheTestbed, body
from services.commands.bench.cache.transcript import Message, Transcript, make_transcript
from services.commands.bench.measuring import noise
from services.commands.bench.measuring.numbers import percentile
from services.commands.bench.measuring.processes import print_progress
from services.commands.bench.measuring.report import PART, Case, Report
from services.commands.bench.measuring.stack import Stack
from services.commands.bench.serving.overhead import STACK
from services.commands.bench.serving.peers import MLX_LM
from shared.errors import UnavailableError

NAME = "replay"
COLUMNS = ["ttft_p50_ms", "ttft_p95_ms", "total_s", "found_share"]
WITHOUT = f"{STACK}, no cache"
NEW_TOKENS = 8
LONG_TOKENS = 2_000
"""Longer sessions are replayed a third as often."""


class TurnResult:
    """What one request of a session took."""

    def __init__(self, ttft_ms: float, wall_s: float, prompt_tokens: int, found: int) -> None:
        self.ttft_ms = ttft_ms
        self.wall_s = wall_s
        self.prompt_tokens = prompt_tokens
        self.found_tokens = found


def measure(setup: CacheTestbed, report: Report) -> None:
    """Add a case to the report; every contender takes a turn before the next turn begins.

    Raises:
        UnavailableError: a server does not start or answer.
    """
    plan = setup.plan
    case = Case(conditions={PART: NAME, "tokens": plan.tokens, "turns": plan.turns})
    blocks = setup.folder / NAME
    with contextlib.ExitStack() as cleanup:
        stacks = {}
        for name, enabled in ((STACK, "true"), (WITHOUT, "false")):
            (blocks / enabled).mkdir(parents=True)
            stack = setup.start(f"{NAME}-{enabled}", blocks / enabled, enabled=enabled)
            stacks[name] = cleanup.enter_context(stack)
        seeds = itertools.count()

        def replay(
            turns: int = plan.turns, tokens: int = plan.tokens
        ) -> dict[str, list[TurnResult]]:
            session = make_transcript(turns, tokens, next(seeds), setup.prompts.count)
            return _replay(setup, stacks, session, report)

        # Warms everything up.
        replay(turns=2, tokens=512)
        for _ in range(repeats_for(plan.repeats, plan.tokens)):
            found, foreign = noise.measure_with_retries(replay, plan.tries)
            for who, taken in found.items():
                case.series_of(who).add(summary(taken) | {noise.FOREIGN_CORES: foreign})
            report.notes += prompt_length_notes(found)
    for other in (who for who in (WITHOUT, MLX_LM) if who in case.series):
        for metric in ("ttft_p50_ms", "ttft_p95_ms", "total_s"):
            case.add_ratio(metric, STACK, other)
    report.cases.append(case)


def repeats_for(repeats: int, tokens: int) -> int:
    """Return how many sessions are replayed."""
    return repeats if tokens <= LONG_TOKENS else max(1, repeats // 3)


def summary(turns: list[TurnResult]) -> dict[str, float]:
    """Return a session's metrics."""
    first_ms = [turn.ttft_ms for turn in turns]
    return {
        "ttft_p50_ms": percentile(first_ms, 0.5),
        "ttft_p95_ms": percentile(first_ms, 0.95),
        "total_s": sum(turn.wall_s for turn in turns),
        "found_share": sum(turn.found_tokens for turn in turns)
        / sum(turn.prompt_tokens for turn in turns),
    }


def prompt_length_notes(found: dict[str, list[TurnResult]]) -> list[str]:
    """Return a note when contenders did not read the same prompts."""
    lengths = {who: [turn.prompt_tokens for turn in turns] for who, turns in found.items()}
    if len({tuple(each) for each in lengths.values()}) == 1:
        return []
    last = ", ".join(f"{who} {each[-1]}" for who, each in lengths.items())
    return [f"Prompts were not equally long; tokens of the last turn: {last}."]


def _replay(
    setup: CacheTestbed, stacks: dict[str, Stack], session: Transcript, report: Report
) -> dict[str, list[TurnResult]]:
    """Return every contender's turns; a peer that gives up in the middle is left out, with a note.

    Raises:
        UnavailableError: one of our own stacks does not answer.
    """
    found: dict[str, list[TurnResult]] = {name: [] for name in (*stacks, MLX_LM)}
    for number in range(session.turns):
        messages = session.request(number)
        for name, stack in stacks.items():
            found[name].append(_turn(setup, stack.port, stack.name, messages))
        if MLX_LM in found:
            try:
                found[MLX_LM].append(_peer_turn(setup, messages))
            except UnavailableError as error:
                del found[MLX_LM]
                report.notes.append(f"{MLX_LM} failed at turn {number + 1}, left out: {error}")
        took = ", ".join(f"{who} {turns[-1].ttft_ms:.0f} ms" for who, turns in found.items())
        print_progress(f"replay, turn {number + 1} of {session.turns}: {took}")
    return found


def _peer_turn(setup: CacheTestbed, messages: list[Message]) -> TurnResult:
    peer = setup.peer
    peer.child.resume()
    try:
        return _turn(setup, peer.port, peer.model, messages)
    finally:
        peer.child.pause()


def _turn(setup: CacheTestbed, port: int, model: str, messages: list[Message]) -> TurnResult:
    answer = setup.request(port, CHAT, [body(model, NEW_TOKENS, messages=messages)])
    metrics = answer["metrics"]
    if "ttft_p50_ms" not in metrics:
        raise UnavailableError("A turn was answered without a word.")
    return TurnResult(
        metrics["ttft_p50_ms"],
        metrics["wall_s"],
        answer["prompt_tokens"][0],
        metrics["cached_tokens"],
    )
