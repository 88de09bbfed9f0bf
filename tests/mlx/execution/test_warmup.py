"""Warm-up of a rank between loading and the first request."""

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from services.rank_worker.execution.warmup import warm_up
from shared.errors import ConfigError
from tests.mlx import models
from tests.mlx.executor_driver import ExecutorDriver, generate_alone, make_prompt
from tests.mlx.models import MakeModel


@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("family", [*models.PLAIN_FAMILIES, *models.STATEFUL_FAMILIES])
def test_warm_up_leaves_no_row_or_receipt_and_changes_no_token(
    make_model: MakeModel, family: str, *, speculates: bool
) -> None:
    """The warm-up leaves no row and no receipt, and changes no token."""
    model = make_model(family)
    warm, fresh = ExecutorDriver(model), ExecutorDriver(model)
    warm_up(warm.executor, 4_096, speculates=speculates)
    prompt = make_prompt(3, 20)

    for driver in (warm, fresh):
        driver.start(1, 0, prompt)
        for _ in range(5):
            driver.step(decodes=[1])

    assert warm.tokens == fresh.tokens == {1: generate_alone(model, prompt, 6)}
    assert warm.digests == fresh.digests


def test_warm_up_runs_no_prompt_longer_than_model_context(make_model: MakeModel) -> None:
    """The warm-up of a model for 8 tokens runs no longer prompt."""
    warm_up(ExecutorDriver(make_model("llama")).executor, 8, speculates=True)


def test_warm_up_refuses_model_with_nan_weights(make_model: MakeModel) -> None:
    """Weights of NaN are an error before the first request."""
    model = models.MODEL_FACTORIES["llama"]()
    model.update(tree_map(lambda one: one * mx.nan, model.parameters()))

    with pytest.raises(ConfigError, match="computes logits that are not finite"):
        warm_up(ExecutorDriver(model).executor, 4_096)
