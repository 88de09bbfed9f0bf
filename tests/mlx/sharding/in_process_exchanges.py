"""Exchanges between several ranks in one process.

The ranks run one after the other, so what an exchange returns is known only after all of them have
reached it. Each pass runs every rank up to the first exchange whose result is unknown.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import mlx.core as mx

T = TypeVar("T")


class _PendingExchange(Exception):
    def __init__(self, array: mx.array) -> None:
        super().__init__()
        self.array = array


class InProcessExchanges:
    """Runs a function of every rank of a world whose ranks exchange arrays."""

    def __init__(self) -> None:
        self.results: list[mx.array] = []
        """What each exchange of the last run returned, in order."""
        self._next = 0

    def run(self, ranks: Sequence[Callable[[], T]]) -> list[T]:
        """Return the result of each rank's function, which is called several times.

        Args:
            ranks: one function per rank; none may change anything before its last exchange.
        """
        self.results = []
        while True:
            arrays: list[mx.array] = []
            found: list[T] = []
            for function in ranks:
                self._next = 0
                try:
                    found.append(function())
                except _PendingExchange as pending:
                    mx.eval(pending.array)
                    arrays.append(pending.array)
            if not arrays:
                return found
            assert len(arrays) == len(ranks), "some ranks reach an exchange that others do not"
            assert len({(tuple(one.shape), one.dtype) for one in arrays}) == 1
            self.results.append(mx.concatenate(arrays))
            mx.eval(self.results[-1])

    def gather(self, array: mx.array) -> mx.array:
        """Return the arrays of all ranks, [N n]; the exchange of every rank."""
        if self._next == len(self.results):
            raise _PendingExchange(array)
        self._next += 1
        return self.results[self._next - 1]
