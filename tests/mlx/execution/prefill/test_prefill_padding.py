"""Prefills padded to few distinct lengths: only the shapes of forwards change."""

from typing import Any

import pytest
from mlx import nn

from services.rank_worker.device.execution_profile import ExecutionProfile
from tests.mlx.executor_driver import (
    ExecutorDriver,
    admission,
    generate_with_mlx_lm,
    make_executor,
    make_prompt,
    prefill_chunk,
)
from tests.mlx.models import PLAIN_FAMILIES, MakeModel


def _driver(model: nn.Module, **changes: Any) -> ExecutorDriver:
    driver = ExecutorDriver(model, row_count=3, row_tokens=160)
    driver.executor = make_executor(model, profile=ExecutionProfile(pads_prefill=True), **changes)
    return driver


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_padded_prefills_give_tokens_of_mlx_lm(
    make_model: MakeModel, family: str, widths: list[int]
) -> None:
    """Padded prefills, whole or in chunks, give the tokens of mlx-lm.

    A chunk is not padded where the row has no room, and other rows decode meanwhile.
    """
    model = make_model(family)
    prompts = {1: make_prompt(1, 20), 2: make_prompt(2, 150), 3: make_prompt(3, 65)}
    driver = _driver(model)
    driver.start(1, 1, prompts[1])
    parts = [(0, 17), (17, 100), (100, 129), (129, 150)]
    for number, (start, stop) in enumerate(parts):
        driver.step(
            admitted=[admission(2, 0, prompts[2])] if not number else [],
            prefill_chunks=[prefill_chunk(2, start, stop, 150)],
            decodes=[1],
        )
    driver.start(3, 2, prompts[3])
    for _ in range(4):
        driver.step(decodes=[2, 1, 3])

    assert widths == [32, 32, 96, 32, 21, 80]
    counts = {1: 9, 2: 5, 3: 5}
    assert driver.tokens == {
        one: generate_with_mlx_lm(model, prompt, counts[one])[0] for one, prompt in prompts.items()
    }


def test_grouped_prompts_are_padded_to_width_of_longest_prompt(
    make_model: MakeModel, widths: list[int]
) -> None:
    """A group of prompts is padded to the width of its longest prompt."""
    model = make_model("llama")
    prompts = {one: make_prompt(one, 71 - one) for one in (1, 2, 3)}
    driver = _driver(model)
    driver.step(
        admitted=[admission(one, one - 1, prompt) for one, prompt in prompts.items()],
        prefill_chunks=[
            prefill_chunk(one, 0, len(prompt), len(prompt)) for one, prompt in prompts.items()
        ],
    )
    for _ in range(3):
        driver.step(decodes=[1, 2, 3])

    assert widths == [80]
    assert driver.tokens == {
        one: generate_with_mlx_lm(model, prompts[one], 4)[0] for one in prompts
    }


def test_prefill_of_sliding_window_model_is_not_padded(
    make_model: MakeModel, widths: list[int]
) -> None:
    """Prefills of a model with sliding windows are not padded."""
    model = make_model("gemma3")
    driver = _driver(model)
    prompt = make_prompt(7, 41)
    driver.start(1, 0, prompt)
    for _ in range(3):
        driver.step(decodes=[1])

    assert widths == [41]
    assert driver.tokens[1] == generate_with_mlx_lm(model, prompt, 4)[0]
