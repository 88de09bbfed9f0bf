"""Demo model: greedy completions are equal with and without drafts."""

import itertools
from typing import Any

import pytest
from mlx import nn
from mlx_lm.utils import load_model

from shared.model.location import local_folder
from tests.mlx.executor_driver import GREEDY, make_prompt
from tests.mlx.speculation.speculation_driver import NO_BLOCKS, SpeculationDriver

TOKENS = 32
REQUESTS = 48


@pytest.fixture(scope="module")
def demo() -> nn.Module:
    folder = local_folder("demo")
    assert folder is not None
    model, _ = load_model(folder)
    model.eval()
    return model


def _prompt(number: int) -> list[int]:
    prompt = make_prompt(number, 4 + number * 5 % 37, 2_000)
    return prompt * (1 + number % 3)


def _lookup(known: list[int], most: int) -> list[int]:
    """Propose the tokens that followed the last two tokens earlier in the sequence."""
    for start in range(len(known) - 3, -1, -1):
        if known[start : start + 2] == known[-2:]:
            return known[start + 2 : start + 2 + most]
    return known[:most]


def _generate(model: nn.Module, rows: int, *, drafts: bool) -> dict[int, list[int]]:
    """Generate for all requests, `rows` at a time; a finished request frees its row."""
    driver = SpeculationDriver(model, rows, 192, block_tokens=NO_BLOCKS)
    waiting = iter(range(REQUESTS))
    slots: dict[int, int] = {}
    for slot, one in zip(range(rows), waiting, strict=False):
        driver.start(one, slot, _prompt(one), GREEDY)
        slots[one] = slot
    while slots:
        fields: dict[str, Any] = {"decodes": sorted(slots, key=lambda one: slots[one])}
        if drafts:
            fields["drafts"] = {
                one: _lookup(_prompt(one) + driver.tokens[one], (one + len(driver.tokens[one])) % 7)
                for one in slots
            }
        driver.step(**fields)
        done = [one for one in slots if len(driver.tokens[one]) >= TOKENS]
        free = [slots.pop(one) for one in done]
        if done:
            driver.step(dropped=done)
        for slot, one in zip(free, itertools.islice(waiting, len(free)), strict=False):
            driver.start(one, slot, _prompt(one), GREEDY)
            slots[one] = slot
    return {one: tokens[:TOKENS] for one, tokens in driver.tokens.items()}


@pytest.mark.proof
def test_demo_model_generates_equal_greedy_tokens_with_and_without_drafts(demo: nn.Module) -> None:
    """Batches of one to eight rows with up to six looked-up drafts generate the same tokens."""
    expected = _generate(demo, 1, drafts=False)

    assert len(expected) == REQUESTS
    for rows in (1, 3, 8):
        assert _generate(demo, rows, drafts=True) == expected
