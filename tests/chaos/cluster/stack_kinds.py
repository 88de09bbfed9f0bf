"""The kinds of stack that faults are injected into."""

import contextlib
from collections.abc import Iterator
from typing import Literal

from tests.cache_store import small_disk
from tests.chaos.cluster.fault_injection_stack import FaultInjectionStack
from tests.chaos.cluster.stack import Stack, StackOptions
from tests.chaos.cluster.supervised_stack import SupervisedStack

StackKind = Literal["supervised", "fault injection"]
"""`lockstep up`, with its cache on a small disk where this machine permits that; or roles started
by the harness, with proxies between them and ranks that can return wrong results."""


@contextlib.contextmanager
def open_stack(kind: StackKind, options: StackOptions) -> Iterator[Stack]:
    """Start a stack of this kind; stop it and delete its folders at the exit.

    After an exception the log is kept and its path printed.
    """
    stack = SupervisedStack(options) if kind == "supervised" else FaultInjectionStack(options)
    is_good = False
    try:
        small_disk.mount_small_disk(stack.disk)
        stack.start()
        yield stack
        is_good = True
    finally:
        if not is_good:
            print(f"{stack.log.tail()}\nThe whole log: {stack.log.file}")
        try:
            stack.close()
        finally:
            small_disk.unmount(stack.disk)
        if is_good:
            stack.remove()
