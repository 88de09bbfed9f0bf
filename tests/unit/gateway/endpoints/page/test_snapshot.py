"""What the page is told about experts."""

from services.gateway.endpoints.page.snapshot import describe_experts
from shared.messages import ExpertLayer, ExpertRange, ExpertsReported


def _report(*layers: ExpertLayer) -> ExpertsReported:
    return ExpertsReported(
        model="m", model_fingerprint="f", sharding="expert", world_size=2, layers=list(layers)
    )


def _layer(number: int, counts: list[int], *shares: int) -> ExpertLayer:
    firsts = [sum(shares[:rank]) for rank in range(len(shares))]
    ranges = [
        ExpertRange(rank=rank, first=first, count=count)
        for rank, (first, count) in enumerate(zip(firsts, shares, strict=True))
    ]
    return ExpertLayer(layer=number, counts=counts, ranges=ranges)


def test_load_of_layer_is_told_by_expert_and_by_rank() -> None:
    """Rank 0 has three quarters of the load, and expert 1 half of it."""
    assert describe_experts(_report(_layer(3, [10, 20, 4, 6], 2, 2))) == [
        {
            "layer": 3,
            "counts": [10, 20, 4, 6],
            "load": 40,
            "busiest_expert": 1,
            "expert_imbalance": 2.0,
            "ranks": [{"rank": 0, "load": 30}, {"rank": 1, "load": 10}],
            "rank_imbalance": 1.5,
        }
    ]


def test_layer_without_load_is_left_out_and_single_rank_has_no_imbalance() -> None:
    """One rank is always even; nothing can be said of a layer that no token has reached."""
    (only,) = describe_experts(_report(_layer(0, [0, 0], 1, 1), _layer(1, [1, 2], 2)))
    assert (only["layer"], only["rank_imbalance"]) == (1, None)
    assert describe_experts(_report()) == []
