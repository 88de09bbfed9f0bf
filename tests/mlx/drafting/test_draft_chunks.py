"""Texts that a draft model reads in one plan share forwards, and rows hold the same as alone."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from services.rank_worker.speculation.draft_model import DraftModelProposer
from shared.messages import DraftChunk
from tests.mlx.drafting.drafter_driver import draft_model
from tests.mlx.executor_driver import Driver, executor_of, make_prompt
from tests.mlx.models import PLAIN

Make = Callable[[str], nn.Module]
LENGTHS = (20, 19, 20, 7, 30, 20)
"""Four of nearly one length, and two of others."""


def _driver(make_model: Make, family: str) -> Driver:
    """Return a driver whose sequences are there, and whose draft rows are empty."""
    driver = Driver(make_model("qwen3"), row_count=len(LENGTHS), row_tokens=48)
    driver.executor = executor_of(make_model("qwen3"), drafter=draft_model(make_model(family)))
    for slot, length in enumerate(LENGTHS):
        driver.start(slot + 1, slot, make_prompt(slot, length))
    return driver


def _chunk(slot: int, start: int = 0, stop: int | None = None) -> DraftChunk:
    tokens = make_prompt(slot, LENGTHS[slot])[start:stop]
    return DraftChunk(sequence_id=slot + 1, start=start, tokens=tokens)


def _proposer(driver: Driver) -> Any:
    found = driver.executor._proposer
    assert isinstance(found, DraftModelProposer)
    return found


def _rows(driver: Driver) -> list[np.ndarray]:
    """Return what each draft row holds."""
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


def _forwards(driver: Driver, plans: Sequence[Sequence[DraftChunk]]) -> list[tuple[int, int]]:
    """Execute plans that only read; return rows and width of each forward."""
    forward = _proposer(driver)._forward
    fill, shapes = forward.fill_caches, []

    def noted(tokens: mx.array, caches: list[Any]) -> None:
        shapes.append((tokens.shape[0], tokens.shape[1]))
        fill(tokens, caches)

    forward.fill_caches = noted
    for chunks in plans:
        driver.step(draft_chunks=list(chunks))
    del forward.fill_caches
    return shapes


@pytest.mark.parametrize("family", PLAIN)
def test_texts_that_are_read_together_are_read_as_alone(make_model: Make, family: str) -> None:
    """One forward for those of nearly one length; what rows hold, and what they propose, is what
    each gets by itself."""
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


def test_what_goes_on_or_comes_twice_is_read_in_order(make_model: Make) -> None:
    """Rows that hold something read by themselves; two parts of one text in one plan as well."""
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
