"""The kinds of Lockstep that faults are done to, by the names that `Fault.ground` has."""

import contextlib
from collections.abc import Iterator

from tests.chaos import quiet_faults
from tests.chaos.fault import Ground
from tests.chaos.rigged import Rigged
from tests.chaos.stack import Shape, Stack
from tests.chaos.up import Up


@contextlib.contextmanager
def opened(ground: Ground, shape: Shape) -> Iterator[Stack]:
    """Start a stack of this kind; end it and remove its folders at the exit.

    Where an exception leaves the block the log stays, and its path is printed.
    """
    stack = Up(shape) if ground == "up" else Rigged(shape)
    is_good = False
    try:
        quiet_faults.mount_small_disk(stack.disk)
        stack.start()
        yield stack
        is_good = True
    finally:
        if not is_good:
            print(f"{stack.log.tail()}\nThe whole log: {stack.log.file}")
        try:
            stack.close()
        finally:
            quiet_faults.unmount(stack.disk)
        if is_good:
            stack.remove()
