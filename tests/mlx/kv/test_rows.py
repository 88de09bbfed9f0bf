"""Plain rows: verification, roll-back, reading and writing of blocks, padding, memory."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.kv_cache.rows.block_layout import BlockPart
from services.rank_worker.kv_cache.rows.checkpoint_state import CheckpointState
from services.rank_worker.kv_cache.rows.kv_shapes import read_shape
from services.rank_worker.kv_cache.rows.row_store import RowStore
from shared.errors import InvariantBroken
from tests.mlx.executor_driver import (
    ExecutorDriver,
    admission,
    generate_with_mlx_lm,
    make_executor,
    make_prompt,
    prefill_chunk,
)
from tests.mlx.models import PLAIN_FAMILIES, MakeModel, SoftCappedModel


def _open(model: nn.Module, row_count: int, row_tokens: int) -> RowStore:
    store = RowStore(read_shape(model).layers())
    store.resize(row_count, row_tokens)
    return store


def _prefill(model: Any, store: RowStore, slot: int, tokens: list[int]) -> int:
    logits = model(mx.array([tokens]), cache=store.prefill(slot, len(tokens)))
    return int(np.argmax(np.array(logits[0, -1])))


def _decode(
    model: Any, store: RowStore, slots: Sequence[int], tokens: Sequence[list[int]]
) -> np.ndarray:
    """Decode these tokens in these slots; return logits [slots, tokens, vocab]."""
    count = len(tokens[0])
    view = store.decode(slots, count)
    by_slot = dict(zip(slots, tokens, strict=True))
    inputs = [by_slot.get(slot, [0] * count) for slot in view.input_slots]
    logits = np.array(model(mx.array(inputs), cache=view.caches))
    return logits if view.output_rows is None else logits[view.output_rows]


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
@pytest.mark.parametrize("slots", [(0, 1), (1, 4)], ids=["dense", "holes"])
def test_verifying_k_drafts_gives_logits_of_single_steps(
    make_model: MakeModel, family: str, slots: tuple[int, int]
) -> None:
    """Verifying k drafts gives the logits of k + 1 steps; a row that is rolled back continues
    unchanged.
    """
    model = make_model(family)
    prompts = [make_prompt(1, 6), make_prompt(2, 17)]
    truths = [generate_with_mlx_lm(model, prompt, 9)[0] for prompt in prompts]
    single, several = _open(model, 5, 40), _open(model, 5, 40)
    for store in (single, several):
        for slot, prompt, truth in zip(slots, prompts, truths, strict=True):
            assert _prefill(model, store, slot, prompt) == truth[0]
    one_by_one = [
        _decode(model, single, slots, [[truth[i]] for truth in truths])[:, 0] for i in range(4)
    ]

    at_once = _decode(model, several, slots, [truth[:4] for truth in truths])

    np.testing.assert_allclose(at_once, np.stack(one_by_one, axis=1), atol=2e-4)
    # The rows keep two and three of four tokens; then wrong drafts are tried and rolled back.
    for slot, prompt, keep in zip(slots, prompts, (2, 3), strict=True):
        several.roll_back(slot, len(prompt) + keep)
    wrong = [[truths[0][2], 1, 2], [truths[1][3], 1, 2]]
    after = _decode(model, several, slots, wrong)[:, 0].argmax(-1)
    assert after.tolist() == [truths[0][3], truths[1][4]]
    for slot, prompt, keep in zip(slots, prompts, (3, 4), strict=True):
        several.roll_back(slot, len(prompt) + keep)
    last = _decode(model, several, slots, [truths[0][3:6], truths[1][4:7]]).argmax(-1)
    assert last.tolist() == [truths[0][4:7], truths[1][5:8]]


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_row_filled_from_blocks_gets_tokens_of_mlx_lm(make_model: MakeModel, family: str) -> None:
    """A row filled with blocks of another row gets the tokens of mlx-lm."""
    model = make_model(family)
    prompt = make_prompt(3, 20)
    truth = generate_with_mlx_lm(model, prompt, 4)[0]
    store = _open(model, 3, 32)
    _prefill(model, store, 0, prompt)
    blocks = [(store.read_block(0, start, stop), stop - start) for start, stop in ((0, 8), (8, 19))]
    mx.eval([payload for payload, _ in blocks])
    store.free(0)
    _prefill(model, store, 0, make_prompt(4, 30))

    store.fill_row(2, 16, blocks, None)

    assert store.length(2) == 16
    assert _prefill(model, store, 2, prompt[16:]) == truth[0]
    assert _decode(model, store, [2], [[truth[0]]])[0, 0].argmax() == truth[1]


@pytest.mark.parametrize("filled", [12, 15, 16], ids=["room", "last column", "full"])
@pytest.mark.parametrize("place", [0, 1, 3], ids=["before", "between", "behind"])
def test_rows_outside_decode_stay_unchanged_bit_for_bit(
    make_model: MakeModel, filled: int, place: int
) -> None:
    """A row outside the decode stays unchanged bit for bit."""
    model = make_model("qwen3")
    store = _open(model, 4, 16)
    slots = [slot for slot in range(3 if place < 3 else 2) if slot != place]
    _prefill(model, store, place, make_prompt(9, filled))
    lasts = [
        _prefill(model, store, slot, make_prompt(slot, 4 + 3 * index))
        for index, slot in enumerate(slots)
    ]
    before = np.array(store.read_block(place, 0, filled))

    for _ in range(3):
        logits = _decode(model, store, slots, [[last] for last in lasts])
        lasts = logits[:, 0].argmax(-1).tolist()

    np.testing.assert_array_equal(before, np.array(store.read_block(place, 0, filled)))


def test_operation_exceeding_row_or_arrays_raises_invariant_broken() -> None:
    """Operations that exceed a row, its tokens or the arrays raise InvariantBroken."""
    store = RowStore([[BlockPart(1, 4, mx.float32)] * 2])
    store.resize(2, 8)
    store.prefill(0, 6)

    for wrong in (
        lambda: store.prefill(0, 3),
        lambda: store.roll_back(0, 7),
        lambda: store.read_block(0, 4, 7),
        lambda: store.read_block(0, 4, 4),
        lambda: store.read_block(1, 0, 1),
        lambda: store.read_state(0),
        lambda: store.fill_row(0, 2, [(store.read_block(0, 0, 2), 2)], None),
        lambda: store.fill_row(1, 3, [(store.read_block(0, 0, 2), 2)], None),
        lambda: store.fill_row(1, 2, [(store.read_block(0, 0, 2), 2)], CheckpointState(2, [])),
        lambda: store.prefill_padded([0, 1], [2, 2]),
        lambda: store.resize(0, 8),
        lambda: store.resize(2, 5),
    ):
        with pytest.raises(InvariantBroken):
            wrong()


def _peak_of(action: Callable[[], Any]) -> int:
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    action()
    return mx.get_peak_memory() - before


def test_decoding_joining_leaving_and_prefilling_copy_no_kv_rows(make_model: MakeModel) -> None:
    """Decoding, joining, leaving and prefilling never copy the rows of even one layer."""
    driver = ExecutorDriver(make_model("qwen3"), row_count=8, row_tokens=4_096)
    layer_bytes = driver.executor.store.bytes_per_token * 8 * 4_096 // 3
    for i in range(4):
        driver.start(i, i, make_prompt(i, 5 + i))
    driver.step(decodes=[0, 1, 2, 3])
    ahead = driver.launch(decodes=[0, 1, 2, 3])

    def busy() -> None:
        nonlocal ahead
        for fields in (
            {"decodes": [0, 1, 2, 3]},
            {"dropped": [1], "decodes": [0, 2, 3]},
            {
                "admitted": [admission(9, 1, [1, 2, 3])],
                "prefill_chunks": [prefill_chunk(9, 0, 2, 3)],
            },
            {"prefill_chunks": [prefill_chunk(9, 2, 3, 3)], "decodes": [0, 2, 3]},
            {"decodes": [0, 9, 2, 3]},
            {"dropped": [0], "moves": [(3, 0)], "decodes": [3, 9, 2]},
        ):
            launched = driver.launch(**fields)
            driver.finish(ahead)
            ahead = launched
        driver.finish(ahead)

    assert _peak_of(busy) < layer_bytes // 2


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_prompts_prefilled_in_one_forward_get_tokens_of_single_prefills(
    make_model: MakeModel, family: str
) -> None:
    """Short prompts prefilled in one padded forward get the tokens that they get singly."""
    model = make_model(family)
    prompts = {i: make_prompt(40 + i, 16 - i % 3) for i in range(6)}
    slots = {0: 7, 1: 3, 2: 0, 3: 1, 4: 2, 5: 5}
    fields: dict[str, Any] = {
        "admitted": [admission(i, slots[i], prompt) for i, prompt in prompts.items()],
        "prefill_chunks": [
            prefill_chunk(i, 0, len(prompt), len(prompt)) for i, prompt in prompts.items()
        ],
    }
    tokens = []
    for together in (True, False):
        driver = ExecutorDriver(model, row_count=8)
        profile = ExecutionProfile(grouped_tokens_max=512 if together else 0)
        driver.executor = make_executor(model, profile=profile)
        driver.step(**fields)
        for _ in range(5):
            driver.step(decodes=sorted(slots, key=lambda one: slots[one]))
        tokens.append(driver.tokens)
    assert tokens[0] == tokens[1]
    assert tokens[0] == {
        i: generate_with_mlx_lm(model, prompt, 6)[0] for i, prompt in prompts.items()
    }


def test_model_computing_logits_of_all_positions_gets_tokens_of_mlx_lm(
    make_model: MakeModel,
) -> None:
    """A model whose head cannot be limited to some positions is served with split chunks and the
    same tokens.
    """
    model = SoftCappedModel(make_model("qwen3"))
    driver = ExecutorDriver(model)
    prompts = {1: make_prompt(1, 40), 2: make_prompt(2, 3)}
    for one, prompt in prompts.items():
        driver.start(one, one, prompt)
    for _ in range(4):
        driver.step(decodes=[1, 2])

    assert not driver.executor._decode.forward.can_select
    for one, prompt in prompts.items():
        assert driver.tokens[one] == generate_with_mlx_lm(model, prompt, 5)[0]
