"""Draft chunks: those of one plan share forwards, and draft rows are the same as singly."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from services.rank_worker.speculation.draft_model import DraftModelProposer
from shared.messages import DraftChunk
from tests.mlx.drafting.drafter_driver import draft_model_of
from tests.mlx.executor_driver import ExecutorDriver, make_executor, make_prompt
from tests.mlx.models import PLAIN_FAMILIES, MakeModel

LENGTHS = (20, 19, 20, 7, 30, 20)
"""Four similar lengths and two others."""


def _driver(make_model: MakeModel, family: str) -> ExecutorDriver:
    """Return a driver with admitted sequences and empty draft rows."""
    driver = ExecutorDriver(make_model("qwen3"), row_count=len(LENGTHS), row_tokens=48)
    driver.executor = make_executor(make_model("qwen3"), drafter=draft_model_of(make_model(family)))
    for slot, length in enumerate(LENGTHS):
        driver.start(slot + 1, slot, make_prompt(slot, length))
    return driver


def _chunk(slot: int, start: int = 0, stop: int | None = None) -> DraftChunk:
    tokens = make_prompt(slot, LENGTHS[slot])[start:stop]
    return DraftChunk(sequence_id=slot + 1, start=start, tokens=tokens)


def _proposer(driver: ExecutorDriver) -> Any:
    found = driver.executor.proposer
    assert isinstance(found, DraftModelProposer)
    return found


def _rows(driver: ExecutorDriver) -> list[np.ndarray]:
    """Return the keys and values of each draft row."""
    store = _proposer(driver)._store
    return [
        np.concatenate(
            [
                np.array(array[slot, :, :length].astype(mx.float32)).reshape(-1)
                for layer in store._layers
                for array in layer.arrays
            ]
        )
        for slot, length in enumerate(LENGTHS)
    ]


def _forwards(
    driver: ExecutorDriver, plans: Sequence[Sequence[DraftChunk]]
) -> list[tuple[int, int]]:
    """Execute plans with draft chunks only; return (rows, width) of each forward."""
    forward = _proposer(driver)._forward
    fill, shapes = forward.fill_caches, []

    def recorded(tokens: mx.array, caches: list[Any]) -> None:
        shapes.append((tokens.shape[0], tokens.shape[1]))
        fill(tokens, caches)

    forward.fill_caches = recorded
    for chunks in plans:
        driver.step(draft_chunks=list(chunks))
    del forward.fill_caches
    return shapes


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_draft_chunks_of_similar_length_share_one_forward_with_unchanged_drafts(
    make_model: MakeModel, family: str
) -> None:
    """Draft chunks of similar length share a forward; rows and drafts equal those of single
    chunks.
    """
    together, alone = _driver(make_model, family), _driver(make_model, family)
    slots = range(len(LENGTHS))

    assert sorted(_forwards(together, [[_chunk(slot) for slot in slots]])) == [
        (1, 7),
        (1, 30),
        (4, 20),
    ]
    assert _forwards(alone, [[_chunk(slot)] for slot in slots]) == [(1, one) for one in LENGTHS]

    for one, other in zip(_rows(together), _rows(alone), strict=True):
        assert np.allclose(one, other, rtol=1e-4, atol=1e-4)
    decodes = [slot + 1 for slot in slots]
    found = [
        driver.step(decodes=decodes, draft_counts=[4] * len(decodes)).tokens
        for driver in (together, alone)
    ]
    assert found[0] == found[1]


def test_chunks_continuing_a_draft_row_run_singly_in_order(make_model: MakeModel) -> None:
    """Chunks that continue a draft row, also within one plan, run singly and in order."""
    driver = _driver(make_model, "llama")
    first = [[_chunk(slot, 0, 5) for slot in range(3)]]
    rest = [[_chunk(slot, 5) for slot in range(3)]]
    twice = [[_chunk(3, 0, 4), _chunk(4), _chunk(5), _chunk(3, 4)]]

    assert _forwards(driver, first) == [(3, 5)]
    assert _forwards(driver, rest) == [(1, 15), (1, 14), (1, 15)]
    assert _forwards(driver, twice) == [(1, 4), (1, 30), (1, 20), (1, 3)]
    whole = _driver(make_model, "llama")
    _forwards(whole, [[_chunk(slot)] for slot in range(len(LENGTHS))])
    for one, other in zip(_rows(driver), _rows(whole), strict=True):
        assert np.allclose(one, other, rtol=1e-4, atol=1e-4)
