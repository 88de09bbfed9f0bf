"""Steps of an executor whose kernels write rows in place."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from services.rank_worker.device.description import DeviceKind
from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.model.expert_counter import ExpertCounter
from services.rank_worker.model.fast_path.kernels.attention import head_kernels, row_places
from services.rank_worker.model.fast_path.kernels.attention.row_places import TILE_TOKENS
from services.rank_worker.model.fast_path.opening import FastPathSettings
from shared.messages import DraftChunk, RolledBack
from tests.mlx.drafting.drafter_driver import DrafterDriver, random_eagle_head
from tests.mlx.execution.fast_path.attention_models import make, open_of
from tests.mlx.execution.fast_path.latent.latent_models import make_latent
from tests.mlx.executor_driver import ExecutorDriver, admission, make_executor, make_prompt
from tests.mlx.executor_driver import prefill_chunk as chunk
from tests.mlx.models import make_llama, make_qwen3
from tests.mlx.sharding.moe_models import LAYERS, make_moe_model
from tests.mlx.speculation.speculation_driver import NO_BLOCKS, SpeculationDriver, make_drafts

PROMPTS = {1: make_prompt(1, 9), 2: make_prompt(2, 5), 3: make_prompt(3, 21)}


def _driver(model: nn.Module, kv_bits: int = 0, **settings: Any) -> ExecutorDriver:
    driver = ExecutorDriver(model, row_count=3, row_tokens=48)
    driver.executor = make_executor(
        model,
        kv_bits=kv_bits,
        profile=ExecutionProfile(has_queue=True),
        fast_path=FastPathSettings(**settings),
    )
    return driver


def _run(driver: ExecutorDriver) -> dict[int, list[int]]:
    """Join, leave, move, verify drafts and grow rows, with steps launched ahead."""
    # Their prompts stand side by side in a forward.
    driver.step(
        admitted=[admission(1, 0, PROMPTS[1]), admission(2, 1, PROMPTS[2])],
        prefill_chunks=[chunk(1, 0, 9, 9), chunk(2, 0, 5, 5)],
    )
    first = driver.launch(decodes=[1, 2])
    second = driver.launch(decodes=[1, 2])
    driver.finish(first)
    driver.finish(second)
    driver.step(
        admitted=[admission(3, 2, PROMPTS[3])],
        prefill_chunks=[chunk(3, 0, 21, 21)],
        decodes=[1, 2],
    )
    driver.step(decodes=[1, 2, 3])
    driver.step(decodes=[1, 2, 3], drafts=[[5], [], [7, 8]])
    # A row holds all tokens but the last.
    length = len(PROMPTS[3]) + len(driver.tokens[3]) - 1
    driver.step(dropped=[1], rolled_back=[RolledBack(sequence_id=3, length=length)])
    driver.step(moves=[(3, 0)], decodes=[3, 2])
    driver.row_tokens = 64
    driver.step(decodes=[3, 2])
    return driver.tokens


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("kv_bits", [0, pytest.param(8, marks=pytest.mark.proof)])
def test_rows_written_in_place_give_tokens_of_rows_written_by_mlx(kv_bits: int) -> None:
    """All other uses of rows in plans find the numbers that kernels have written."""
    expected = _run(_driver(make_qwen3(head_dim=32), kv_bits))
    driver = _driver(make_qwen3(head_dim=32), kv_bits, device="metal")
    assert driver.executor.layers_state == "fast path with kernels"
    assert driver.executor.store.writes_in_place
    assert _run(driver) == expected


@pytest.mark.usefixtures("kernels_on_cpu")
def test_plan_that_uses_rows_otherwise_waits_for_decodes_in_place() -> None:
    """MLX does not order other work behind writes that it does not know of."""
    driver = _driver(make_qwen3(head_dim=16), device="metal")
    driver.step()
    waits: Callable[[Any], bool] = driver.executor.waits_for_earlier_steps
    assert not waits(driver.plan(decodes=[1, 2]))
    assert not waits(driver.plan(decodes=[1], dropped=[2]))
    assert waits(driver.plan(prefill_chunks=[chunk(1, 0, 9, 9)]))
    assert not waits(driver.plan(decodes=[1], drafts=[[5]]))
    assert not waits(driver.plan(decodes=[1], draft_counts=[1]))
    read = DraftChunk(sequence_id=1, start=0, tokens=PROMPTS[1])
    assert waits(driver.plan(decodes=[1], draft_chunks=[read]))
    assert waits(driver.plan(decodes=[1], moves=[(1, 0)]))
    assert not waits(driver.plan(admitted=[admission(3, 2, PROMPTS[3])]))
    assert waits(driver.plan(decodes=[1], row_tokens=96))


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize(
    "kind",
    ["heads", *(pytest.param(one, marks=pytest.mark.proof) for one in ("quantized", "latent"))],
)
def test_drafts_verified_in_place_change_no_tokens(kind: str) -> None:
    """Rows have no drafts or many, all, some or none are right, and tokens are repeated as padding.

    A rejected draft leaves nothing in a row that a later token attends to.
    """
    kv_bits = 8 if kind == "quantized" else 0

    def model() -> nn.Module:
        return make_latent("dense") if kind == "latent" else make_qwen3(head_dim=32)

    prompts = {one: make_prompt(one, 5 + 6 * one) for one in (1, 2, 3)}
    plain, driver = (
        SpeculationDriver(
            model(), 3, block_tokens=NO_BLOCKS, kv_bits=kv_bits, fast_path=FastPathSettings(device)
        )
        for device in ("cpu", "metal")
    )
    assert driver.executor.layers_state == "fast path with kernels"
    for one, prompt in prompts.items():
        plain.start(one, one - 1, prompt)
        driver.start(one, one - 1, prompt)
    for _ in range(60):
        plain.step(decodes=[1, 2, 3])
    for counts, right in [((3, 0, 1), 3), ((8, 7, 2), 2), ((16, 0, 5), 5), ((1, 1, 1), 0)]:
        drafts = {
            one: make_drafts(plain.tokens[one], len(driver.tokens[one]), count, min(right, count))
            for one, count in zip(prompts, counts, strict=True)
        }
        result = driver.step(decodes=[1, 2, 3], drafts=drafts)
        assert [len(one) for one in result.tokens] == [min(right, count) + 1 for count in counts]
    driver.step(decodes=[1, 2, 3])
    for one in prompts:
        assert driver.tokens[one] == plain.tokens[one][: len(driver.tokens[one])]


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize(
    ("device", "kv_bits"),
    [
        ("metal", 0),
        pytest.param("cuda", 0, marks=pytest.mark.proof),
        pytest.param("metal", 8, marks=pytest.mark.proof),
    ],
)
def test_drafts_over_the_border_of_a_tile_and_at_the_end_of_a_row_change_no_tokens(
    device: DeviceKind, kv_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New tokens of one row are in two tiles, and the row becomes full."""
    monkeypatch.setattr(head_kernels, "DTYPES", (mx.float32,))
    prompts = {1: make_prompt(1, TILE_TOKENS - 6), 2: make_prompt(2, 5)}
    room = TILE_TOKENS + 16
    plain, driver = (
        SpeculationDriver(
            *(make_qwen3(head_dim=32), 3, room, NO_BLOCKS),
            kv_bits=kv_bits,
            fast_path=FastPathSettings(one),
        )
        for one in ("cpu", device)
    )
    assert driver.executor.store.writes_in_place
    for one, prompt in prompts.items():
        plain.start(one, one - 1, prompt)
        driver.start(one, one - 1, prompt)
    for _ in range(21):
        plain.step(decodes=[1, 2])
    for count, right in [(4, 2), (5, 5), (5, 1), (5, 4)]:
        left = room - driver.executor.store.length(0) - 1
        drafts = {
            one: make_drafts(plain.tokens[one], len(driver.tokens[one]), min(count, left), right)
            for one in prompts
        }
        driver.step(decodes=[1, 2], drafts=drafts)
    for one in prompts:
        assert driver.tokens[one] == plain.tokens[one][: len(driver.tokens[one])]
    assert len(prompts[1]) + len(driver.tokens[1]) > TILE_TOKENS + 8


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("kind", ["heads", pytest.param("latent", marks=pytest.mark.proof)])
def test_attention_to_tokens_of_one_row_is_computed_from_the_result_of_writing_them(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX orders operations by their inputs alone, and would not run a kernel without a use."""
    calls: list[tuple[str, list[mx.array], list[mx.array]]] = []
    real: Any = mx.fast.metal_kernel

    def noting(**made: Any) -> Any:
        kernel, names = real(**made), made["input_names"]

        def call(**given: Any) -> list[mx.array]:
            outputs: list[mx.array] = kernel(**given)
            if "lengths" in names:
                lengths = given["inputs"][names.index("lengths")]
                calls.append((made["name"], [lengths], outputs))
            return outputs

        return call

    monkeypatch.setattr(mx.fast, "metal_kernel", noting)
    opened = open_of(
        make_latent("dense") if kind == "latent" else make("qwen3", 4, 2, 16), device="metal"
    )
    assert opened.layers is not None
    writes = [place for place, (name, _, _) in enumerate(calls) if "_write_" in name]
    assert writes
    for place in writes:
        assert calls[place + 1][1][0] is calls[place][2][0]


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("device", ["metal", pytest.param("cuda", marks=pytest.mark.proof)])
def test_experts_of_drafts_are_counted_without_those_of_padding(device: DeviceKind) -> None:
    """Repeated tokens are computed and not counted."""
    counter = ExpertCounter(model := make_moe_model("qwen3_moe"), 0, "none", 1)
    driver = SpeculationDriver(
        model,
        3,
        block_tokens=NO_BLOCKS,
        expert_counter=counter,
        fast_path=FastPathSettings(device),
    )
    assert driver.executor.store.writes_in_place
    driver.start(1, 0, make_prompt(1, 9))
    driver.start(2, 2, make_prompt(2, 5))
    for counts in [(3, 0), (9, 8), (16, 3)]:
        before = counter.counts
        driver.step(decodes=[1, 2], drafts={1: [5] * counts[0], 2: [6] * counts[1]})
        computed = (counter.counts - before).sum(axis=1).tolist()
        # Two experts per token.
        assert computed == [2 * (sum(counts) + 2)] * LAYERS


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("kind", ["heads", "latent"])
def test_sums_of_tiles_of_many_tokens_are_divided_among_several_operations(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One long row beside many short ones must not take memory for as many tiles of each."""
    monkeypatch.setattr(row_places, "SUMS_BYTES_MAX", 1)
    divided: list[int] = []
    real = row_places.RowPlaces.halves

    def halves(places: row_places.RowPlaces) -> list[row_places.RowPlaces]:
        divided.append(len(places.lengths))
        return real(places)

    monkeypatch.setattr(row_places.RowPlaces, "halves", halves)
    model = make_latent("dense") if kind == "latent" else make("qwen3", 4, 2, 16)
    assert open_of(model, device="metal").state == "fast path with kernels"
    # Three rows of one token, and of three.
    assert {3, 9} <= set(divided)
    assert min(divided) == 2


@pytest.mark.usefixtures("kernels_on_cpu")
def test_drafts_of_a_head_are_equal_with_rows_written_in_place() -> None:
    """The head gets the hidden states of each sequence's own tokens."""
    proposed = []
    for settings in (FastPathSettings(), FastPathSettings("metal")):
        driver = DrafterDriver(make_llama(2), random_eagle_head(), 2, fast_path=settings)
        driver.start(1, 0, make_prompt(1, 9))
        driver.start(2, 1, make_prompt(2, 4))
        for counts in ({1: 3, 2: 1}, {1: 0, 2: 4}, {1: 2, 2: 2}):
            launched = driver.launch(decodes=[1, 2], counts=counts)
            driver.finish(launched)
            assert launched.sample is not None
            proposed.append(launched.sample.drafts.read_ids())
        proposed.append(driver.tokens[1] + driver.tokens[2])
    assert proposed[:4] == proposed[4:]


@pytest.mark.usefixtures("kernels_on_cpu")
def test_compiled_verification_that_computes_something_else_keeps_mlx_lms_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several tokens per row make another graph of a decode; the proof compares both."""

    def compiled(function: Any) -> Any:
        _, kind = function.args
        factor = float("nan") if kind.tokens_share_rows else 1.0
        return lambda *args: [factor * one for one in function(*args)]

    monkeypatch.setattr(mx, "compile", compiled)
    opened = open_of(make("qwen3", 4, 2, 16), device="metal")
    assert opened.layers is None
    assert opened.state.startswith("mlx-lm's layers: the compiled decode differs by")


@pytest.mark.usefixtures("kernels_on_cpu")
def test_kernel_that_leaves_rows_unwritten_keeps_mlx_lms_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The proof has rows with several new tokens, which attend to each other."""
    real: Any = mx.fast.metal_kernel

    def broken(**made: Any) -> object:
        if made["name"] == "lockstep_write_rows":
            made["source"] = made["source"].replace("if (writes) {", "if (!writes) {")
        return real(**made)

    monkeypatch.setattr(mx.fast, "metal_kernel", broken)
    opened = open_of(make("qwen3", 4, 2, 16), device="metal")
    assert opened.layers is None
    assert "attention 0 to several new tokens differs by" in opened.state
