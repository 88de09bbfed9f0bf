"""Block orders in plans: which of them the executor refuses, and the sizes it reports."""

from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache

from services.rank_worker.kv_cache.blocks.items import CachedItem
from services.rank_worker.kv_cache.rows.cache_parts import part_kinds
from shared.errors import InvariantBroken
from shared.messages import AdmittedSequence, AdoptedRestore, KeptBlock, KeptCheckpoint, SpillOrder
from tests.mlx.blocks.block_driver import (
    NAMESPACE,
    BlockDriver,
    as_restored_items,
    block_hash,
    checkpoint_hash,
    resident_bytes,
)
from tests.mlx.executor_driver import (
    admission,
    generate_alone,
    make_executor,
    make_prompt,
    prefill_chunk,
)
from tests.mlx.models import MODEL_FACTORIES, STATEFUL_FAMILIES, MakeModel, WrappedModel

FAMILIES = list(MODEL_FACTORIES)
PROMPT = make_prompt(1, 20)
FIRST, SECOND = block_hash(PROMPT[:8]), block_hash(PROMPT[:16])
MIDDLE, END = checkpoint_hash(PROMPT[:8]), checkpoint_hash(PROMPT[:16])
NEW = bytes(range(32))


def _keep(start: int, length: int, name: bytes = NEW, sequence_id: int = 1) -> dict[str, Any]:
    kept = KeptBlock(sequence_id=sequence_id, start=start, length=length, hash=name)
    return {"keep_blocks": [kept]}


def _keep_state(position: int, sequence_id: int = 1, name: bytes = NEW) -> dict[str, Any]:
    kept = KeptCheckpoint(sequence_id=sequence_id, position=position, hash=name)
    return {"keep_checkpoints": [kept]}


def _reuse(reused: int, names: list[bytes], state: bytes | None = None) -> dict[str, Any]:
    admitted = msgspec.structs.replace(
        admission(3, 3, PROMPT), reused_tokens=reused, reused_blocks=names, checkpoint=state
    )
    return {"admitted": [admitted]}


def _spill(*names: bytes) -> dict[str, Any]:
    return {"spill": SpillOrder(namespace=NAMESPACE, hashes=list(names))}


WRONG_ANYWHERE: dict[str, dict[str, Any]] = {
    "keep from nobody": _keep(0, 8, sequence_id=99),
    "keep what is resident": _keep(0, 8, FIRST),
    "keep twice": {"keep_blocks": _keep(0, 8)["keep_blocks"] * 2},
    "keep past the row's end": _keep(16, 5),
    "keep of a state under a block's hash": _keep_state(16, name=FIRST),
    "keep of a state of nobody": _keep_state(16, sequence_id=99),
    "keep of a state at another position": _keep_state(8),
    "evict what is not there": {"evict_blocks": [NEW]},
    "evict twice": {"evict_blocks": [FIRST, FIRST]},
    "spill what is not there": _spill(FIRST, NEW),
    "spill what this plan evicts, again": {"evict_blocks": [FIRST, NEW], **_spill(FIRST)},
    "reuse what is not there": _reuse(8, [NEW]),
    "reuse what this plan evicts": {"evict_blocks": [FIRST], **_reuse(8, [FIRST])},
    "reuse more than the blocks hold": _reuse(17, [FIRST, SECOND]),
    "reuse with a block too many": _reuse(8, [FIRST, SECOND]),
    "reuse no tokens of a block": _reuse(0, [FIRST]),
    "reuse tokens of no block": _reuse(8, []),
    "reuse a checkpoint alone": _reuse(0, [], END),
    "reuse all tokens": {
        "admitted": [
            msgspec.structs.replace(
                admission(3, 3, PROMPT[:16]), reused_tokens=16, reused_blocks=[FIRST, SECOND]
            )
        ]
    },
    "set aside for nobody": {"checkpoints": [99]},
}
WRONG_FOR_PLAIN: dict[str, dict[str, Any]] = {
    "checkpoint that is a block": _reuse(16, [FIRST, SECOND], FIRST),
    "set aside of what can be cut": {"checkpoints": [1]},
}
WRONG_FOR_OTHERS: dict[str, dict[str, Any]] = {
    "reuse without a checkpoint": _reuse(16, [FIRST, SECOND]),
    "checkpoint that stands elsewhere": _reuse(16, [FIRST, SECOND], MIDDLE),
    "part of a block": _reuse(15, [FIRST, SECOND], END),
    "checkpoint as a block": _reuse(16, [FIRST, END], END),
    "checkpoint for all blocks": _reuse(16, [END], END),
    "block as a checkpoint": _reuse(16, [FIRST, SECOND], FIRST),
    "keep of a state that is kept": _keep_state(16),
}


def _driver_with_two_blocks(model: nn.Module) -> BlockDriver:
    driver = BlockDriver(model, row_tokens=32)
    driver.start_from_blocks(1, 1, PROMPT)
    driver.step()
    assert {FIRST, SECOND} <= set(driver.resident)
    return driver


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        *(("qwen3", name) for name in {**WRONG_ANYWHERE, **WRONG_FOR_PLAIN}),
        *(("qwen3_next", name) for name in {**WRONG_ANYWHERE, **WRONG_FOR_OTHERS}),
        *(("mamba2", name) for name in WRONG_FOR_OTHERS),
        *(("deepseek_v32", name) for name in WRONG_FOR_PLAIN),
    ],
)
def test_plan_contradicting_resident_blocks_is_refused(
    make_model: MakeModel, family: str, wrong: str
) -> None:
    """A plan that contradicts the resident blocks or checkpoints raises InvariantBroken."""
    driver = _driver_with_two_blocks(make_model(family))
    plan = super(BlockDriver, driver).plan(
        **{**WRONG_ANYWHERE, **WRONG_FOR_PLAIN, **WRONG_FOR_OTHERS}[wrong]
    )

    with pytest.raises(InvariantBroken):
        driver.executor.launch(plan)


@pytest.mark.parametrize("family", FAMILIES)
def test_block_kept_in_plan_is_spilled_reused_and_evicted_by_same_plan(
    make_model: MakeModel, family: str
) -> None:
    """A block that a plan keeps can be spilled, reused and evicted by the same plan."""
    model = make_model(family)
    driver = BlockDriver(model)
    driver.start_from_blocks(1, 0, PROMPT[:16])
    due = list(driver.pending_keeps())
    items = driver.spill(due, dropped=[1], admitted=[driver.admit(2, 0, PROMPT)])
    driver.step(prefill_chunks=[prefill_chunk(2, 16, 20, 20)])
    driver.step(decodes=[2])
    kept = KeptBlock(sequence_id=2, start=16, length=4, hash=NEW)
    plan = super(BlockDriver, driver).plan(
        keep_blocks=[kept], dropped=[2], evict_blocks=[NEW], **_spill(NEW)
    )
    (last,) = driver.executor.finish(driver.executor.launch(plan)).spills

    assert [item.hash for item in items] == due
    assert driver.tokens[2] == generate_alone(model, PROMPT, 2)
    assert (last.hash, last.tokens) == (NEW, 4)
    with pytest.raises(InvariantBroken):
        driver.executor.launch(super(BlockDriver, driver).plan(**_spill(NEW)))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_kv_cache_that_no_layer_uses_adds_no_block_bytes(
    make_model: MakeModel, family: str
) -> None:
    """A cache that no forward uses changes neither the block layout nor the tokens."""

    class ModelWithUnusedCache(WrappedModel):
        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            return super().__call__(tokens, cache[:-1] if cache else None)

        def make_cache(self) -> list[Any]:
            return [*make_prompt_cache(self.wrapped), RotatingKVCache(8)]

    model = ModelWithUnusedCache(make_model(family))
    driver = BlockDriver(model)
    driver.start_from_blocks(1, 0, PROMPT)

    assert driver.executor.store.layout_text == make_executor(make_model(family)).store.layout_text
    assert driver.start_from_blocks(2, 1, PROMPT) >= 16
    driver.step(decodes=[1, 2])
    assert driver.tokens[1] == driver.tokens[2] == generate_alone(make_model(family), PROMPT, 2)


def test_keeping_checkpoint_after_its_sequence_was_dropped_raises_invariant_broken(
    make_model: MakeModel,
) -> None:
    """A plan that keeps a checkpoint of a sequence dropped earlier raises InvariantBroken."""
    driver = BlockDriver(make_model("mamba2"))
    driver.start_from_blocks(1, 0, PROMPT[:8])
    driver._blocks_to_keep, driver._checkpoints_to_keep = [], []
    driver.step(dropped=[1])

    with pytest.raises(InvariantBroken, match="has no snapshot at"):
        driver.launch(**_keep_state(8))


def test_executor_without_cache_store_refuses_to_adopt_restored_blocks(
    make_model: MakeModel,
) -> None:
    """An executor without a source of restored blocks refuses to adopt any."""
    driver = BlockDriver(make_model("qwen3"))
    driver.executor = make_executor(make_model("qwen3"))

    with pytest.raises(InvariantBroken, match="has no cache store"):
        driver.step(adopted=[AdoptedRestore(restore_id=1, count=0)])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_adopting_first_items_of_restore_makes_only_these_resident(
    make_model: MakeModel, family: str
) -> None:
    """The first `count` items of a restore become resident; blocks already resident stay."""
    driver = _driver_with_two_blocks(make_model(family))
    items = as_restored_items(driver.spill([FIRST, SECOND]))
    held = resident_bytes(driver.executor)
    driver.restores = {1: items, 2: items, 3: items}
    driver.step(adopted=[AdoptedRestore(restore_id=1, count=0)], evict_blocks=[SECOND])
    driver.step(adopted=[AdoptedRestore(restore_id=2, count=1)])
    assert resident_bytes(driver.executor) == held - items[1].payload.nbytes
    driver.step(adopted=[AdoptedRestore(restore_id=3, count=2)])

    assert resident_bytes(driver.executor) == held
    assert driver.restores == {}


def _with_changes(item: CachedItem, **changes: Any) -> CachedItem:
    fields = {"hash": NEW, "kind": item.kind, "tokens": item.tokens, "payload": item.payload}
    return CachedItem(**{**fields, **changes})


def test_restored_blocks_or_checkpoints_with_wrong_size_kind_or_position_are_refused(
    make_model: MakeModel,
) -> None:
    """Restored items with a wrong size, kind, position or payload are refused when they are
    adopted.
    """
    driver = _driver_with_two_blocks(make_model("gemma3"))
    block, state = as_restored_items(driver.spill([SECOND, END]))
    bits = np.array(state.payload)
    flipped = bits.copy()
    flipped[6] ^= 0xFF
    for wrong in (
        _with_changes(block, tokens=7),
        _with_changes(block, tokens=0),
        _with_changes(block, tokens=0, payload=block.payload[:0]),
        _with_changes(block, payload=block.payload[:-1]),
        _with_changes(block, payload=block.payload.view(mx.float32)),
        _with_changes(block, payload=block.payload.reshape(2, -1)),
        _with_changes(block, kind="checkpoint"),
        _with_changes(state, kind="block"),
        _with_changes(state, tokens=8),
        _with_changes(state, payload=state.payload[:-1]),
        _with_changes(state, payload=mx.concatenate([state.payload, state.payload[:64]])),
        _with_changes(state, payload=mx.array(flipped)),
        _with_changes(state, payload=state.payload[:3]),
    ):
        driver.restores[1] = [wrong]
        with pytest.raises(InvariantBroken):
            driver.executor.launch(
                super(BlockDriver, driver).plan(adopted=[AdoptedRestore(restore_id=1, count=1)])
            )
    plain = BlockDriver(make_model("qwen3"))
    plain.restores[1] = [_with_changes(state)]
    with pytest.raises(InvariantBroken):
        plain.step(adopted=[AdoptedRestore(restore_id=1, count=1)])


@pytest.mark.parametrize("family", FAMILIES)
def test_kv_block_and_checkpoint_take_reported_bytes(make_model: MakeModel, family: str) -> None:
    """A block takes the reported bytes per token; a checkpoint those of a row and a header."""
    driver = BlockDriver(make_model(family))
    executor = driver.executor
    driver.start_from_blocks(1, 0, PROMPT)
    items = driver.spill(list(driver.resident))

    assert executor.store.needs_state == (family in STATEFUL_FAMILIES)
    assert executor.store.layout_text.startswith("1: ")
    assert resident_bytes(executor) == sum(item.payload.nbytes for item in items)
    for item in items:
        assert item.payload.format == "B"
        assert item.payload.c_contiguous
        assert item.payload.readonly
        if item.kind == "block":
            assert item.payload.nbytes == executor.store.block_bytes(item.tokens)
            assert item.payload.nbytes == executor.store.bytes_per_token * item.tokens
        else:
            assert 0 <= item.payload.nbytes - executor.kv_bytes_per_row <= 1_024


def test_description_of_block_layout_differs_between_model_families_and_precisions(
    make_model: MakeModel,
) -> None:
    """Every family, and every precision of a family, has its own description of the block
    layout.
    """
    half = MODEL_FACTORIES["qwen3"]()
    half.set_dtype(mx.float16)
    texts = [make_executor(make_model(family)).store.layout_text for family in FAMILIES]

    assert len({*texts, make_executor(half).store.layout_text}) == len(FAMILIES) + 1


def test_model_with_unknown_cache_class_is_served_without_keeping_blocks(
    make_model: MakeModel,
) -> None:
    """A model whose cache class is unknown is served, but keeps no blocks."""

    class UnknownCache(ArraysCache):
        """Cache that might hold more than its arrays."""

    class ModelWithUnknownCache(WrappedModel):
        def make_cache(self) -> list[Any]:
            return [UnknownCache(2) for _ in self.wrapped.layers]

    model = ModelWithUnknownCache(make_model("mamba2"))
    driver = BlockDriver(model)
    assert driver.executor.store.layout_text == ""
    assert not driver.executor.store.needs_state
    assert driver.executor.store.block_bytes(8) == 0
    driver.step(admitted=[admission(1, 0, PROMPT)], prefill_chunks=[prefill_chunk(1, 0, 20, 20)])
    driver._blocks_to_keep = []
    driver.step(decodes=[1])
    driver._blocks_to_keep = []
    assert driver.tokens[1] == generate_alone(make_model("mamba2"), PROMPT, 2)
    for wrong in (_keep(0, 8), {"checkpoints": [1]}, _spill(NEW), _reuse(8, [NEW])):
        with pytest.raises(InvariantBroken):
            driver.executor.launch(super(BlockDriver, driver).plan(**wrong))
    padded = ArraysCache(1, left_padding=[1])
    assert part_kinds([padded], 2) is None


def _row_bits(driver: BlockDriver, slot: int) -> list[bytes]:
    """Return all bits of a row."""
    store = driver.executor.store
    arrays = [store.read_block(slot, 0, store.length(slot))]
    if store.needs_state:
        arrays += store.read_state(slot).arrays()
    return [np.array(array).tobytes() for array in arrays]


@pytest.mark.parametrize("family", FAMILIES)
def test_filling_row_from_blocks_leaves_other_rows_unchanged(
    make_model: MakeModel, family: str
) -> None:
    """Building a row from blocks changes no bit of any other row."""
    driver = _driver_with_two_blocks(make_model(family))
    for one, slot in ((5, 0), (6, 2)):
        driver.start_from_blocks(one, slot, make_prompt(one, 7 + one))
    driver.step(decodes=[5, 6])
    before = [_row_bits(driver, slot) for slot in (0, 1, 2)]

    driver.step(admitted=[driver.admit(3, 3, PROMPT)])

    assert driver.executor.store.length(3) >= 16
    assert [_row_bits(driver, slot) for slot in (0, 1, 2)] == before


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_blocks_fill_row_to_last_column_and_longer_reuse_is_refused(
    make_model: MakeModel, family: str
) -> None:
    """Blocks can fill a row up to its last column; a reuse longer than the row is refused."""
    driver = _driver_with_two_blocks(make_model(family))
    tokens = PROMPT[:12] + make_prompt(9, 1)
    if family == "gemma3":
        tokens = PROMPT[:8] + make_prompt(9, 1)
    driver.step(dropped=[1])
    driver.row_tokens = len(tokens) + 2
    reused = driver.start_from_blocks(2, 0, tokens)
    driver.step(decodes=[2])
    driver.step(decodes=[2])
    assert reused == len(tokens) - 1
    assert driver.tokens[2] == generate_alone(make_model(family), tokens, 3)

    admitted: AdmittedSequence = driver.admit(3, 1, PROMPT)
    assert admitted.reused_tokens > driver.row_tokens
    with pytest.raises(InvariantBroken, match="have room"):
        driver.step(admitted=[admitted])


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_checkpoint_of_window_wrapped_during_prefill_has_tokens_in_order(
    make_model: MakeModel, family: str
) -> None:
    """The checkpoint of a window that wrapped around during prefill holds its tokens in order."""
    model = make_model(family)
    driver = BlockDriver(model)
    admitted = [admission(1, 0, PROMPT)]
    for start, stop in ((0, 13), (13, 14), (14, 15), (15, 16), (16, 20)):
        driver.step(admitted=admitted, prefill_chunks=[prefill_chunk(1, start, stop, 20)])
        admitted = []
    driver.step(evict_blocks=[name for name in driver.resident if name == MIDDLE])

    assert driver.start_from_blocks(2, 1, PROMPT) == 16
    driver.step(decodes=[1, 2])
    assert driver.tokens[1] == driver.tokens[2] == generate_alone(model, PROMPT, 2)
