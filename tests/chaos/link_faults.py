"""Links between scheduler and ranks, and scheduler and gateway, that fail as networks do."""

import time
from collections.abc import Callable

from tests.chaos.fault import Arena, Fault
from tests.chaos.proxy import Proxy, Way
from tests.chaos.rigged import Rigged

DELAY_S = 0.2
DELAYED_S = 3.0
SHORT_SILENCE_S = 2.0
LONG_SILENCE_S = 13.0
"""Longer than the ten seconds after which a silent peer is lost."""


def _proxy(arena: Arena, role: str) -> Proxy:
    assert isinstance(arena.stack, Rigged)
    return arena.stack.proxies[role]


def _rank(arena: Arena) -> Proxy:
    return _proxy(arena, arena.rank_in_turn())


def _gateway(arena: Arena) -> Proxy:
    return _proxy(arena, "gateway")


def _cut_rank(arena: Arena) -> None:
    _do(arena, _rank(arena).cut)


def _cut_gateway(arena: Arena) -> None:
    _do(arena, _gateway(arena).cut)


def _half_close_rank(arena: Arena) -> None:
    _do(arena, _rank(arena).half_close)


def _half_close_gateway(arena: Arena) -> None:
    _do(arena, _gateway(arena).half_close)


def _do(arena: Arena, break_link: Callable[[], None]) -> None:
    """Break a link and give both ends the time to notice before asking whether all is well."""
    epoch = arena.stack.status().epoch
    break_link()
    time.sleep(1.0)
    arena.note("epochs", arena.wait_served().epoch - epoch)


def _delay_rank(arena: Arena) -> None:
    _delay(arena, _rank(arena))


def _delay_gateway(arena: Arena) -> None:
    _delay(arena, _gateway(arena))


def _delay(arena: Arena, proxy: Proxy) -> None:
    """A slow link is slow: no process and no epoch ends."""
    before = arena.stack.status()
    proxy.delay(DELAY_S)
    time.sleep(DELAYED_S)
    proxy.restore()
    arena.expect_same(before, arena.wait_served())


def _silence_rank(arena: Arena) -> None:
    _silence(arena, _rank(arena), "up" if arena.turn % 2 else "down")


def _silence_gateway(arena: Arena) -> None:
    _silence(arena, _gateway(arena), "up" if arena.turn % 2 else "down")


def _silence(arena: Arena, proxy: Proxy, way: Way) -> None:
    def be_silent() -> None:
        proxy.silence(way)
        time.sleep(LONG_SILENCE_S if arena.turn % 4 < 2 else SHORT_SILENCE_S)
        proxy.restore()

    _do(arena, be_silent)


FAULTS = tuple(
    Fault(name, expected, act, phase="mixed", ground="by parts", loads=loads,
          extra_s=extra_s, may_refuse=may_refuse)
    for name, expected, act, loads, extra_s, may_refuse in (
        ("rank-link-cut", "a pause", _cut_rank, 1, 1.0, False),
        ("rank-link-half-close", "a pause", _half_close_rank, 1, 1.0, False),
        ("rank-link-delay", "slower", _delay_rank, 0, 1.0, False),
        ("rank-link-silence", "a pause", _silence_rank, 1, LONG_SILENCE_S, False),
        ("gateway-link-cut", "a pause", _cut_gateway, 1, 1.0, False),
        ("gateway-link-half-close", "a pause", _half_close_gateway, 1, 1.0, False),
        ("gateway-link-delay", "slower", _delay_gateway, 0, 1.0, False),
        ("gateway-link-silence", "a pause", _silence_gateway, 1, LONG_SILENCE_S, True),
    )
)  # fmt: skip
