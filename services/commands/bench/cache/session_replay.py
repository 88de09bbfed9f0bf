"""Session replay: an agent's session turn by turn with the cache, without it, and on mlx_lm.server.

Owns the turns and their metrics; the conversation comes from `transcript`.
"""

import dataclasses
import itertools

from services.commands.bench.cache.testbed import CacheTestbed
from services.commands.bench.cache.transcript import Message, Transcript, make_transcript
from services.commands.bench.load.load_processes import CHAT, request_body
from services.commands.bench.measuring import noise
from services.commands.bench.measuring.numbers import percentile
from services.commands.bench.measuring.processes import MeasuredServer, print_progress
from services.commands.bench.measuring.report import PART, Case, Report
from services.commands.bench.measuring.stack import Stack
from services.commands.bench.serving.overhead import STACK
from services.commands.bench.serving.peers import MLX_LM
from shared.errors import UnavailableError

NAME = "replay"
COLUMNS = ["ttft_p50_ms", "ttft_p95_ms", "total_s", "found_share"]
WITHOUT_CACHE = f"{STACK}, no cache"
NEW_TOKENS = 8
LONG_TOKENS = 2_000
"""Longer sessions are replayed a third as often."""


@dataclasses.dataclass(frozen=True, slots=True)
class TurnResult:
    """Times and tokens of one request of a session."""

    ttft_ms: float
    """Time to first token."""
    wall_s: float
    """Seconds from the request to the end of its answer."""
    prompt_tokens: int
    found_tokens: int
    """Tokens found in a prefix cache."""


def measure(testbed: CacheTestbed, report: Report) -> None:
    """Replay an agent's session with the cache, without it, and on mlx_lm.server.

    All contenders run a turn before the next turn begins.

    Args:
        testbed: plan and running processes of the benchmark.
        report: gets one case, and notes on failures of the peer and on unequal prompts.

    Raises:
        UnavailableError: when one of our stacks does not start or answer.
    """
    plan = testbed.plan
    case = Case(conditions={PART: NAME, "tokens": plan.tokens, "turns": plan.turns})
    report.cases.append(case)
    seeds = itertools.count()
    enabled = {STACK: "true", WITHOUT_CACHE: "false"}
    with testbed.contenders(NAME, testbed.folder / NAME, "enabled", enabled) as stacks:

        def replay(
            turns: int = plan.turns, tokens: int = plan.tokens
        ) -> dict[str, list[TurnResult]]:
            session = make_transcript(turns, tokens, next(seeds), testbed.prompts.count)
            return _replay(testbed, stacks, session, report)

        # Warm-up.
        replay(turns=2, tokens=512)
        for _ in range(plan.repeats_for(plan.tokens, LONG_TOKENS)):
            found, foreign = noise.measure_with_retries(replay, plan.tries)
            for contender, turns in found.items():
                case.add(contender, session_metrics(turns) | {noise.FOREIGN_CORES: foreign})
            report.notes += prompt_length_notes(found)
    for other in (WITHOUT_CACHE, MLX_LM):
        case.add_ratios(STACK, other, "ttft_p50_ms", "ttft_p95_ms", "total_s")


def session_metrics(turns: list[TurnResult]) -> dict[str, float]:
    """Return one contender's metrics of one replayed session.

    Args:
        turns: results of all turns, in order.

    Returns:
        ttft_p50_ms and ttft_p95_ms: median and 95th percentile of the turns' times to first token;
        total_s: sum of the turns' times; found_share: share of all prompt tokens that were found in
        a prefix cache.
    """
    first_ms = [turn.ttft_ms for turn in turns]
    return {
        "ttft_p50_ms": percentile(first_ms, 0.5),
        "ttft_p95_ms": percentile(first_ms, 0.95),
        "total_s": sum(turn.wall_s for turn in turns),
        "found_share": sum(turn.found_tokens for turn in turns)
        / sum(turn.prompt_tokens for turn in turns),
    }


def prompt_length_notes(found: dict[str, list[TurnResult]]) -> list[str]:
    """Return a note when the contenders counted different numbers of prompt tokens in any turn.

    Args:
        found: contender -> results of its turns.
    """
    lengths = {name: [turn.prompt_tokens for turn in turns] for name, turns in found.items()}
    if len({tuple(each) for each in lengths.values()}) == 1:
        return []
    last = ", ".join(f"{name} {each[-1]}" for name, each in lengths.items())
    return [f"Prompts were not equally long; tokens of the last turn: {last}."]


def _replay(
    testbed: CacheTestbed, stacks: dict[str, Stack], session: Transcript, report: Report
) -> dict[str, list[TurnResult]]:
    """Return every contender's turns; a peer that fails is left out and noted in the report.

    Raises:
        UnavailableError: when one of our stacks does not answer.
    """
    found: dict[str, list[TurnResult]] = {name: [] for name in (*stacks, MLX_LM)}
    for number in range(session.turns):
        messages = session.request(number)
        for name, stack in stacks.items():
            found[name].append(_run_turn(testbed, stack, messages))
        if MLX_LM in found:
            try:
                with testbed.running_peer() as peer:
                    found[MLX_LM].append(_run_turn(testbed, peer, messages))
            except UnavailableError as error:
                del found[MLX_LM]
                report.notes.append(f"{MLX_LM} failed at turn {number + 1}, left out: {error}")
        times = ", ".join(f"{name} {turns[-1].ttft_ms:.0f} ms" for name, turns in found.items())
        print_progress(f"replay, turn {number + 1} of {session.turns}: {times}")
    return found


def _run_turn(testbed: CacheTestbed, server: MeasuredServer, messages: list[Message]) -> TurnResult:
    body = request_body(server.model, NEW_TOKENS, messages=messages)
    answer = testbed.client.load(server, CHAT, [[body]])
    metrics = answer["metrics"]
    if "ttft_p50_ms" not in metrics:
        raise UnavailableError("The answer of a turn contains no text.")
    return TurnResult(
        ttft_ms=metrics["ttft_p50_ms"],
        wall_s=metrics["wall_s"],
        prompt_tokens=answer["prompt_tokens"][0],
        found_tokens=metrics["cached_tokens"],
    )
