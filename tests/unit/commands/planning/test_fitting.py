"""What fits: the arithmetic of rows, splittings over hosts, and the line to follow."""

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
)
from tests.unit.commands.planning import headers

ASKED = MemoryDemand(context_tokens=32_768, sequences=1, kv_bits=0, kv_row_growth_tokens=256)

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
    """Llama 3.1 70B in 16 bits."""
    folder = tmp_path_factory.mktemp("dense")
    return headers.model(headers.write_model(folder, headers.DENSE, headers.dense_shapes()))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> PlannedModel:
    """Qwen3 30B A3B in 16 bits."""
    folder = tmp_path_factory.mktemp("mixture")
    return headers.model(headers.write_model(folder, headers.EXPERTS, headers.expert_shapes()))


@given(room=ROOMS, tokens=st.integers(1, 2**21), sequences=st.integers(1, 64))
def test_short_by_nothing_means_that_it_fits(room: KVRoom, tokens: int, sequences: int) -> None:
    """What is said to be missing is what is missing: with so much more it fits, else it does."""
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
def test_the_longest_row_fits_and_a_longer_one_does_not(room: KVRoom) -> None:
    """The longest sequence is the longest, in whole steps of growth."""
    longest = room.longest(256)

    if longest > 0 and room.rows.row_bytes_per_token:
        assert room.sequences(longest) >= 1
        assert room.sequences(longest + 256) == 0


@given(room=ROOMS)
def test_weights_rows_and_reserve_are_all_the_memory(room: KVRoom) -> None:
    """Nothing is counted twice, and nothing is forgotten."""
    if room.weights_bytes <= room.usable_bytes:
        parts = room.weights_bytes + room.budget_bytes + room.reserve_bytes
        assert parts == room.usable_bytes


def test_tensors_divide_all_but_norms_and_outer_matrices(dense: PlannedModel) -> None:
    """Over two ranks each holds embedding and output whole, and half of the 80 layers."""
    option = plan_split(dense, "tensor", memory_of_sizes([256 * GIB] * 2, "metal"), ASKED)

    outer = 2 * (2 * 128_256 * 8_192 + 8_192)
    norms = 2 * 80 * 2 * 8_192
    assert [share.whole_bytes for share in option.shares] == [outer + norms] * 2
    assert (
        sum(share.divided_bytes for share in option.shares)
        == dense.checkpoint.bytes - outer - norms
    )


def test_experts_are_divided_and_attention_is_not(mixture: PlannedModel) -> None:
    """Memory per rank is what all hold plus half of the experts; KV is whole on each rank."""
    option = plan_split(mixture, "expert", memory_of_sizes([64 * GIB] * 2, "metal"), ASKED)

    routed = 48 * 128 * 3 * 768 * 2_048 * 2
    for share in option.shares:
        assert share.divided_bytes == routed // 2
        assert share.whole_bytes == mixture.checkpoint.bytes - routed
        assert share.kv_bytes_per_token == mixture.kv.bytes().per_token


def test_experts_stored_one_by_one_count_the_same(mixture: PlannedModel, tmp_path: Path) -> None:
    """Hugging Face's layout of experts leads to the same plan as mlx-lm's."""
    shapes = headers.expert_shapes(stacked=False)
    other = headers.model(headers.write_model(tmp_path, headers.EXPERTS, shapes))
    memory = memory_of_sizes([64 * GIB] * 4, "metal")

    assert all_splits(other, memory, ASKED) == all_splits(mixture, memory, ASKED)


def test_unequal_hosts_get_unequal_experts_and_layers(mixture: PlannedModel) -> None:
    """Twice the memory, about twice the experts; every expert and layer is somewhere once."""
    memory = memory_of_sizes([128 * GIB, 64 * GIB], "metal")

    experts = plan_split(mixture, "expert", memory, ASKED)
    layers = plan_split(mixture, "pipeline", memory, ASKED)

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


def test_rows_are_counted_as_the_scheduler_does(mixture: PlannedModel) -> None:
    """Unequal layers: rows take on each rank what they take on the rank with most to keep."""
    memory = memory_of_sizes([128 * GIB, 64 * GIB], "metal")

    option = plan_split(mixture, "pipeline", memory, ASKED)

    budget = min(share.kv_budget_bytes for share in option.shares)
    token = max(share.kv_bytes_per_token for share in option.shares)
    assert option.context_tokens == budget // token // 256 * 256


def test_what_cannot_be_says_why(dense: PlannedModel) -> None:
    """Three ranks divide no 64 heads, a dense model has no experts: both are named."""
    options = all_splits(dense, memory_of_sizes([256 * GIB] * 3, "metal"), ASKED)

    words = {(one.ranks, one.sharding): one.obstacle for one in options}
    assert "num_attention_heads is 64" in words[3, "tensor"]
    assert "no routed experts" in words[2, "expert"]
    assert words[2, "tensor"] == words[1, "none"] == ""


def test_fewer_ranks_take_the_richest_hosts(dense: PlannedModel) -> None:
    """One rank of two unequal hosts is the larger one."""
    options = all_splits(dense, memory_of_sizes([64 * GIB, 512 * GIB], "metal"), ASKED)

    assert [share.host for share in options[0].shares] == ["host 1"]


def test_a_draft_model_is_on_every_rank(dense: PlannedModel) -> None:
    """Its weights are held whole by each rank, and its keys grow with every row."""
    drafting = PlannedModel(dense.checkpoint, dense.kv, DraftMemory(10 * GIB, 1_000))
    memory = memory_of_sizes([512 * GIB] * 2, "metal")

    plain = plan_split(dense, "tensor", memory, ASKED)
    option = plan_split(drafting, "tensor", memory, ASKED)

    for before, after in zip(plain.shares, option.shares, strict=True):
        assert after.whole_bytes - before.whole_bytes == 10 * GIB
        assert after.kv_bytes_per_token - before.kv_bytes_per_token == 1_000


def _choose(
    model: PlannedModel, memory: list[RankMemory], asked: MemoryDemand
) -> tuple[str, int, int, int] | None:
    choice = recommend.choose(model, memory, asked)
    if choice is None:
        return None
    option = choice.option
    return option.sharding, option.ranks, choice.kv_bits, choice.context_tokens


def test_recommends_experts_before_matrices_and_all_hosts(
    dense: PlannedModel, mixture: PlannedModel
) -> None:
    """All named hosts where that works; whole experts where there are some."""
    memory = memory_of_sizes([512 * GIB] * 2, "metal")

    assert _choose(dense, memory, ASKED) == ("tensor", 2, 0, 32_768)
    assert _choose(mixture, memory, ASKED) == ("expert", 2, 0, 32_768)


def test_recommends_fewer_bits_before_a_shorter_context(dense: PlannedModel) -> None:
    """When rows do not fit as computed, 8 bits; when nothing helps, the longest that fits."""
    weights = dense.checkpoint.bytes
    row = 32_768 * dense.kv.bytes().per_token
    tight = [RankMemory("one", weights + row, weights + row)]
    tighter = [RankMemory("one", weights + row // 8, weights + row // 8)]

    assert _choose(dense, tight, ASKED) == ("none", 1, 8, 32_768)
    shorter = _choose(dense, tighter, ASKED)
    assert shorter is not None
    assert shorter[2] == 4
    assert 1_024 <= shorter[3] < 32_768


def test_recommends_nothing_where_nothing_fits(dense: PlannedModel) -> None:
    """Weights that fit nowhere are no recommendation, however they are split."""
    assert _choose(dense, memory_of_sizes([32 * GIB] * 2, "metal"), ASKED) is None


def test_a_pipeline_is_the_last_resort(tmp_path: Path) -> None:
    """Layers are divided where matrices cannot be, because one host is small; else never."""
    config = {**headers.DENSE, "model_type": "qwen2"}
    model = headers.model(headers.write_model(tmp_path, config, headers.dense_shapes(config)))
    whole = model.checkpoint.bytes
    unequal = [RankMemory("a", whole, whole), RankMemory("b", whole, int(whole * 0.4))]
    equal = [RankMemory("a", whole, whole), RankMemory("b", whole, whole)]

    assert _choose(model, unequal, ASKED) == ("pipeline", 2, 0, 32_768)
    assert _choose(model, equal, ASKED) == ("tensor", 2, 0, 32_768)
