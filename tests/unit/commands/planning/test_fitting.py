"""Memory arithmetic of a plan: rows of the batch, splits over hosts, and the recommendation."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.commands.planning import recommend
from services.commands.planning.budget import KVRoom
from services.commands.planning.hosts import GIB, RankMemory, memory_of_sizes
from services.commands.planning.model.kv import KVBytes
from services.commands.planning.splits import (
    DraftMemory,
    MemoryDemand,
    PlannedModel,
    all_splits,
    plan_split,
    rank_parts,
)
from shared.messages.base import Sharding
from shared.messages.rank_link import VocabularySplit
from tests.unit.commands.planning import sparse_checkpoints

DEMAND = MemoryDemand(context_tokens=32_768, sequences=1, kv_bits=0, kv_row_growth_tokens=256)

ROOMS = st.builds(
    KVRoom,
    usable_bytes=st.integers(0, 2**40),
    weights_bytes=st.integers(0, 2**39),
    kv=st.builds(KVBytes, per_token=st.integers(0, 2**20), per_row=st.integers(0, 2**24)),
    draft_bytes_per_token=st.integers(0, 2**12),
    kv_bytes_max=st.sampled_from([0, 2**20, 2**35]),
)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> PlannedModel:
    """Return Llama 3.1 70B in 16 bits."""
    folder = tmp_path_factory.mktemp("dense")
    return sparse_checkpoints.planned_model(
        sparse_checkpoints.write(
            folder, sparse_checkpoints.DENSE, sparse_checkpoints.dense_shapes()
        )
    )


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> PlannedModel:
    """Return Qwen3 30B A3B in 16 bits."""
    folder = tmp_path_factory.mktemp("mixture")
    return sparse_checkpoints.planned_model(
        sparse_checkpoints.write(
            folder, sparse_checkpoints.EXPERTS, sparse_checkpoints.expert_shapes()
        )
    )


def test_plan_leaves_memory_for_weights_of_loaded_spares(dense: PlannedModel) -> None:
    """With loaded spare processes each rank has as much less memory as its weights take."""
    memory = memory_of_sizes([256 * GIB] * 2, "metal")
    (once, _), (twice, _) = (
        rank_parts(dense, "tensor", memory, dataclasses.replace(DEMAND, weight_copies=copies))
        for copies in (1, 2)
    )

    assert twice.room.usable_bytes == once.room.usable_bytes - once.room.weights_bytes
    assert twice.room.weights_bytes == once.room.weights_bytes


@given(room=ROOMS, tokens=st.integers(1, 2**21), sequences=st.integers(1, 64))
def test_sequences_fit_exactly_when_reported_missing_bytes_are_added(
    room: KVRoom, tokens: int, sequences: int
) -> None:
    """0 missing bytes mean that the sequences fit; adding the missing bytes makes them fit."""
    short = room.short_bytes(sequences, tokens)

    if short == 0:
        assert room.sequences(tokens) >= sequences or room.rows.row_bytes(1, tokens) == 0
    elif not room.kv_bytes_max:
        assert room.sequences(tokens) < sequences
        more = KVRoom(
            room.usable_bytes + short + 2, room.weights_bytes, room.kv, room.draft_bytes_per_token
        )
        assert more.sequences(tokens) >= sequences


@given(room=ROOMS)
def test_longest_planned_sequence_fits_and_next_longer_one_does_not(room: KVRoom) -> None:
    """A row of the longest length fits the memory, and a row one growth step longer does not."""
    longest = room.longest(256)

    if longest > 0 and room.rows.row_bytes_per_token:
        assert room.sequences(longest) >= 1
        assert room.sequences(longest + 256) == 0


@given(room=ROOMS)
def test_weights_kv_budget_and_reserve_add_up_to_usable_memory(room: KVRoom) -> None:
    """The three parts sum to the usable memory exactly."""
    if room.weights_bytes <= room.usable_bytes:
        parts = room.weights_bytes + room.budget_bytes + room.reserve_bytes
        assert parts == room.usable_bytes


@pytest.mark.parametrize(("vocabulary", "whole"), [("off", 2), ("auto", 1), ("all", 0)])
def test_tensor_split_divides_layers_and_embedding_and_output_as_set(
    dense: PlannedModel, vocabulary: VocabularySplit, whole: int
) -> None:
    """Each of two ranks holds half of the 80 layers, and embedding and output whole or half."""
    asked = dataclasses.replace(DEMAND, vocabulary=vocabulary)
    option = plan_split(dense, "tensor", memory_of_sizes([256 * GIB] * 2, "metal"), asked)

    outer = 2 * (whole * 128_256 * 8_192 + 8_192)
    norms = 2 * 80 * 2 * 8_192
    assert [share.whole_bytes for share in option.shares] == [outer + norms] * 2
    assert (
        sum(share.divided_bytes for share in option.shares)
        == dense.checkpoint.bytes - outer - norms
    )


def test_expert_split_divides_experts_and_keeps_all_else_whole(mixture: PlannedModel) -> None:
    """A rank holds half of the experts, the whole KV, and everything else if the head is whole."""
    asked = dataclasses.replace(DEMAND, vocabulary="off")
    option = plan_split(mixture, "expert", memory_of_sizes([64 * GIB] * 2, "metal"), asked)

    routed = 48 * 128 * 3 * 768 * 2_048 * 2
    for share in option.shares:
        assert share.divided_bytes == routed // 2
        assert share.whole_bytes == mixture.checkpoint.bytes - routed
        assert share.kv_bytes_per_token == mixture.kv.bytes().per_token


def test_split_of_tensors_and_experts_has_kv_of_tensors_and_experts_by_memory(
    mixture: PlannedModel,
) -> None:
    """A rank holds half of the KV and of all else, and experts in proportion to its memory."""
    asked = dataclasses.replace(DEMAND, vocabulary="off")
    memory = memory_of_sizes([128 * GIB, 64 * GIB], "metal")
    tensors = plan_split(mixture, "tensor", memory, asked).shares
    both = plan_split(mixture, "tensor+expert", memory, asked).shares

    routed = 48 * 128 * 3 * 768 * 2_048 * 2
    rest = tensors[0].divided_bytes - routed // 2
    assert rest > 0
    assert [one.divided_bytes for one in both] == [
        rest + routed * 85 // 128, rest + routed * 43 // 128
    ]  # fmt: skip
    for one, other in zip(both, tensors, strict=True):
        assert one.whole_bytes == other.whole_bytes
        assert one.kv_bytes_per_token == other.kv_bytes_per_token
        assert one.kv_bytes_per_token == mixture.kv.bytes().per_token // 2


@pytest.mark.parametrize("sharding", ["expert", "tensor+expert"])
def test_plan_divides_experts_by_configured_shares_of_as_many_ranks(
    mixture: PlannedModel, sharding: Sharding
) -> None:
    """`world.expert_shares` is for one number of ranks; others divide experts by memory."""
    asked = dataclasses.replace(DEMAND, expert_shares=(96, 32))
    for ranks, most, fewest in ((2, 96, 32), (4, 32, 32)):
        memory = memory_of_sizes([64 * GIB] * ranks, "metal")
        found = [one.divided_bytes for one in plan_split(mixture, sharding, memory, asked).shares]
        one_expert = 48 * 3 * 768 * 2_048 * 2
        assert found[0] - found[1] == (most - fewest) * one_expert


def test_plan_is_equal_for_separate_and_stacked_expert_tensors(
    mixture: PlannedModel, tmp_path: Path
) -> None:
    """Hugging Face's separate experts lead to the same plan as mlx-lm's stacked ones."""
    shapes = sparse_checkpoints.expert_shapes(stacked=False)
    other = sparse_checkpoints.planned_model(
        sparse_checkpoints.write(tmp_path, sparse_checkpoints.EXPERTS, shapes)
    )
    memory = memory_of_sizes([64 * GIB] * 4, "metal")

    assert all_splits(other, memory, DEMAND) == all_splits(mixture, memory, DEMAND)


def test_plan_gives_hosts_experts_and_layers_in_proportion_to_memory(mixture: PlannedModel) -> None:
    """A host with twice the memory gets about twice the experts and layers; none is lost."""
    memory = memory_of_sizes([128 * GIB, 64 * GIB], "metal")

    asked = dataclasses.replace(DEMAND, vocabulary="off")
    experts = plan_split(mixture, "expert", memory, asked)
    layers = plan_split(mixture, "pipeline", memory, asked)

    routed = 48 * 128 * 3 * 768 * 2_048 * 2
    assert sum(share.divided_bytes for share in experts.shares) == routed
    assert experts.shares[0].divided_bytes == routed * 85 // 128
    assert experts.shares[1].divided_bytes == routed * 43 // 128
    outer = sum(tensor.bytes for tensor in mixture.checkpoint.outer.values())
    assert sum(one.divided_bytes for one in layers.shares) == mixture.checkpoint.bytes - outer
    token = mixture.kv.bytes().per_token
    assert [share.kv_bytes_per_token for share in layers.shares] == [
        token * 32 // 48,
        token * 16 // 48,
    ]


def test_planned_context_is_limited_by_rank_with_least_room_for_kv(mixture: PlannedModel) -> None:
    """With unequal layers the rank that keeps most KV per token limits the context."""
    memory = memory_of_sizes([128 * GIB, 64 * GIB], "metal")

    option = plan_split(mixture, "pipeline", memory, DEMAND)

    budget = min(share.kv_budget_bytes for share in option.shares)
    token = max(share.kv_bytes_per_token for share in option.shares)
    assert option.context_tokens == budget // token // 256 * 256


def test_impossible_split_is_reported_with_its_reason(dense: PlannedModel) -> None:
    """Three ranks cannot divide 64 heads, and a dense model has no experts."""
    options = all_splits(dense, memory_of_sizes([256 * GIB] * 3, "metal"), DEMAND)

    words = {(one.ranks, one.sharding): one.obstacle for one in options}
    assert "num_attention_heads is 64" in words[3, "tensor"]
    assert "no routed experts" in words[2, "expert"]
    assert words[2, "tensor"] == words[1, "none"] == ""


def test_plan_with_fewer_ranks_than_hosts_uses_hosts_with_most_memory(dense: PlannedModel) -> None:
    """A single rank runs on the larger of two hosts."""
    options = all_splits(dense, memory_of_sizes([64 * GIB, 512 * GIB], "metal"), DEMAND)

    assert [share.host for share in options[0].shares] == ["host 1"]


def test_plan_counts_draft_model_on_every_rank(dense: PlannedModel) -> None:
    """Each rank holds the draft model's weights whole and its KV for every row."""
    drafting = PlannedModel(dense.checkpoint, dense.kv, DraftMemory(10 * GIB, 1_000))
    memory = memory_of_sizes([512 * GIB] * 2, "metal")

    plain = plan_split(dense, "tensor", memory, DEMAND)
    option = plan_split(drafting, "tensor", memory, DEMAND)

    for before, after in zip(plain.shares, option.shares, strict=True):
        assert after.whole_bytes - before.whole_bytes == 10 * GIB
        assert after.kv_bytes_per_token - before.kv_bytes_per_token == 1_000


def _choose(
    model: PlannedModel, memory: list[RankMemory], demand: MemoryDemand
) -> tuple[str, int, int, int] | None:
    choice = recommend.choose(model, memory, demand)
    if choice is None:
        return None
    option = choice.option
    return option.sharding, option.ranks, choice.kv_bits, choice.context_tokens


def test_plan_uses_all_hosts_and_divides_experts_when_memory_suffices(
    dense: PlannedModel, mixture: PlannedModel
) -> None:
    """The recommendation takes all hosts, and the expert split for a model with experts."""
    memory = memory_of_sizes([512 * GIB] * 2, "metal")

    assert _choose(dense, memory, DEMAND) == ("tensor", 2, 0, 32_768)
    assert _choose(mixture, memory, DEMAND) == ("expert", 2, 0, 32_768)


def test_plan_divides_tensors_and_experts_where_hosts_are_unequal_and_kv_must_be_divided(
    mixture: PlannedModel,
) -> None:
    """Half of the model does not fit on the small host, and the whole KV of long contexts not
    either."""
    memory = memory_of_sizes([128 * GIB, 32 * GIB], "metal")
    asked = dataclasses.replace(DEMAND, context_tokens=32_768, sequences=3)

    assert _choose(mixture, memory, asked) == ("tensor+expert", 2, 0, 32_768)


def test_plan_lowers_kv_bits_before_it_shortens_context(dense: PlannedModel) -> None:
    """KV gets fewer bits first; the context becomes shorter only if that is not enough."""
    weights = dense.checkpoint.bytes
    row = 32_768 * dense.kv.bytes().per_token
    tight = [RankMemory("one", weights + row, weights + row)]
    tighter = [RankMemory("one", weights + row // 8, weights + row // 8)]

    assert _choose(dense, tight, DEMAND) == ("none", 1, 8, 32_768)
    shorter = _choose(dense, tighter, DEMAND)
    assert shorter is not None
    assert shorter[2] == 4
    assert 1_024 <= shorter[3] < 32_768


def test_plan_recommends_nothing_when_weights_fit_in_no_split(dense: PlannedModel) -> None:
    """Weights that fit in no split lead to no recommendation."""
    assert _choose(dense, memory_of_sizes([32 * GIB] * 2, "metal"), DEMAND) is None


def test_plan_recommends_pipeline_split_only_when_other_splits_do_not_fit(tmp_path: Path) -> None:
    """Layers are divided if one host is too small for a tensor split, and otherwise not."""
    config = {**sparse_checkpoints.DENSE, "model_type": "qwen2"}
    model = sparse_checkpoints.planned_model(
        sparse_checkpoints.write(tmp_path, config, sparse_checkpoints.dense_shapes(config))
    )
    whole = model.checkpoint.bytes
    unequal = [RankMemory("a", whole, whole), RankMemory("b", whole, int(whole * 0.4))]
    equal = [RankMemory("a", whole, whole), RankMemory("b", whole, whole)]

    assert _choose(model, unequal, DEMAND) == ("pipeline", 2, 0, 32_768)
    assert _choose(model, equal, DEMAND) == ("tensor", 2, 0, 32_768)
