"""Counts of assignments to experts from two real ranks, of which each has its own experts."""

import contextlib
from pathlib import Path

import pytest

from services.supervisor.status.experts_query import ask_experts
from shared.configuration.settings import Config, SchedulerConfig
from shared.measurements import expert_file
from shared.messages import ExpertLayer, ExpertsReported, StatusReported
from tests.multirank.worlds.cluster import cluster
from tests.multirank.worlds.saved_model import save_model
from tests.support.waiting import wait_until

PROMPTS = {
    f"r{one}": [(7 * place + 3 + 5 * one) % 211 for place in range(9 + 31 * one)]
    for one in range(4)
}
TOKENS = 24
EXPERTS, LAYERS, K = 6, 3, 2
ASSIGNMENTS = K * sum(len(prompt) + TOKENS - 1 for prompt in PROMPTS.values())
"""Per layer; the last token of a request is not computed."""


def _serve(
    model: Path, ranks: int, every_steps: int, **settings: str
) -> tuple[dict[str, list[int]], ExpertsReported, StatusReported]:
    """Serve all prompts; return their tokens, the table of experts and the status."""
    settings |= {
        "MODEL_PATH": str(model),
        "SCHEDULER_EXPERTS_EVERY_STEPS": str(every_steps),
        "MODEL_CONTEXT_TOKENS_MAX": "4096",
        "CACHE_ENABLED": "false",
    }
    with cluster(ranks, **settings) as client:
        config = Config(scheduler=SchedulerConfig(gateway_address=client.address))
        for name, prompt in PROMPTS.items():
            client.submit(name, prompt, max_tokens=TOKENS)
        client.wait_for_ends([*PROMPTS], 60.0)

        def is_complete() -> bool:
            layers = ask_experts(config).layers
            return len(layers) == LAYERS and _sums(layers) == [ASSIGNMENTS] * (LAYERS - 1)

        if every_steps:
            with contextlib.suppress(AssertionError):
                wait_until(is_complete, 15.0, poll_s=0.2)
        # Older reports have come meanwhile.
        client.poll()
        return client.tokens, ask_experts(config), client.query_status()


def _counts(report: ExpertsReported) -> list[list[int]]:
    return [one.counts for one in report.layers]


def _sums(layers: list[ExpertLayer]) -> list[int]:
    """Return the assignments of each layer but the last, which the first chunks of a prompt do not
    compute."""
    return [sum(one.counts) for one in layers[:-1]]


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_two_ranks_count_what_one_rank_counts_and_tokens_are_same(tmp_path: Path) -> None:
    """Each assignment counts once, on the rank that has its expert, with equal and other shares.

    The model has shared experts, and the texts are those of ranks that count nothing. With other
    shares its attention is divided too.
    """
    model = tmp_path / "model"
    save_model(model, "deepseek_v3", num_hidden_layers=LAYERS, first_k_dense_replace=0)
    expected, nothing, _ = _serve(model, 1, 0)
    assert nothing.layers == []
    tokens, whole, _ = _serve(model, 1, 1)
    assert tokens == expected
    assert _sums(whole.layers) == [ASSIGNMENTS] * (LAYERS - 1)
    for sharding, shares, first in (("expert", "", 3), ("tensor+expert", "1,2", 2)):
        tokens, found, status = _serve(
            model, 2, 1, WORLD_SHARDING=sharding, WORLD_EXPERT_SHARES=shares
        )
        assert tokens == expected
        assert _counts(found)[:-1] == _counts(whole)[:-1]
        for layer in found.layers:
            ranges = [(one.rank, one.first, one.count) for one in layer.ranges]
            assert ranges == [(0, 0, first), (1, first, EXPERTS - first)]
        own = [
            sum(sum(one.counts[part]) for one in found.layers)
            for part in (slice(first), slice(first, EXPERTS))
        ]
        assert [one.assignments for one in status.ranks] == own
        assert [one.foreign_assignments for one in status.ranks] == own[::-1]
        assert 1.0 <= status.gauges["expert_rank_imbalance"] <= 2.0
    file = tmp_path / "experts.json"
    expert_file.write(file, found)
    assert expert_file.read(file) == found


@pytest.mark.proof
def test_ranks_with_divided_matrices_report_the_table_once(tmp_path: Path) -> None:
    """Both ranks hold a part of every expert, and nothing is counted twice."""
    model = tmp_path / "model"
    save_model(model, "qwen3_moe", num_hidden_layers=LAYERS)
    _, found, status = _serve(model, 2, 1, WORLD_SHARDING="tensor")
    assert _sums(found.layers) == [ASSIGNMENTS] * (LAYERS - 1)
    assert [one.assignments for one in status.ranks] == [sum(map(sum, _counts(found)))] * 2
    assert [one.foreign_assignments for one in status.ranks] == [0, 0]
