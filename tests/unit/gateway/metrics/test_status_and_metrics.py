"""Readiness from the scheduler's reports, and metrics with vLLM's names."""

import json

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.links.scheduler_status import FRESH_S, StatusBoard
from services.gateway.metrics.gateway import GatewayMetrics
from shared.clock import ManualClock
from shared.messages import StatusReported
from tests.gateway.scripted_scheduler import ready_status


def _board(report: StatusReported | None) -> tuple[StatusBoard, ManualClock]:
    clock = ManualClock(100.0)
    board = StatusBoard(clock)
    if report is not None:
        board.report(report, clock.now())
    return board, clock


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (None, "the scheduler does not report"),
        (ready_status(), ""),
        (ready_status(ready=False, reason="rank 1 is loading"), "rank 1 is loading"),
        (ready_status(ready=False), "the world is not ready"),
        (ready_status(draining=True), "the scheduler is shutting down"),
    ],
)
def test_readyz_gives_reason_from_scheduler_report_when_unready(
    report: StatusReported | None, reason: str
) -> None:
    """/readyz has the reason of the scheduler's report."""
    assert _board(report)[0].unready_reason() == reason


def test_gateway_is_unready_when_scheduler_report_is_old_or_link_lost() -> None:
    """A report counts for FRESH_S; a lost link counts at once."""
    board, clock = _board(ready_status())
    clock.advance(FRESH_S - 0.1)
    assert board.unready_reason() == ""
    clock.advance(0.2)
    assert board.unready_reason() == "the scheduler does not report"
    board.report(ready_status(), clock.now())
    board.mark_lost()
    assert board.unready_reason() == "the scheduler does not report"
    assert board.context_tokens_max == ready_status().context_tokens_max


def test_gateway_is_unready_while_it_drains() -> None:
    """A draining gateway is not ready, independent of the scheduler's report."""
    board, _ = _board(ready_status())
    board.is_draining = True
    assert board.unready_reason() == "the gateway is shutting down"


def test_status_page_contains_complete_scheduler_report() -> None:
    """The status page has the complete report, which `lockstep status` reads."""
    board, _ = _board(ready_status())
    page = json.loads(json.dumps(board.as_json()))
    assert page["ready"] is True
    assert page["scheduler"] == msgspec.to_builtins(ready_status())


def test_request_metrics_have_vllm_names_and_observed_values() -> None:
    """Counters, gauges and histograms parse, and have the observed values."""
    board, _ = _board(ready_status())
    metrics = GatewayMetrics(board)
    metrics.prompt_tokens += 10
    metrics.first_token.observe(0.02)
    metrics.next_token.observe(0.01)
    metrics.generation_tokens += 3
    metrics.observe_end("stop", 1.0, 2)
    metrics.rejections["queue_full"] += 1
    page = metrics.exposition().decode()
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    expected = {
        ("lockstep_prompt_tokens_total",): 10,
        ("lockstep_generation_tokens_total",): 3,
        ("lockstep_num_requests_running",): 2,
        ("lockstep_num_requests_waiting",): 1,
        ("lockstep_kv_cache_usage_perc",): 0.25,
        ("lockstep_request_success_total", "stop"): 1,
        ("lockstep_request_rejected_total", "queue_full"): 1,
        ("lockstep_time_to_first_token_seconds_count",): 1,
        ("lockstep_inter_token_latency_seconds_count",): 1,
        ("lockstep_time_per_output_token_seconds_count",): 1,
        ("lockstep_e2e_request_latency_seconds_sum",): 1.0,
        ("lockstep_e2e_request_latency_seconds_bucket", "1.0"): 1,
        ("lockstep_scheduler_preemptions_total",): 3,
        ("lockstep_scheduler_step_seconds",): 0.01,
        ("lockstep_ready",): 1,
    }
    assert {name: samples.get(name) for name in expected} == expected


def _samples(report: StatusReported) -> dict[tuple[str, ...], float]:
    page = GatewayMetrics(_board(report)[0]).exposition().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_cache_metrics_are_labelled_by_tier_and_cause() -> None:
    """Tokens by tier and cause, vLLM's two names, all other values as reported."""
    counters = {
        "cache_hit_tokens_memory_total": 500.0,
        "cache_hit_tokens_ssd_total": 250.0,
        "cache_miss_tokens_new_total": 200.0,
        "cache_miss_tokens_diverged_total": 50.0,
        "cache_restore_ms_total": 12.5,
        "scheduler_cpu_ms_total": 1_500.0,
        "steps_total": 3.0,
    }
    samples = _samples(ready_status(counters=counters, gauges={"cache_resident_bytes": 4096.0}))
    expected = {
        ("lockstep_cache_hit_tokens_total", "memory"): 500,
        ("lockstep_cache_hit_tokens_total", "ssd"): 250,
        ("lockstep_cache_miss_tokens_total", "new"): 200,
        ("lockstep_cache_miss_tokens_total", "diverged"): 50,
        ("lockstep_prefix_cache_queries_total",): 1_000,
        ("lockstep_prefix_cache_hits_total",): 750,
        ("lockstep_cache_restore_seconds_total",): 0.0125,
        ("lockstep_cache_resident_bytes",): 4096,
        ("lockstep_scheduler_cpu_seconds_total",): 1.5,
        ("lockstep_scheduler_steps_total",): 3,
    }
    assert {name: samples.get(name) for name in expected} == expected
    assert not [name for name in samples if name[0].startswith("lockstep_scheduler_cache")]


def test_gateway_has_no_cache_metrics_when_report_has_no_cache_counters() -> None:
    """A report without cache counters gives no cache metrics."""
    assert not [name for name in _samples(ready_status()) if "cache_hit" in name[0]]
    assert not [name for name in _samples(ready_status()) if "prefix_cache" in name[0]]
