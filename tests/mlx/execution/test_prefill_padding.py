"""Prompts that are padded to lengths that come again: nothing else changes."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.model.forward import Forward
from tests.mlx.executor_driver import Driver, admit, chunk, executor_of, make_prompt, reference
from tests.mlx.models import PLAIN

Make = Callable[[str], nn.Module]


def _driver(model: nn.Module, **changes: Any) -> Driver:
    driver = Driver(model, row_count=3, row_tokens=160)
    driver.executor = executor_of(model, profile=ExecutionProfile(pads_prefill=True), **changes)
    return driver


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the columns of every forward that reads a prompt, as it comes."""
    found: list[int] = []

    def noting(name: str) -> None:
        real = getattr(Forward, name)

        def noted(forward: Forward, tokens: mx.array, *rest: Any) -> Any:
            found.append(tokens.shape[1])
            return real(forward, tokens, *rest)

        monkeypatch.setattr(Forward, name, noted)

    for name in ("fill_caches", "last_logits", "row_end_logits"):
        noting(name)
    return found


@pytest.mark.parametrize("family", PLAIN)
def test_padded_prompts_get_the_tokens_of_mlx_lm(
    make_model: Make, family: str, widths: list[int]
) -> None:
    """Whole or in chunks, at the row's begin, further on, and where the row has no room to pad;
    with rows beside them that decode.
    """
    model = make_model(family)
    prompts = {1: make_prompt(1, 20), 2: make_prompt(2, 150), 3: make_prompt(3, 65)}
    driver = _driver(model)
    driver.start(1, 1, prompts[1])
    parts = [(0, 17), (17, 100), (100, 129), (129, 150)]
    for number, (start, stop) in enumerate(parts):
        driver.step(
            admitted=[admit(2, 0, prompts[2])] if not number else [],
            prefill_chunks=[chunk(2, start, stop, 150)],
            decodes=[1],
        )
    driver.start(3, 2, prompts[3])
    for _ in range(4):
        driver.step(decodes=[2, 1, 3])

    assert widths == [32, 32, 96, 32, 21, 80]
    counts = {1: 9, 2: 5, 3: 5}
    assert driver.tokens == {
        one: reference(model, prompt, counts[one])[0] for one, prompt in prompts.items()
    }


def test_prompts_that_share_a_forward_are_padded_too(make_model: Make, widths: list[int]) -> None:
    """The group is as wide as its longest prompt would be alone."""
    model = make_model("llama")
    prompts = {one: make_prompt(one, 71 - one) for one in (1, 2, 3)}
    driver = _driver(model)
    driver.step(
        admitted=[admit(one, one - 1, prompt) for one, prompt in prompts.items()],
        prefill_chunks=[chunk(one, 0, len(prompt), len(prompt)) for one, prompt in prompts.items()],
    )
    for _ in range(3):
        driver.step(decodes=[1, 2, 3])

    assert widths == [80]
    assert driver.tokens == {one: reference(model, prompts[one], 4)[0] for one in prompts}


def test_state_that_runs_on_over_padding_is_not_padded(make_model: Make, widths: list[int]) -> None:
    """A model with windows reads what it is given."""
    model = make_model("gemma3")
    driver = _driver(model)
    prompt = make_prompt(7, 41)
    driver.start(1, 0, prompt)
    for _ in range(3):
        driver.step(decodes=[1])

    assert widths == [41]
    assert driver.tokens[1] == reference(model, prompt, 4)[0]
