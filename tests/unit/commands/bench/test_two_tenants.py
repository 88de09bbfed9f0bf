"""Judgement of the small tenant's time to first token beside a flood."""

from services.commands.bench.serving.two_tenants import judge


def test_promise_is_kept_up_to_twice_the_time_alone_and_a_stall() -> None:
    """450 ms after 150 ms alone keep the promise with a bound of 150 ms; 451 ms do not."""
    assert "in 1 of 2 repeats" in judge([150.0, 150.0], [450.0, 451.0], 150.0)
