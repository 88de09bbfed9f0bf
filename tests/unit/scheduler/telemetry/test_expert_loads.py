"""Loads of experts: what the scheduler keeps of the ranks' reports."""

import msgpack
import pytest

from services.scheduler.telemetry.expert_loads import ExpertLoads
from shared import limits
from shared.errors import FrameRefused
from shared.messages import LayerAssignments, StepsMeasured, ToScheduler
from shared.messages.base import Sharding
from shared.transport import codec


def _layer(number: int, first: int, counts: list[int], experts: int = 4) -> LayerAssignments:
    return LayerAssignments(layer=number, experts=experts, first=first, counts=counts)


@pytest.mark.parametrize("sharding", ["expert", "tensor+expert"])
def test_reports_of_two_ranks_make_one_table_with_foreign_assignments(sharding: Sharding) -> None:
    """Each rank's own assignments are foreign to the other; reports add up."""
    loads = ExpertLoads(sharding)
    assert (loads.report(), loads.gauges()) == ([], {})
    for _ in range(2):
        loads.add(1, 0, [_layer(0, 0, [30, 10]), _layer(2, 0, [5, 5])], 2)
        loads.add(1, 1, [_layer(0, 2, [0, 0]), _layer(2, 2, [10, 20])], 2)
    first, second = loads.report()
    assert (first.layer, first.counts) == (0, [60, 20, 0, 0])
    assert (second.layer, second.counts) == (2, [10, 10, 20, 40])
    assert [(one.rank, one.first, one.count) for one in second.ranges] == [(0, 0, 2), (1, 2, 2)]
    assert (loads.own(0), loads.foreign(0)) == (100, 60)
    assert (loads.own(1), loads.foreign(1)) == (60, 100)
    assert loads.gauges() == {
        "expert_rank_imbalance": pytest.approx((80 + 60) / (40 + 40)),
        "expert_rank_imbalance_worst": pytest.approx(2.0),
        "expert_imbalance_worst": pytest.approx(60 / 20),
    }


def test_tensor_ranks_hold_a_part_of_every_expert() -> None:
    """Rank 0 reports for all, and nothing is foreign or uneven."""
    loads = ExpertLoads("tensor")
    loads.add(1, 0, [_layer(0, 0, [4, 3, 2, 1])], 2)
    (layer,) = loads.report()
    assert [(one.rank, one.first, one.count) for one in layer.ranges] == [(0, 0, 4), (1, 0, 4)]
    assert [loads.own(rank) for rank in (0, 1)] == [10, 10]
    assert [loads.foreign(rank) for rank in (0, 1)] == [0, 0]
    assert loads.gauges()["expert_rank_imbalance"] == 1.0


def test_pipeline_ranks_have_layers_of_their_own() -> None:
    """All assignments of a layer are those of its rank."""
    loads = ExpertLoads("pipeline")
    loads.add(1, 1, [_layer(0, 0, [4, 3, 2, 1])], 2)
    loads.add(1, 0, [_layer(1, 0, [1, 1, 1, 1])], 2)
    assert [[one.rank for one in layer.ranges] for layer in loads.report()] == [[1], [0]]
    assert [(loads.own(rank), loads.foreign(rank)) for rank in (0, 1)] == [(4, 0), (10, 0)]
    assert loads.gauges()["expert_rank_imbalance_worst"] == 1.0


def test_new_epoch_keeps_loads_and_forgets_who_holds_the_experts() -> None:
    """Routing is the model's, but the next world may have other shares."""
    loads = ExpertLoads("expert")
    loads.add(1, 0, [_layer(0, 0, [3, 3])], 2)
    loads.add(1, 1, [_layer(0, 2, [3, 3])], 2)
    loads.add(2, 0, [_layer(0, 0, [1])], 2)
    loads.add(2, 1, [_layer(0, 1, [1, 1, 1])], 2)
    (layer,) = loads.report()
    assert layer.counts == [4, 4, 4, 4]
    assert [(one.rank, one.first, one.count) for one in layer.ranges] == [(0, 0, 1), (1, 1, 3)]
    assert loads.gauges()["expert_rank_imbalance"] == pytest.approx(1.5)


def test_sums_stop_below_largest_number_of_messages() -> None:
    """A hostile rank cannot make the report invalid for its receivers."""
    loads = ExpertLoads("expert")
    loads._layers.clear()
    loads.add(1, 0, [_layer(0, 0, [2**40])], 2)
    loads._layers[0].counts[0] = 2**60 - 1
    loads._own[0] = loads._foreign[1] = 2**60 - 1
    loads.add(1, 0, [_layer(0, 0, [2**40])], 2)
    assert loads.report()[0].counts[0] == loads.own(0) == loads.foreign(1) == 2**60


@pytest.mark.parametrize(
    "wrong",
    [
        {"first": 3, "counts": [1, 1]},
        {"counts": [1] * 5},
        {"counts": [-1]},
        {"counts": [2**41]},
        {"layer": limits.LAYERS_MAX},
        {"experts": limits.EXPERTS_MAX + 1},
        {"counts": b"1234"},
    ],
)
def test_damaged_counts_are_refused_at_arrival(wrong: dict[str, object]) -> None:
    """A message with such counts reaches no part of the scheduler."""
    right = {"layer": 0, "experts": 4, "first": 0, "counts": [1, 1]}
    body = {
        "type": "StepsMeasured",
        "epoch": 1,
        "rank": 0,
        "first_step_id": 1,
        "origin_s": 0.0,
        "times": b"",
        "active_bytes": 0,
        "peak_bytes": 0,
        "cached_bytes": 0,
    }
    decoder: codec.Decoder[StepsMeasured] = codec.Decoder(ToScheduler)
    assert decoder.decode(msgpack.packb({**body, "experts": [right]})).experts
    with pytest.raises(FrameRefused):
        decoder.decode(msgpack.packb({**body, "experts": [{**right, **wrong}]}))
