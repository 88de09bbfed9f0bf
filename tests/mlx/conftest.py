"""Fixtures of the tests that compute with MLX: the fast BLAS, one core, tiny models."""

from collections.abc import Iterator

import pytest

from services.rank_worker.device import blas
from tests.support.cores import pinned_to_one_core

blas.preload()

from mlx import nn  # noqa: E402

from tests.mlx import models  # noqa: E402

QUICK_FAMILIES = {"qwen3", "deepseek_v3", "gemma3", "qwen3_next"}
"""Families with plain KV, latent attention and experts, sliding windows, and recurrent state.

`make proofs` runs the tests of all families.
"""
PROOF_IDS = {"far", "two layers", "penalized"}
"""Further drafters and sampling settings that only `make proofs` tries, by id of the parameter."""
PROOF_ROWS = {2, 8}
"""Numbers of rows with drafts that only `make proofs` tries."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of all other families, drafters, settings and numbers of rows as proofs."""
    for item in items:
        call = getattr(item, "callspec", None)
        if call is None or "tests/mlx/" not in item.path.as_posix():
            continue
        family, rows = call.params.get("family"), call.params.get("rows")
        is_other_family = isinstance(family, str) and family not in QUICK_FAMILIES
        if is_other_family or rows in PROOF_ROWS or not PROOF_IDS.isdisjoint(call.id.split("-")):
            item.add_marker(pytest.mark.proof)


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with pinned_to_one_core():
        yield


@pytest.fixture(scope="module")
def six_layer_model() -> nn.Module:
    """Return a model with enough layers for steps that start in two parts."""
    return models.make_llama(6)


@pytest.fixture(scope="session")
def _built_models() -> dict[str, nn.Module]:
    """Return the models that tests have built, by family."""
    return {}


@pytest.fixture
def make_model(_built_models: dict[str, nn.Module]) -> Iterator[models.MakeModel]:
    """Return a function that returns the tiny model of a family; each family is built once.

    Each executor replaces the class of the model's inner module by a subclass whose call calls the
    class before it. The original classes are restored after each test: after a few hundred
    executors one forward would exceed Python's recursion limit.
    """

    def make(family: str) -> nn.Module:
        if family not in _built_models:
            _built_models[family] = models.MODEL_FACTORIES[family]()
        model = _built_models[family]
        for module in model.modules():
            original_classes.setdefault(id(module), (module, type(module)))
        return model

    original_classes: dict[int, tuple[nn.Module, type[nn.Module]]] = {}
    yield make
    for module, original in original_classes.values():
        module.__class__ = original
