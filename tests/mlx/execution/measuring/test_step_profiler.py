"""Steps that are measured part by part, on models of several families."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from services.rank_worker.model.sharding.local_experts import is_switch
from shared.messages.telemetry.step_profile import NO_LAYER, PartTotal, StepProfile, unpack_spans
from tests.mlx.executor_driver import (
    ExecutorDriver,
    admission,
    make_executor,
    make_prompt,
    prefill_chunk,
)
from tests.mlx.models import MakeModel, make_llama
from tests.mlx.sharding.moe_models import make_moe_model

FAMILIES = ["llama", "qwen3", "gemma3", "gpt_oss", "deepseek_v3", "mamba2", "qwen3_next"]
STEPS = 20
SLEEP_S = 0.02


def _generate(model: nn.Module, profile: Callable[[int], str]) -> tuple[Any, list[StepProfile]]:
    """Prefill two sequences and decode them; `profile` returns how to measure a step."""
    driver = ExecutorDriver(model)
    profiles = []
    for number in range(12):
        fields: dict[str, Any] = {"decodes": [1, 2]}
        if number < 2:
            prompt = make_prompt(number, 20 + 3 * number)
            chunk = prefill_chunk(number + 1, 0, len(prompt), len(prompt))
            admitted = [admission(number + 1, number, prompt)]
            fields = {"admitted": admitted, "prefill_chunks": [chunk]}
        launched = driver.launch(profile=profile(number), **fields)
        driver.finish(launched)
        if launched.profile is not None:
            profiles.append(launched.profile)
    return driver.tokens, profiles


def _parts(profile: StepProfile) -> dict[str, PartTotal]:
    return {one.part: one for one in profile.parts}


@pytest.mark.parametrize("family", FAMILIES)
def test_measured_steps_have_same_tokens_as_others(make_model: MakeModel, family: str) -> None:
    """A step may be measured at any time, in the service of any family."""
    expected, none = _generate(make_model(family), lambda _: "")
    kinds = itertools.cycle(["", "times", "primitives"])
    found, profiles = _generate(make_model(family), lambda _: next(kinds))
    assert found == expected
    assert (len(none), len(profiles)) == (0, 8)
    for profile in profiles:
        parts = _parts(profile)
        assert {"host", "embedding", "attention", "norms", "head", "sampling"} <= parts.keys()
        assert sum(one.seconds for one in profile.parts) == pytest.approx(profile.seconds)


def test_profile_says_layers_writes_and_experts() -> None:
    """Each part of each layer runs once in a decode, and the spans say of which layer it is."""
    model = make_moe_model("qwen3_moe")
    layers = len(model.layers)
    _, profiles = _generate(model, lambda number: "primitives" if number > 5 else "")
    for profile in profiles:
        parts = _parts(profile)
        runs = {name: parts[name].runs for name in ("attention", "kv_write", "experts")}
        assert runs == dict.fromkeys(runs, layers)
        assert parts["embedding"].runs == parts["head"].runs == 1
        assert parts["attention"].primitives > layers
        assert "collective" not in parts
        weights = model.layers[0].self_attn.parameters()
        size = sum(one["weight"].nbytes for one in weights.values() if "weight" in one)
        assert parts["attention"].bytes == layers * size
        # Two rows read two experts each; they may be the same ones.
        block = model.layers[0].mlp
        switches = [one for one in block.modules() if is_switch(one)]
        expert = sum(one.weight.nbytes // one.num_experts for one in switches)
        router = block.gate.weight.nbytes
        read = parts["experts"].bytes / layers - router
        assert 2 * expert <= read <= 4 * expert < len(switches[0].weight) * expert
        assert profile.bytes_per_s > 1e8
        spans = list(unpack_spans(profile.spans))
        for name in runs:
            assert [one.layer for one in spans if one.part == name] == list(range(layers))
        ends = [one.began_s + one.seconds for one in spans]
        assert ends == sorted(ends)
        assert ends[-1] <= profile.seconds + 1e-5
    counts = [_parts(one)["attention"].primitives for one in profiles]
    assert len(set(counts)) == 1


def test_profile_agrees_with_stopwatch_and_names_slow_attention() -> None:
    """A delay in one part is found in it, and in no other; the parts add up to the whole step."""
    model = make_llama(4)
    delays = _slow_down(model.layers[2].self_attn)
    driver = ExecutorDriver(model)
    driver.executor = make_executor(model, fast_path=None)
    driver.start(1, 0, make_prompt(1, 20))
    # The first measured step searches the parts.
    driver.step(decodes=[1], profile="times")
    delays.clear()
    measured = [_measure_beside_stopwatch(driver) for _ in range(STEPS)]
    profiles = [one for one, _ in measured]
    # A busy machine makes some of the steps longer, or stops this test beside its stopwatch.
    assert max(share for _, share in measured) >= 0.95
    in_attention = [_parts(one)["attention"].seconds for one in profiles]
    besides = [found - delay for found, delay in zip(in_attention, delays, strict=True)]
    assert min(besides) >= 0
    names = _parts(profiles[0]).keys() - {"attention"}
    least = {name: min(_parts(one)[name].seconds for one in profiles) for name in names}
    assert max(min(besides), *least.values()) < SLEEP_S / 2
    shortest = min(profiles, key=lambda one: one.seconds)
    in_layers = [one for one in unpack_spans(shortest.spans) if one.layer != NO_LAYER]
    slowest = max(in_layers, key=lambda one: one.seconds)
    assert (slowest.part, slowest.layer) == ("attention", 2)


def _measure_beside_stopwatch(driver: ExecutorDriver) -> tuple[StepProfile, float]:
    """Measure a decode; return its profile, and the share of all parts in a stopwatch's time."""
    began_s = time.monotonic()
    profile = driver.launch(decodes=[1], profile="times").profile
    took_s = time.monotonic() - began_s
    assert profile is not None
    assert began_s <= profile.began_s
    share = sum(one.seconds for one in profile.parts) / took_s
    assert share <= 1.0
    return profile, share


def test_model_is_unchanged_after_measured_step() -> None:
    """Steps that are not measured run mlx-lm's own classes, without boundaries."""
    model = make_llama(2)
    driver = ExecutorDriver(model)
    driver.start(1, 0, make_prompt(1, 20))
    before = [type(module) for module in model.modules()]
    all_sum = mx.distributed.all_sum
    driver.step(decodes=[1], profile="primitives")
    assert [type(module) for module in model.modules()] == before
    assert mx.distributed.all_sum is all_sum


def _slow_down(module: nn.Module) -> list[float]:
    """Make each call of a module sleep; return the list of how many seconds each call slept."""
    original: Any = type(module)
    delays = []

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        began_s = time.monotonic()
        time.sleep(SLEEP_S)
        delays.append(time.monotonic() - began_s)
        return original.__call__(self, *args, **kwargs)

    module.__class__ = type(original.__name__, (original,), {"__call__": call})
    return delays
