"""Models with each kind of split on a real ring."""

from pathlib import Path
from typing import Any

import pytest

from tests.multirank.worlds.cached_prompts import BLOCK, SETTINGS, generate
from tests.multirank.worlds.cluster import cluster
from tests.multirank.worlds.ring import run_ring
from tests.multirank.worlds.saved_model import save_model

DENSE, MOE, MLA, HYBRID = "qwen2", "qwen3_moe", "deepseek_v3", "qwen3_5_moe"
CASES = [
    *[f"tensor:{family}" for family in (DENSE, MOE, MLA, HYBRID)],
    *[f"expert:{family}" for family in (MOE, MLA, HYBRID)],
    *[f"tensor+expert:{family}" for family in (MOE, MLA, HYBRID)],
    *[f"pipeline:{family}" for family in (DENSE, MOE, MLA, HYBRID)],
]
LAYERS = 5
DEADLINE_S = 280.0
"""Fourteen models on four ranks of a busy machine with two cores."""

EXPERT_LAYERS = {MOE: LAYERS, MLA: LAYERS - 1, HYBRID: LAYERS}


def _run_ring(size: int, cases: list[str], folder: Path) -> list[dict[str, Any]]:
    """Run all cases on a ring of this size; return the results of each rank."""
    return run_ring("tests.multirank.worlds.split_rank", cases, size, folder, DEADLINE_S)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of one rank by model family."""
    cases = [f"tensor:{family}" for family in (DENSE, MOE, MLA, HYBRID)]
    (found,) = _run_ring(1, cases, tmp_path_factory.mktemp("one"))
    return {case.split(":")[1]: one for case, one in found.items()}


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [2, 4])
def test_all_splits_generate_same_tokens_as_one_rank(
    size: int, one_rank: dict[str, Any], tmp_path: Path
) -> None:
    """All splits, by tensors, experts, both or layers, generate the tokens of one rank.

    Models are dense, MoE, MLA and hybrid, with unequal shares where possible. Sequences leave and
    others join. Receipts are equal on all ranks, and a decode needs no more collectives than
    necessary:
    one sum per layer of experts and one for the sampled ids, or the transfers of a pipeline.
    """
    ranks = _run_ring(size, CASES, tmp_path)
    for case in CASES:
        sharding, family = case.split(":")
        found = [rank[case] for rank in ranks]
        whole = one_rank[family]
        assert len(set(map(str, whole["tokens"].values()))) == 6, "the sequences differ"
        assert _table(found, sharding) == _table([whole], sharding), case
        for one in found:
            assert one["tokens"] == whole["tokens"], case
            assert one["digests"] == found[0]["digests"], case
            assert one["split"] == found[0]["split"] != "none"
        collectives = [one["collectives_per_decode"] for one in found]
        if sharding == "expert":
            assert collectives == [EXPERT_LAYERS[family] + 1] * size
        if sharding == "pipeline":
            # Each rank sends or receives activations, or both; rank 0's result and ids go to all.
            assert collectives == [3, *[4] * (size - 2), 3]
            assert sum(one["layers"] for one in found) == LAYERS
            kv = [one["kv_bytes_per_token"] for one in found]
            assert sum(kv) == whole["kv_bytes_per_token"], "each rank keeps its own layers' KV"
        if sharding != "tensor":
            assert len({one["bytes"] for one in found}) > 1, "shares follow unequal memory"


def _table(ranks: list[dict[str, Any]], sharding: str) -> list[tuple[int, int, int]]:
    """Return (layer, expert, assignments) of the experts that ranks hold, each once."""
    reports = ranks[:1] if sharding == "tensor" else ranks
    rows = [row for rank in reports for row in rank["experts"]]
    table = [
        (layer, expert, count)
        for layer, first, counts in rows
        for expert, count in enumerate(counts, first)
    ]
    return sorted(table)


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_stored_blocks_of_world_with_other_split_are_not_found(tmp_path: Path) -> None:
    """Stored blocks are found only by a world with the same split."""
    model, blocks = tmp_path / "model", tmp_path / "blocks"
    blocks.mkdir()
    save_model(model, MOE, num_hidden_layers=4)
    prompt = [(7 * place + 3) % 211 for place in range(3 * BLOCK + 5)]
    whole = 3 * BLOCK
    answers = []
    for ranks, sharding, due in (
        (1, "auto", 0),
        (2, "expert", 0),
        (2, "tensor+expert", 0),
        (2, "pipeline", 0),
        (2, "tensor+expert", whole),
    ):
        settings = {
            **SETTINGS,
            "MODEL_PATH": str(model),
            "WORLD_SHARDING": sharding,
            "WORLD_ENABLE_PIPELINE": "true",
        }
        with cluster(ranks, blocks, **settings) as client:
            tokens, found = generate(client, "asked", prompt)
            status = client.query_status()
            if not due:
                client.wait_for_spills(3)
        answers.append(tokens)
        assert found == due, (sharding, found)
        assert status.counters["epochs_total"] == 1.0
    assert answers == [answers[0]] * 5


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_pipeline_split_of_hybrid_model_generates_same_tokens_as_one_rank(tmp_path: Path) -> None:
    """A pipeline with attention on rank 0 and recurrence on rank 1 generates one rank's texts.

    More requests than rows, of uneven lengths; repeated prompts start from blocks and checkpoints
    in
    memory, and in files after a restart.
    """
    model, blocks = tmp_path / "model", tmp_path / "blocks"
    blocks.mkdir()
    save_model(model, HYBRID, num_hidden_layers=2, full_attention_interval=2)
    settings = {
        **SETTINGS,
        "MODEL_PATH": str(model),
        "SCHEDULER_RUNNING_SEQUENCES_MAX": "3",
        "WORLD_ENABLE_PIPELINE": "true",
    }
    prompts = [
        [(7 * place + 3 + 5 * one) % 211 for place in range(count)]
        for one, count in enumerate((21, 5, 40, 9, 33, 8))
    ]
    whole = 2 * BLOCK
    found = []
    for ranks, sharding, due in ((1, "auto", 0), (2, "pipeline", 0), (2, "pipeline", whole)):
        with cluster(ranks, blocks, WORLD_SHARDING=sharding, **settings) as client:
            if not due:
                for one, prompt in enumerate(prompts):
                    client.submit(f"r{one}", prompt, max_tokens=4 + 7 * (one % 3))
                client.wait_for_ends([f"r{one}" for one in range(len(prompts))], 60.0)
            again, cached = generate(client, "again", prompts[2])
            status = client.query_status()
            if not due:
                # All seven blocks, checkpoints at the ends of five, and any others: where prompts
                # are cut depends on measured times.
                client.wait_for_spills(12)
                client.wait_for_all_spills()
        assert cached == whole, (sharding, ranks)
        assert status.counters["epochs_total"] == 1.0
        texts = [client.tokens[f"r{one}"] for one in range(len(prompts))] if not due else []
        found.append((texts, again))
    assert found[1] == found[0]
    assert found[2][1] == found[0][1]
