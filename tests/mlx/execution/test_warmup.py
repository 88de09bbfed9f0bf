"""What happens between loading and the first request."""

from collections.abc import Callable

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_map

from services.rank_worker.execution.warmup import warm_up
from shared.errors import ConfigError
from tests.mlx import models
from tests.mlx.executor_driver import Driver, alone, make_prompt

Make = Callable[[str], nn.Module]


@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("family", [*models.PLAIN, *models.OTHERS])
def test_a_warm_rank_is_as_a_fresh_one(make_model: Make, family: str, *, speculates: bool) -> None:
    """Warming up leaves no row, no receipt and no other token behind."""
    model = make_model(family)
    warm, fresh = Driver(model), Driver(model)
    warm_up(warm.executor, 4_096, speculates=speculates)
    prompt = make_prompt(3, 20)

    for driver in (warm, fresh):
        driver.start(1, 0, prompt)
        for _ in range(5):
            driver.step(decodes=[1])

    assert warm.tokens == fresh.tokens == {1: alone(model, prompt, 6)}
    assert warm.digests == fresh.digests


def test_a_short_context_is_respected(make_model: Make) -> None:
    """A model for 8 tokens is warmed with no more."""
    warm_up(Driver(make_model("llama")).executor, 8, speculates=True)


def test_a_model_without_numbers_is_refused(make_model: Make) -> None:
    """Damaged weights are an error at load, not nonsense at the first request."""
    model = models.MAKERS["llama"]()
    model.update(tree_map(lambda one: one * mx.nan, model.parameters()))

    with pytest.raises(ConfigError, match="computes logits that are not finite"):
        warm_up(Driver(model).executor, 4_096)
