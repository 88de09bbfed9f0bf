"""Network faults on the links from the scheduler to the ranks and to the gateway."""

import functools
import time
from collections.abc import Callable

from tests.chaos.cluster.fault_injection_stack import FaultInjectionStack
from tests.chaos.cluster.proxy import Proxy
from tests.chaos.faults.fault import Fault, FaultContext

DELAY_S = 0.2
DELAYED_S = 3.0
SHORT_SILENCE_S = 2.0
LONG_SILENCE_S = 13.0
"""Longer than the ten seconds after which a silent peer is lost."""

ProxyOf = Callable[[FaultContext], Proxy]


def _rank_proxy(context: FaultContext) -> Proxy:
    return _proxy(context, context.target_rank)


def _gateway_proxy(context: FaultContext) -> Proxy:
    return _proxy(context, "gateway")


def _proxy(context: FaultContext, role: str) -> Proxy:
    assert isinstance(context.stack, FaultInjectionStack)
    return context.stack.proxies[role]


def _cut(proxy_of: ProxyOf, context: FaultContext) -> None:
    _break_link(context, proxy_of(context).cut)


def _half_close(proxy_of: ProxyOf, context: FaultContext) -> None:
    _break_link(context, proxy_of(context).half_close)


def _silence(proxy_of: ProxyOf, context: FaultContext) -> None:
    proxy = proxy_of(context)

    def silence_then_restore() -> None:
        proxy.silence("up" if context.repetition % 2 else "down")
        time.sleep(LONG_SILENCE_S if context.repetition % 4 < 2 else SHORT_SILENCE_S)
        proxy.restore()

    _break_link(context, silence_then_restore)


def _break_link(context: FaultContext, break_link: Callable[[], None]) -> None:
    epoch = context.stack.status().epoch
    break_link()
    # Both ends need time to notice; before that the world still looks ready.
    time.sleep(1.0)
    context.record_figure("epochs", context.wait_until_served().epoch - epoch)


def _delay(proxy_of: ProxyOf, context: FaultContext) -> None:
    """Delay a link; neither a process nor an epoch may end."""
    proxy = proxy_of(context)
    before = context.stack.status()
    proxy.delay(DELAY_S)
    time.sleep(DELAYED_S)
    proxy.restore()
    context.expect_same_world(before, context.wait_until_served())


FAULTS = tuple(
    Fault(name, expected, functools.partial(inject, proxy_of), phase="mixed",
          stack_kind="fault injection", loads=loads, extra_s=extra_s, may_refuse=may_refuse)
    for name, expected, inject, proxy_of, loads, extra_s, may_refuse in (
        ("rank-link-cut", "a pause", _cut, _rank_proxy, 1, 1.0, False),
        ("rank-link-half-close", "a pause", _half_close, _rank_proxy, 1, 1.0, False),
        ("rank-link-delay", "slower", _delay, _rank_proxy, 0, 1.0, False),
        ("rank-link-silence", "a pause", _silence, _rank_proxy, 1, LONG_SILENCE_S, False),
        ("gateway-link-cut", "a pause", _cut, _gateway_proxy, 1, 1.0, False),
        ("gateway-link-half-close", "a pause", _half_close, _gateway_proxy, 1, 1.0, False),
        ("gateway-link-delay", "slower", _delay, _gateway_proxy, 0, 1.0, False),
        ("gateway-link-silence", "a pause", _silence, _gateway_proxy, 1, LONG_SILENCE_S, True),
    )
)  # fmt: skip
