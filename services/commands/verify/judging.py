"""Verdicts of `lockstep verify`. Owns names of checks, thresholds and remedies. Pure."""

from collections.abc import Sequence

from services.commands.checks.check_results import CheckResult
from services.commands.verify.comparing import divergence
from services.commands.verify.gateway import HttpAnswer
from services.supervisor.status import canary_lines
from shared.messages import RankStatus, StatusReported

GATEWAY = "gateway answers"
CANARY = "canary on every rank"
ONE = "one request"
AGAIN = "the same again"
TOGETHER = "several at once"
ABORT = "abort frees the slot"
STORED = "blocks stored on each rank"
REUSED = "prefix reused"
RANKS = "all ranks took part"
CANARY_ANEW = "canary run anew"
RESTORED = "prefix restored from SSD"
FAST_SYNCH = "fast synchronization"
SHUTDOWN = "clean shutdown"

ABORT_S, SHUTDOWN_S = 2.0, 5.0
"""Longest times until an aborted request has ended, and until everything has ended."""

ENDS = ("stop", "length")
"""Values of finish_reason of a request that ended as it should."""

_LOG_REMEDY = "Look for warnings of the scheduler and the ranks in the logs."
_RANK_REMEDY = (
    "Run `lockstep status` for the rank that is not ready, and `lockstep doctor` on its host."
)
_FABRIC_REMEDY = (
    "Run `lockstep doctor` on every host for cables, ports and versions; if it finds nothing, "
    'set world.backend = "ring" and start again.'
)
_SUMS_REMEDY = (
    "The ranks compute different numbers than before: run `lockstep doctor` on every host, restart "
    "with `lockstep restart ranks`, and do not serve before this passes."
)
_STORE_REMEDY = (
    "Run `lockstep cache stats` on every host: the store must be on, with room on its disk "
    "(cache.ssd, cache.directory, cache.ssd_bytes_max)."
)


class TimedCheck(CheckResult, frozen=True, kw_only=True):
    """Result of one check of a running Lockstep, with its duration and notes."""

    seconds: float = 0.0
    """How long the check took."""
    notes: Sequence[str] = ()
    """Further facts, one per line."""

    def cells(self) -> list[str]:
        """Return the cells of this result's row: verdict, check, seconds, explanation."""
        seconds = f"{self.seconds:6.2f} s"
        return [self.verdict, self.check, seconds, self.explained(self.notes)]


def passed(check: str, detail: str, notes: Sequence[str] = ()) -> TimedCheck:
    """Return a PASS without a time: name of the check, the findings in one line, further lines."""
    return TimedCheck(check=check, verdict="PASS", detail=detail, notes=notes)


def failed(check: str, detail: str, remedy: str, notes: Sequence[str] = ()) -> TimedCheck:
    """Return a FAIL without a time: name, the findings in one line, the exact remedy, more."""
    return TimedCheck(check=check, verdict="FAIL", detail=detail, remedy=remedy, notes=notes)


def skipped(check: str, why: str) -> TimedCheck:
    """Return a SKIP: name of the check, and why it was not made."""
    return TimedCheck(check=check, verdict="SKIP", detail=why)


def ready(is_alive: bool, code: int, reason: str) -> TimedCheck:
    """Judge the gateway's answers: both /livez and /readyz must be 200.

    Args:
        is_alive: whether /livez was 200.
        code: HTTP status of /readyz.
        reason: reason in the body of /readyz; "" without one.
    """
    if not is_alive:
        remedy = "Start Lockstep with `lockstep up`; check gateway.host and gateway.port."
        return failed(GATEWAY, "/livez is not 200", remedy)
    if code != 200:
        return failed(GATEWAY, f"/readyz is {code}: {reason or 'no reason given'}", _RANK_REMEDY)
    return passed(GATEWAY, "/livez and /readyz are 200")


def canary(status: StatusReported, name: str = CANARY) -> TimedCheck:
    """Judge the canary results of all ranks: digests that differ from rank 0's are a FAIL.

    A world of one rank, or `world.canary` switched off, is a SKIP.

    Args:
        status: status of the scheduler, with each rank's canary results.
        name: name of the check.
    """
    ranks = status.ranks
    if status.world_size == 1:
        return skipped(name, "with one rank there is nothing to compare")
    if not any(rank.canary for rank in ranks):
        return skipped(name, "world.canary is off: set it to true and restart")
    notes = [f"rank {rank.rank} ({rank.host}): {_fabric(rank)}" for rank in ranks]
    differing = [rank.rank for rank in ranks if _digests(rank) != _digests(ranks[0])]
    if differing:
        said = f"findings of rank 0 and of {', '.join(map(str, differing))} differ"
        return failed(name, said, _FABRIC_REMEDY, notes)
    count = len(ranks[0].canary)
    detail = f"{count} findings are equal on {len(ranks)} ranks over {status.backend}"
    return passed(name, detail, notes)


def one_request(answer: HttpAnswer) -> TimedCheck:
    """Judge a streamed completion: FAIL if its end or its number of tokens is wrong.

    Its finish_reason must be "stop" or "length", and the stream must contain at least one token and
    at most as many as the completion tokens in its usage object.
    """
    problems = []
    if answer.finish_reason not in ENDS:
        problems.append(f"finish_reason is {answer.finish_reason}")
    if not answer.tokens:
        problems.append("no token came")
    if len(answer.tokens) > answer.completion_tokens:
        problems.append(f"{len(answer.tokens)} tokens came, usage says {answer.completion_tokens}")
    if problems:
        return failed(ONE, ", ".join(problems), _LOG_REMEDY)
    rate = ""
    if answer.completion_tokens > 1 and answer.seconds > answer.first_s:
        per_second = (answer.completion_tokens - 1) / (answer.seconds - answer.first_s)
        rate = f", then {per_second:.1f} tokens/s"
    return passed(
        ONE,
        f"{answer.completion_tokens} tokens, ends with {answer.finish_reason}, first after "
        f"{answer.first_s * 1e3:.0f} ms{rate}",
    )


def same_again(first: HttpAnswer, second: HttpAnswer, others: int) -> TimedCheck:
    """Judge a greedy request that was sent twice: both answers must be equal.

    Args:
        first: the first answer.
        second: the second one.
        others: number of requests of other clients that ran meanwhile, which change the batch's
            shape. If any ran, the answers may differ from a token on that was almost as likely
            as the other answer's (`Divergence.is_near_tie`).
    """
    found = divergence(first, second)
    if found is None:
        return passed(AGAIN, f"{len(first.tokens)} equal tokens")
    if others and found.is_near_tie:
        return passed(AGAIN, f"equal up to a near tie ({found.text}) while {others} others ran")
    detail = f"the same greedy request gave a different text: {found.text}"
    return failed(AGAIN, detail, _SUMS_REMEDY)


def together(alone: Sequence[HttpAnswer], at_once: Sequence[HttpAnswer]) -> TimedCheck:
    """Judge greedy requests that ran at once: each answer must equal that of the request alone.

    They may differ from a token on that was almost as likely as the other answer's
    (`Divergence.is_near_tie`), because a batch of another shape rounds differently.

    Args:
        alone: answers of the requests sent one by one.
        at_once: answers of the same requests sent at once, in the same order.
    """
    notes, is_wrong = [], False
    pairs = zip(alone, at_once, strict=True)
    for number, found in enumerate((divergence(*pair) for pair in pairs), 1):
        if found is not None:
            is_wrong = is_wrong or not found.is_near_tie
            why = "a near tie" if found.is_near_tie else "no near tie"
            notes.append(
                f"request {number} is equal up to token {found.place}: {found.text}, {why}"
            )
    if is_wrong:
        detail = "a text depends on the other requests of its batch by more than rounding explains"
        return failed(TOGETHER, detail, _SUMS_REMEDY, notes)
    tokens = sum(answer.completion_tokens for answer in at_once)
    longest_s = max(1e-6, *(answer.seconds for answer in at_once))
    rate = f"{tokens / longest_s:.1f} tokens/s together"
    if not notes:
        return passed(TOGETHER, f"all equal to alone, {rate}")
    detail = (
        f"{len(alone) - len(notes)} equal to alone, {len(notes)} up to a near tie: a batch of "
        f"another shape rounds differently; {rate}"
    )
    return passed(TOGETHER, detail, notes)


def aborted(seconds: float | None, tokens: int) -> TimedCheck:
    """Judge a request whose client closed the connection: its slot must be free within ABORT_S.

    Args:
        seconds: seconds from closing the connection until the slot was free; None: it was not
            free within ABORT_S, which is a FAIL.
        tokens: number of stream events that the client had received before; only for the text.
    """
    if seconds is None:
        return failed(
            ABORT,
            f"the request still runs {ABORT_S:.0f} s after its client hung up",
            "A proxy may keep the connection open: run this against the gateway itself. "
            + _LOG_REMEDY,
        )
    return passed(ABORT, f"hung up after {tokens} events, free {seconds:.2f} s later")


def stored(written: int, lost: int, ranks: int, waited_s: float) -> TimedCheck:
    """Judge the blocks of a long prompt: at least one must be stored and none lost.

    The scheduler counts a block as stored when every rank's store has committed it.

    Args:
        written: number of blocks stored since the prompt was sent.
        lost: number of blocks since then that a rank's store has not stored.
        ranks: number of ranks in the world.
        waited_s: seconds between the end of the answer and the reading of these counts.
    """
    if written < 1 or lost:
        detail = f"{written} blocks stored and {lost} lost within {waited_s:.0f} s"
        return failed(STORED, detail, _STORE_REMEDY)
    stores = "its store has" if ranks == 1 else f"the stores of all {ranks} ranks have"
    return passed(STORED, f"{written} blocks, {stores} committed them")


def reused(first: HttpAnswer, again: HttpAnswer) -> TimedCheck:
    """Judge a long prompt that was sent twice: some of its tokens must come from the cache.

    Args:
        first: the first answer.
        again: the second one, whose tokens from memory and SSD count.
    """
    found = again.memory_tokens + again.stored_tokens
    detail = (
        f"{found} of {again.prompt_tokens} tokens, first token after {again.first_s * 1e3:.0f} ms "
        f"instead of {first.first_s * 1e3:.0f} ms"
    )
    if not found:
        remedy = "Raise cache.resident_bytes_max or rank_worker.kv_bytes_max: no blocks fit."
        return failed(REUSED, detail, remedy)
    return passed(REUSED, detail)


def restored(again: HttpAnswer) -> TimedCheck:
    """Judge a long prompt that was sent again after all ranks restarted.

    Some of its tokens must have been restored from SSD.
    """
    detail = f"{again.stored_tokens} of {again.prompt_tokens} tokens"
    if not again.stored_tokens:
        return failed(RESTORED, detail, _STORE_REMEDY)
    return passed(RESTORED, detail)


def took_part(before: StatusReported, after: StatusReported, tokens: int) -> TimedCheck:
    """Judge whether all ranks took part in the steps between two statuses of the scheduler.

    It is a FAIL if a rank is not ready or has sent no receipt, if receipts of ranks for one step
    differed, if the epoch changed, or if fewer steps ran than `tokens`.

    Args:
        before: status of the scheduler before the first request of `lockstep verify`.
        after: its status after the last one.
        tokens: number of tokens generated by requests that ran alone, so each needed its own step.
    """
    steps = counter_growth(before, after, "steps_total")
    mismatched = counter_growth(before, after, "receipts_mismatched_total")
    notes = [
        f"rank {rank.rank} ({rank.host}, {rank.device}): {rank.state}, "
        f"{rank.memory_bytes / 2**20:,.0f} MiB in use, {rank.shard_bytes / 2**20:,.0f} MiB weights"
        for rank in after.ranks
    ]
    problems = [
        f"rank {rank.rank} is {rank.state}" for rank in after.ranks if rank.state != "ready"
    ]
    problems += [
        f"rank {rank.rank} has answered for no step"
        for rank in after.ranks
        if rank.state == "ready" and not rank.memory_bytes
    ]
    if mismatched:
        problems.append(f"receipts differed {mismatched} times")
    if after.epoch != before.epoch:
        problems.append(f"the world was lost meanwhile (epoch {before.epoch} to {after.epoch})")
    elif steps < tokens:
        problems.append(f"{steps} steps for {tokens} tokens")
    if problems:
        return failed(RANKS, ", ".join(problems), _RANK_REMEDY, notes)
    return passed(RANKS, f"{steps} steps, and {len(after.ranks)} equal receipts for each", notes)


def counter_growth(before: StatusReported, after: StatusReported, name: str) -> int:
    """Return by how much the counter `name` has grown from the status `before` to `after`."""
    return int(after.counters.get(name, 0.0) - before.counters.get(name, 0.0))


def _digests(rank: RankStatus) -> list[tuple[str, bytes]]:
    return [(one.name, one.digest) for one in rank.canary]


def _fabric(rank: RankStatus) -> str:
    return canary_lines.describe(rank.canary) or "no findings"
