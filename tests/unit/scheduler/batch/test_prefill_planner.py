"""Choice of prompt tokens for each step."""

import random

import msgspec
import pytest

from services.rank_worker.batch.prefill_groups import padded_width
from shared import limits
from shared.messages import StepFinished
from tests.unit.scheduler.support.world_factory import MakeWorld


def test_every_plan_contains_decodes_while_long_prompt_is_prefilled(make_world: MakeWorld) -> None:
    """Chunks beside decodes respect `decode_stall_ms`, and every plan contains the decodes."""
    world = make_world(decode_stall_ms=50.0)
    world.submit("short", [1, 2], 500)
    for _ in range(20):
        world.step()
    world.submit("long", list(range(1_000)) * 4, 2)
    first_plan = len(world.plans)
    world.settle()
    mixed = [plan for plan in world.plans[first_plan:] if plan.prefill_chunks]
    assert len(mixed) > 10
    sizes = [sum(chunk.length for chunk in plan.prefill_chunks) for plan in mixed]
    # The reference rank takes 0.5 ms per token, so 100 tokens are the 50 ms allowed beside
    # decodes. The first chunk, of unknown cost, is bounded too.
    assert max(sizes[4:]) <= 110
    assert max(sizes) <= 128
    assert all(plan.decodes for plan in mixed[1:-3])


def test_long_prompt_is_split_into_steps_and_short_prompts_share_one(make_world: MakeWorld) -> None:
    """A long prompt is read in bounded parts before later prompts; short prompts share a step, and
    a prompt that is slightly too long is not cut."""
    world = make_world(decode_stall_ms=60_000.0)
    longest = limits.FORWARD_TOKENS_MAX
    for i in range(2):
        world.submit(f"learnt{i}", [5 + i] * 8_000, 2)
    world.settle()
    world.submit("runs", [7], 2_000)
    for _ in range(10):
        world.step()
    first_plan = len(world.plans)
    world.submit("long", [1] * (2 * longest + longest // 4), 2)
    for i in range(6):
        world.submit(f"short{i}", [10 + i] * (longest // 2), 2)
    world.settle()
    world.submit("longer", [3] * (longest + longest // 10), 2)
    world.settle()

    steps = [
        [chunk.length for chunk in plan.prefill_chunks]
        for plan in world.plans[first_plan:]
        if plan.prefill_chunks
    ]
    assert steps[:2] == [[longest], [longest]]
    assert steps[2][0] == longest // 4
    assert len(steps[2]) >= 4
    assert steps[-1] == [longest + longest // 10]


def test_prompts_read_at_varying_speeds_are_cut_at_positions_of_earlier_prompts(
    make_world: MakeWorld,
) -> None:
    """Measured times vary from step to step, yet prompts are cut where earlier ones were, so that
    few prefill forwards have a shape that is new to the ranks."""
    world = make_world(decode_stall_ms=100.0, cache={"enabled": False})
    noise = random.Random(3)

    def vary(receipt: StepFinished) -> StepFinished:
        busy_ms = receipt.busy_ms * noise.lognormvariate(0.0, 0.2)
        return msgspec.structs.replace(receipt, busy_ms=busy_ms)

    world.change_receipt = vary
    seen: set[tuple[int, int]] = set()
    new: list[int] = []
    forwards: list[int] = []
    for number in range(6):
        first_plan = len(world.plans)
        for index in range(16):
            world.submit(f"{number}-{index}", [1 + number] * 1_024, 40)
            world.step()
        world.settle()
        chunks = [one for plan in world.plans[first_plan:] for one in plan.prefill_chunks]
        shapes = {(padded_width(one.length), one.start) for one in chunks}
        new.append(len(shapes - seen))
        forwards.append(len(chunks))
        seen |= shapes
    # Chunks as long as the time permits have over 50 new shapes in every round.
    assert min(forwards) > 80, forwards
    assert sum(new[1:]) <= 40, new
    assert sum(new[4:]) <= 6, new


@pytest.mark.parametrize("newcomer_tokens", [700, 900, 1_500])
def test_prompt_left_for_next_step_is_its_first_however_many_tenants_arrive(
    newcomer_tokens: int, make_world: MakeWorld
) -> None:
    """A new tenant's prompt takes most of a step before it once, and not again and again."""
    world = make_world(decode_stall_ms=60_000.0, step_tokens_max=1_000, cache={"enabled": False})
    for i in range(4):
        world.submit(f"learnt{i}", [5 + i] * 1_000, 2)
    world.settle()
    world.submit("runs", [7], 40)
    for _ in range(4):
        world.step()
    first_plan = len(world.plans)
    world.submit("waits", [1] * 950, 2, tenant="waits")
    for i in range(12):
        world.submit(f"new{i}", [10 + i] * newcomer_tokens, 1, tenant=f"new{i}")
        world.step()
    world.settle()
    plans = world.plans[first_plan:]
    admitted = [one for plan in plans for one in plan.admitted]
    own = next(one.sequence_id for one in admitted if one.tenant == "waits")
    places = [
        (number, chunk.length)
        for number, plan in enumerate(plans)
        for chunk in plan.prefill_chunks
        if chunk.sequence_id == own
    ]
    assert places == [(1, 950)]
