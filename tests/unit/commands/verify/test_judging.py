"""Verdicts of `lockstep verify` on recorded answers."""

import msgspec
import pytest

from services.commands.verify import judging
from services.commands.verify.judging import TimedCheck
from tests.unit.commands.verify.recorded import (
    WORDS,
    canary_finding,
    healthy_rank,
    http_answer,
    world_status,
)


def assert_fails(line: TimedCheck, *words: str) -> None:
    """Assert that a check fails, its detail contains these words, and it has a remedy."""
    assert line.verdict == "FAIL", line
    assert all(word in line.detail for word in words), line.detail
    assert line.remedy.endswith("."), line


def test_verify_fails_unready_gateway_with_reason_of_readyz() -> None:
    """A gateway that is alive and ready passes; otherwise the detail has the reason of /readyz."""
    assert judging.ready(is_alive=True, code=200, reason="").verdict == "PASS"
    assert_fails(
        judging.ready(is_alive=True, code=503, reason="1 of 2 ranks are connected."),
        "503",
        "1 of 2",
    )
    assert_fails(judging.ready(is_alive=False, code=404, reason=""), "/livez")


def test_verify_passes_equal_canary_digests_and_prints_latency_of_each_rank() -> None:
    """Equal digests pass; the output has the latency and bandwidth of each rank."""
    line = judging.canary(world_status())
    assert line.verdict == "PASS"
    assert line.detail == "1 findings are equal on 2 ranks over jaccl"
    assert line.notes[1] == "rank 1 (mac-1): 12 us a sum, 0 MB/s in large ones"


def test_verify_fails_different_canary_digests_and_names_ranks() -> None:
    """A different digest or a missing finding fails."""
    odd = healthy_rank(2, canary=[canary_finding(digest=b"x" * 16)])
    assert_fails(
        judging.canary(world_status(healthy_rank(0), healthy_rank(1), odd)),
        "rank 0 and of 2 differ",
    )
    assert_fails(
        judging.canary(world_status(healthy_rank(0), healthy_rank(1, canary=[]))),
        "rank 0 and of 1 differ",
    )


def test_verify_skips_canary_check_for_one_rank_or_disabled_canary() -> None:
    """For one rank, or without a canary, the verdict is SKIP with the reason."""
    assert judging.canary(world_status(healthy_rank(0))).verdict == "SKIP"
    line = judging.canary(world_status(healthy_rank(0, canary=[]), healthy_rank(1, canary=[])))
    assert (line.verdict, "world.canary is off" in line.detail) == ("SKIP", True)


def test_verify_reports_tokens_and_rate_of_complete_answer() -> None:
    """A wrong finish reason, no token or a wrong token count fails."""
    line = judging.one_request(http_answer())
    assert line.verdict == "PASS"
    assert line.detail == "5 tokens, ends with length, first after 20 ms, then 40.0 tokens/s"
    assert_fails(judging.one_request(http_answer(finish_reason="error")), "finish_reason is error")
    assert_fails(judging.one_request(http_answer((), completion_tokens=0)), "no token")
    assert_fails(
        judging.one_request(http_answer(completion_tokens=4)), "5 tokens came, usage says 4"
    )


OTHER = (*WORDS[:2], " green", " grass")


def near_tie_logprobs(gap: float) -> list[dict[str, float]]:
    """Return log probabilities where " green" is less likely by `gap` nats at every token."""
    return [{word: -0.1, " green": -0.1 - gap} for word in WORDS]


def test_verify_fails_repeated_request_whose_text_differs() -> None:
    """Alone, even a near tie fails: the same computation gives the same bits."""
    assert judging.same_again(http_answer(), http_answer(seconds=9.0), 0).verdict == "PASS"
    tie = http_answer(likeliest=near_tie_logprobs(0.1))
    assert_fails(
        judging.same_again(tie, http_answer(OTHER), 0), "a different text", "token 3", "0.10 nats"
    )
    assert judging.same_again(tie, http_answer(OTHER), 2).verdict == "PASS"
    assert_fails(judging.same_again(http_answer(), http_answer(OTHER), 2), "2.40 nats")


def test_verify_passes_concurrent_requests_that_differ_at_near_tie() -> None:
    """A batch of another size rounds differently; the note says how close the tokens were."""
    tie = http_answer(likeliest=near_tie_logprobs(0.2))
    line = judging.together([http_answer(), tie], [http_answer(), http_answer(OTHER)])
    assert line.verdict == "PASS"
    assert "1 equal to alone, 1 up to a near tie" in line.detail
    assert line.notes == [
        "request 2 is equal up to token 2: token 3 was 0.20 nats less likely, a near tie"
    ]
    equal = judging.together([http_answer()] * 4, [http_answer()] * 4)
    assert equal.detail == "all equal to alone, 166.7 tokens/s together"


@pytest.mark.parametrize("second", [OTHER, (*WORDS[:2], " violet"), WORDS[:2]])
def test_verify_fails_concurrent_requests_that_differ_without_near_tie(
    second: tuple[str, ...],
) -> None:
    """A much less likely token, one outside the likeliest, or an early end fails."""
    line = judging.together([http_answer(), http_answer()], [http_answer(), http_answer(second)])
    assert_fails(line, "depends on the other requests of its batch")
    assert line.notes[0].endswith("no near tie")


def test_verify_passes_text_that_ends_early_at_near_tie() -> None:
    """A text may end early if the end token was nearly as likely as the next one."""
    line = judging.together(
        [http_answer(likeliest=near_tie_logprobs(0.1))],
        [http_answer(WORDS[:2], finish_reason="stop")],
    )
    assert line.verdict == "PASS"


def test_verify_fails_aborted_request_that_still_runs_after_two_seconds() -> None:
    """The detail says when the row was free; a row that still runs fails."""
    assert judging.aborted(0.31, 3).detail == "hung up after 3 events, free 0.31 s later"
    assert_fails(judging.aborted(None, 3), "still runs 2 s after")


def test_verify_fails_when_kv_blocks_are_missing_from_cache_store() -> None:
    """The check fails when no block was stored or a store refused one."""
    assert "all 2 ranks have" in judging.stored(2, 0, 2, 0.1).detail
    assert_fails(judging.stored(0, 0, 2, 15.0), "0 blocks stored and 0 lost within 15 s")
    assert_fails(judging.stored(1, 1, 2, 0.5), "1 lost")


def test_verify_fails_cache_check_when_usage_has_no_cached_tokens() -> None:
    """The detail counts the tokens from the cache; 0 tokens fail."""
    found = http_answer(memory_tokens=600, stored_tokens=39, first_s=0.01)
    line = judging.reused(http_answer(first_s=0.5), found)
    assert line.detail == "639 of 640 tokens, first token after 10 ms instead of 500 ms"
    assert_fails(judging.reused(http_answer(), http_answer()), "0 of 640")
    assert judging.restored(found).detail == "39 of 640 tokens"
    assert_fails(judging.restored(http_answer(memory_tokens=600)), "0 of 640")


def test_verify_fails_when_step_receipts_are_fewer_than_tokens() -> None:
    """The check compares the step counter with the tokens and notes each rank's memory."""
    before = world_status()
    after = world_status(counters={"steps_total": 40.0})
    line = judging.took_part(before, after, 30)
    assert line.verdict == "PASS"
    assert line.detail == "30 steps, and 2 equal receipts for each"
    assert line.notes[0] == (
        "rank 0 (mac-0, metal Apple M5 Max): ready, 3,072 MiB in use, 2,048 MiB weights"
    )
    assert_fails(judging.took_part(before, after, 31), "30 steps for 31 tokens")


def test_verify_fails_when_a_rank_is_lost_during_checks() -> None:
    """A new epoch, a different receipt, or a rank that is not ready or idle fails."""
    before = world_status()
    counters = {"steps_total": 90.0, "receipts_mismatched_total": 1.0}
    assert_fails(judging.took_part(before, world_status(epoch=2), 1), "epoch 1 to 2")
    assert_fails(judging.took_part(before, world_status(counters=counters), 1), "differed 1 times")
    gone = msgspec.structs.replace(healthy_rank(1), state="loading")
    assert_fails(
        judging.took_part(before, world_status(healthy_rank(0), gone), 0), "rank 1 is loading"
    )
    idle = healthy_rank(1, memory_bytes=0)
    assert_fails(
        judging.took_part(before, world_status(healthy_rank(0), idle), 0),
        "rank 1 has answered for no step",
    )
