"""The fast path of latent attention computes what mlx-lm's code computes."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_map
from mlx_lm.models.deepseek_v3 import DeepseekV3Attention
from mlx_lm.models.mla import MultiLinear

from services.commands.bench.fake_ranks.row_filler import RowFiller
from services.commands.bench.fake_ranks.step_timer import StepTimer
from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.execution.executor import Executor
from services.rank_worker.model.fast_path.opening import FastPathSettings
from services.rank_worker.model.fast_path.row_tiles import TILE_ROWS
from shared.clock import SystemClock
from shared.configuration.settings import SchedulerConfig
from shared.messages import TokenLogprobs
from tests.mlx.execution.fast_path.attention_models import open_of
from tests.mlx.execution.fast_path.kernels.metal_kernels import COMPILER
from tests.mlx.execution.fast_path.latent.latent_models import FAMILIES, LATENT_KINDS, make_latent
from tests.mlx.executor_driver import (
    ExecutorDriver,
    admission,
    make_executor,
    make_prompt,
    prefill_chunk,
)
from tests.mlx.models import MODEL_FACTORIES
from tests.mlx.sharding.in_process_world import FakeGroup

STEPS = 3
PROMPTS = {1: make_prompt(1, 9), 2: make_prompt(2, 1), 3: make_prompt(3, 27)}
DEVICES = ["cpu", "metal"] if COMPILER else ["cpu"]


@pytest.mark.parametrize("kind", LATENT_KINDS)
def test_latent_attention_of_every_family_opens_fast_path_on_cpu(kind: str) -> None:
    """Rows of different lengths, one new token per row and several, in MLX's own operations."""
    opened = open_of(make_latent(kind))
    assert opened.state == "fast path"
    assert opened.layers is not None
    assert not opened.layers.has_kernels


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}])
def test_latent_attention_of_16_bits_opens_fast_path_on_cpu(changes: dict[str, Any]) -> None:
    """Without routed experts, which MLX does not compute in this type on a CPU."""
    model = make_latent("dense", **changes)
    model.update(tree_map(lambda one: one.astype(mx.bfloat16), model.parameters()))
    assert open_of(model).state == "fast path"


def _executor(model: nn.Module, settings: FastPathSettings | None) -> Executor:
    return make_executor(model, profile=ExecutionProfile(has_queue=True), fast_path=settings)


def _decode(kind: str, settings: FastPathSettings | None) -> tuple[ExecutorDriver, str]:
    """Prefill prompts, one of them in chunks, decode uneven rows, and verify drafts."""
    model = make_latent(kind)
    driver = ExecutorDriver(model, row_count=3, row_tokens=64)
    driver.executor = _executor(model, settings)
    for one in (1, 2):
        driver.start(one, one - 1, PROMPTS[one])
    driver.step(
        admitted=[admission(3, 2, PROMPTS[3])],
        prefill_chunks=[prefill_chunk(3, 0, 11, 27)],
        decodes=[1, 2],
    )
    driver.step(prefill_chunks=[prefill_chunk(3, 11, 27, 27)], decodes=[1, 2])
    for _ in range(3):
        driver.step(decodes=[1, 2, 3])
    driver.step(decodes=[1, 2, 3], drafts=[[5], [], [7, 8]])
    return driver, driver.executor.layers_state


def _numbers(found: list[TokenLogprobs]) -> mx.array:
    return mx.array([one.logprob for one in found])


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", FAMILIES)
def test_texts_of_latent_attention_are_those_of_mlx_lm(kind: str, device: Any) -> None:
    """Also their log probabilities, with prompts in chunks, uneven rows and drafts."""
    expected, _ = _decode(kind, None)
    driver, found = _decode(kind, FastPathSettings(device))
    assert found == ("fast path with kernels" if device == "metal" else "fast path")
    assert driver.tokens == expected.tokens
    for one in PROMPTS:
        given, wanted = (_numbers(all_of.logprobs[one]) for all_of in (driver, expected))
        assert mx.allclose(given, wanted, rtol=1e-3, atol=1e-3).item()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("device", DEVICES)
def test_latent_attention_with_heads_of_one_rank_opens_fast_path(
    device: Any, kind: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a tensor split each rank has some of the heads, and sums are over all ranks."""
    model: Any = make_latent(kind, heads=6)
    monkeypatch.setattr(mx.distributed, "all_sum", lambda part, *, group: 1.0 * part)
    model.shard(FakeGroup(rank, 2))
    opened = open_of(model, device=device)
    assert opened.layers is not None
    assert opened.layers.has_kernels == (device == "metal")
    assert model.layers[0].self_attn.embed_q.weight.shape[0] == 3


@pytest.mark.parametrize("narrow", [256, None])
def test_modules_of_latent_attention_still_work_and_hold_no_second_copy(narrow: int | None) -> None:
    """They keep views of the merged weights."""
    model: Any = make_latent("dense", hidden_size=512, q_lora_rank=narrow)
    tokens = mx.array([PROMPTS[3]])
    expected = model(tokens)
    mx.eval(expected)
    mx.clear_cache()
    before = mx.get_active_memory()
    assert open_of(model).layers is not None
    mx.clear_cache()
    assert mx.get_active_memory() < 1.02 * before
    assert mx.allclose(model(tokens), expected, rtol=1e-3, atol=1e-3).item()


def _is_wide(_path: str, module: nn.Module) -> bool:
    is_matrix = isinstance(module, nn.Linear | MultiLinear)
    return is_matrix and module.weight.shape[-1] % 32 == 0


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("device", DEVICES)
def test_quantized_latent_attention_opens_fast_path(device: Any) -> None:
    """Also with projections of several kinds, which are no one matrix then."""
    widths = {"q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    model = make_latent("deepseek_v3", **widths)
    nn.quantize(model, group_size=32, bits=8, class_predicate=_is_wide)
    assert open_of(model, device=device).layers is not None
    model = make_latent("deepseek_v3", **widths)
    nn.quantize(model, 32, 8, class_predicate=lambda path, _: path.endswith("with_mqa"))
    assert open_of(model, device=device).layers is not None


def _other_scale(attention: Any) -> None:
    class Attention(DeepseekV3Attention):
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            scale, self.scale = self.scale, 1.2 * self.scale
            result: mx.array = super().__call__(x, mask, cache)
            self.scale = scale
            return result

    attention.__class__ = Attention


def _other_prefill(attention: Any) -> None:
    class Attention(DeepseekV3Attention):
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            result: mx.array = super().__call__(x, mask, cache)
            return result if x.shape[1] == 1 else 1.1 * result

    attention.__class__ = Attention


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_other_scale, "layer 1 differs by"),
        (_other_prefill, "attention 1 to several new tokens differs by"),
    ],
)
def test_latent_attention_that_computes_something_else_keeps_mlx_lms_code(
    change: Callable[[Any], None], said: str, device: Any
) -> None:
    """The proof compares one new token per row, and several, which mlx-lm computes differently."""
    model: Any = make_latent("deepseek_v3")
    change(model.layers[1].self_attn)
    assert open_of(model, device=device).state.startswith(f"mlx-lm's layers: {said}")


def _other_matrices() -> nn.Module:
    class Matrices(MultiLinear):
        pass

    model: Any = make_latent("deepseek_v3")
    model.layers[1].self_attn.unembed_out.__class__ = Matrices
    found: nn.Module = model
    return found


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: make_latent("mistral4"), "layers are given more than a mask and a cache"),
        (_other_matrices, "a matrix per head is a Matrices"),
        (MODEL_FACTORIES["deepseek_v32"], "the model keeps other state than keys and values"),
    ],
)
def test_latent_attention_of_another_form_keeps_mlx_lms_code(
    make: Callable[[], nn.Module], reason: str
) -> None:
    """Such as queries whose scale comes from outside of the layer, or a choice of the keys."""
    assert open_of(make()).state == f"mlx-lm's layers: {reason}"


def _logprobs(others: int, slot: int) -> list[TokenLogprobs]:
    """Return the log probabilities of one sequence that decodes beside others of all lengths."""
    model = make_latent("dense")
    driver = ExecutorDriver(model, row_count=others + 1, row_tokens=64)
    driver.executor = make_executor(
        model,
        profile=ExecutionProfile(grouped_tokens_max=0),
        fast_path=FastPathSettings(batch_invariant=True),
    )
    ids = list(range(others + 1))
    ids[slot], ids[-1] = ids[-1], ids[slot]
    for place, one in enumerate(ids):
        prompt = make_prompt(100, 21) if one == others else make_prompt(one, 1 + one % 30)
        driver.start(one, place, prompt)
    for _ in range(STEPS):
        driver.step(decodes=ids)
    return driver.logprobs[others]


def test_log_probabilities_of_latent_attention_do_not_depend_on_other_sequences() -> None:
    """They have the same bits, in any place of the batch, with any lengths beside it."""
    alone = _logprobs(0, 0)
    assert len(alone) == STEPS + 1
    for others, slot in ((1, 1), (2, 0), (TILE_ROWS, 3), (15, 9)):
        assert _logprobs(others, slot) == alone


def _operations(settings: FastPathSettings | None, rows: int) -> float:
    """Return how many operations one more dense layer adds to a decode."""
    counts = []
    for layers in (2, 4):
        model = make_latent("dense", num_hidden_layers=layers, first_k_dense_replace=layers)
        executor = make_executor(model, fast_path=settings)
        filler = RowFiller(executor, SchedulerConfig(), 4_096, lambda: 2**30)
        timer = StepTimer(executor, filler, layers, False, SystemClock())
        counts.append(timer.measure(rows, 40, STEPS)["nodes"])
    return (counts[1] - counts[0]) / 2


@pytest.mark.parametrize("rows", [1, 4])
def test_layer_with_latent_attention_has_two_thirds_of_mlx_lms_operations_on_cpu(rows: int) -> None:
    """A step of a small model takes as long as the host needs for its operations."""
    assert 3 * _operations(FastPathSettings(), rows) < 2 * _operations(None, rows)
