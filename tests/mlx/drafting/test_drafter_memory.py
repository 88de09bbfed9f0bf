"""Memory of a model and its draft model, known before either is loaded."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from services.rank_worker.device.description import Device
from services.rank_worker.model.loading import memory_fit
from services.rank_worker.model.loading.loader import open_model
from services.rank_worker.model.loading.source import find_source
from services.rank_worker.peers.collectives import Collectives
from services.rank_worker.speculation.load import open_drafter
from services.rank_worker.worker import Worker
from shared.clock import SystemClock
from shared.configuration.settings import Config, ModelConfig, SpeculationConfig
from shared.errors import ConfigError
from shared.model.sharding.shares import Split
from tests.mlx.executor_driver import make_executor
from tests.support.orders import join_order

MODEL = ModelConfig(path="demo", dtype="float32")
DRAFTED = Config(
    model=MODEL, speculation=SpeculationConfig(method="draft_model", draft_model="demo")
)


def _ignore(stage: str, fraction: float) -> None:
    del stage, fraction


def _load(config: Config, memory_bytes: int) -> Any:
    """Load the demo model for one rank with this much memory besides the memory in use."""
    mx.clear_cache()
    memory_bytes += mx.get_active_memory()
    device = Device(kind="cuda", name="", memory_bytes=memory_bytes)
    link: Any = SimpleNamespace(send=lambda _: None)
    worker = Worker(config, join_order(), link, device, SystemClock(), blas="")
    return worker._load(find_source(MODEL, 1, "none"), Collectives(None, 0, 1))


def test_draft_model_memory_predicted_before_loading_equals_memory_reported_after() -> None:
    """The memory needs of a draft model equal those that the rank reports after loading it."""
    opened = open_drafter(DRAFTED, 8_192, mx.float32, lambda _: None)
    assert opened is not None
    draft = opened.read()
    source, world = find_source(MODEL, 1), Collectives(None, 0, 1)
    alone = open_model(MODEL, source, Split("none", 0, 1), world, report=_ignore).read(_ignore)
    executor = make_executor(alone.model, drafter=draft)
    assert opened.needs.weight_bytes == alone.shard_bytes
    assert opened.needs.kv_bytes_per_token == executor.proposer.bytes_per_token
    assert opened.needs.kv_bytes_per_row == 0


def test_model_and_draft_model_exceeding_memory_are_refused_before_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model and a draft model that do not fit together are refused with sizes and remedies.

    No weights are read before.
    """
    needs = open_drafter(DRAFTED, 8_192, mx.float32, lambda _: None)
    assert needs is not None
    one = needs.needs.weight_bytes + needs.needs.kv_bytes(memory_fit.CONTEXT_TOKENS_MIN)
    assert _load(Config(model=MODEL), one + 10**6)[1] is None
    assert _load(DRAFTED, 2 * one + 10**6)[1] is not None
    monkeypatch.setattr("services.rank_worker.model.loading.loader.load_weights", None)

    message = (
        r"shard and the draft model do not fit: [\d.]+ MB of weights, [\d.]+ MB of "
        r"speculation\.draft_model's and [\d.]+ MB for 1,024 tokens of KV.* use more ranks, no or "
        "a smaller draft model"
    )
    with pytest.raises(ConfigError, match=message):
        _load(DRAFTED, 2 * one - 10**6)
