"""Verdicts of `lockstep verify` on recorded answers: what passes, what fails, with which words."""

import msgspec
import pytest

from services.commands.verify import judging
from services.commands.verify.judging import TimedCheck
from tests.unit.commands.verify.recorded import WORDS, answer, finding, rank, status


def fails(line: TimedCheck, *words: str) -> None:
    """Assert that a line fails, says these words and has a remedy."""
    assert line.verdict == "FAIL", line
    assert all(word in line.detail for word in words), line.detail
    assert line.remedy.endswith("."), line


def test_a_gateway_that_is_not_ready_says_why() -> None:
    """Alive and ready passes; the reason of /readyz stands in the line."""
    assert judging.ready(is_alive=True, code=200, reason="").verdict == "PASS"
    fails(
        judging.ready(is_alive=True, code=503, reason="1 of 2 ranks are connected."),
        "503",
        "1 of 2",
    )
    fails(judging.ready(is_alive=False, code=404, reason=""), "/livez")


def test_equal_canaries_pass_with_a_line_per_rank() -> None:
    """How many findings, over what, and each rank's latency and bandwidth."""
    line = judging.canary(status())
    assert line.verdict == "PASS"
    assert line.detail == "1 findings are equal on 2 ranks over jaccl"
    assert line.notes[1] == "rank 1 (mac-1): 12 us a sum, 0 MB/s in large ones"


def test_canaries_that_differ_fail_and_name_the_ranks() -> None:
    """In a digest, or in what was computed."""
    odd = rank(2, canary=[finding(digest=b"x" * 16)])
    fails(judging.canary(status(rank(0), rank(1), odd)), "rank 0 and of 2 differ")
    fails(judging.canary(status(rank(0), rank(1, canary=[]))), "rank 0 and of 1 differ")


def test_without_a_canary_nothing_is_claimed() -> None:
    """One rank, or the canary switched off: SKIP with the reason."""
    assert judging.canary(status(rank(0))).verdict == "SKIP"
    line = judging.canary(status(rank(0, canary=[]), rank(1, canary=[])))
    assert (line.verdict, "world.canary is off" in line.detail) == ("SKIP", True)


def test_one_request() -> None:
    """Tokens, end, time to the first token and rate; an improper end or no token fails."""
    line = judging.one_request(answer())
    assert line.verdict == "PASS"
    assert line.detail == "5 tokens, ends with length, first after 20 ms, then 40.0 tokens/s"
    fails(judging.one_request(answer(finish_reason="error")), "finish_reason is error")
    fails(judging.one_request(answer((), completion_tokens=0)), "no token")
    fails(judging.one_request(answer(completion_tokens=4)), "5 tokens came, usage says 4")


OTHER = (*WORDS[:2], " green", " grass")


def near(gap: float) -> list[dict[str, float]]:
    """Return the likeliest tokens where " green" is so much less likely everywhere."""
    return [{word: -0.1, " green": -0.1 - gap} for word in WORDS]


def test_the_same_again_must_be_the_same() -> None:
    """Alone, even a near tie is a fault: the same computation gives the same bits."""
    assert judging.same_again(answer(), answer(seconds=9.0), 0).verdict == "PASS"
    tie = answer(likeliest=near(0.1))
    fails(judging.same_again(tie, answer(OTHER), 0), "a different text", "token 3", "0.10 nats")
    assert judging.same_again(tie, answer(OTHER), 2).verdict == "PASS"
    fails(judging.same_again(answer(), answer(OTHER), 2), "2.40 nats")


def test_several_at_once_may_differ_at_a_near_tie() -> None:
    """A batch of another shape rounds otherwise; how close it was is shown."""
    tie = answer(likeliest=near(0.2))
    line = judging.together([answer(), tie], [answer(), answer(OTHER)])
    assert line.verdict == "PASS"
    assert "1 equal to alone, 1 up to a near tie" in line.detail
    assert line.notes == [
        "request 2 is equal up to token 2: token 3 was 0.20 nats less likely, a near tie"
    ]
    equal = judging.together([answer()] * 4, [answer()] * 4)
    assert equal.detail == "all equal to alone, 166.7 tokens/s together"


@pytest.mark.parametrize("second", [OTHER, (*WORDS[:2], " violet"), WORDS[:2]])
def test_several_at_once_that_differ_otherwise_fail(second: tuple[str, ...]) -> None:
    """A token that was much less likely, none of the likeliest, or an early end."""
    line = judging.together([answer(), answer()], [answer(), answer(second)])
    fails(line, "depends on the other requests of its batch")
    assert line.notes[0].endswith("no near tie")


def test_an_end_may_be_a_near_tie_too() -> None:
    """Where one text ends and the other goes on, the two likeliest tokens there must be close."""
    line = judging.together(
        [answer(likeliest=near(0.1))], [answer(WORDS[:2], finish_reason="stop")]
    )
    assert line.verdict == "PASS"


def test_an_abort_has_a_time() -> None:
    """Within two seconds, or it fails."""
    assert judging.aborted(0.31, 3).detail == "hung up after 3 events, free 0.31 s later"
    fails(judging.aborted(None, 3), "still runs 2 s after")


def test_blocks_must_be_on_every_rank() -> None:
    """None written, or one that a store did not take, fails."""
    assert "all 2 ranks have" in judging.stored(2, 0, 2, 0.1).detail
    fails(judging.stored(0, 0, 2, 15.0), "0 blocks stored and 0 lost within 15 s")
    fails(judging.stored(1, 1, 2, 0.5), "1 lost")


def test_reuse_and_restore_are_told_by_usage() -> None:
    """So many of so many tokens; none is a fault."""
    found = answer(memory_tokens=600, stored_tokens=39, first_s=0.01)
    line = judging.reused(answer(first_s=0.5), found)
    assert line.detail == "639 of 640 tokens, first token after 10 ms instead of 500 ms"
    fails(judging.reused(answer(), answer()), "0 of 640")
    assert judging.restored(found).detail == "39 of 640 tokens"
    fails(judging.restored(answer(memory_tokens=600)), "0 of 640")


def test_every_rank_must_have_answered_for_every_step() -> None:
    """Steps by the counter that grows when all receipts agree, and each rank's memory."""
    before = status()
    after = status(counters={"steps_total": 40.0})
    line = judging.took_part(before, after, 30)
    assert line.verdict == "PASS"
    assert line.detail == "30 steps, and 2 equal receipts for each"
    assert line.notes[0] == (
        "rank 0 (mac-0, metal Apple M5 Max): ready, 3,072 MiB in use, 2,048 MiB weights"
    )
    fails(judging.took_part(before, after, 31), "30 steps for 31 tokens")


def test_a_world_that_was_lost_meanwhile_is_told() -> None:
    """An epoch more, a receipt that differed, a rank that is gone or has done nothing."""
    before = status()
    counters = {"steps_total": 90.0, "receipts_mismatched_total": 1.0}
    fails(judging.took_part(before, status(epoch=2), 1), "epoch 1 to 2")
    fails(judging.took_part(before, status(counters=counters), 1), "differed 1 times")
    gone = msgspec.structs.replace(rank(1), state="loading")
    fails(judging.took_part(before, status(rank(0), gone), 0), "rank 1 is loading")
    idle = rank(1, memory_bytes=0)
    fails(judging.took_part(before, status(rank(0), idle), 0), "rank 1 has answered for no step")
