"""How long to wait before a process that has exited is started again. Pure."""

FIRST_S = 0.1
"""A rank exits at the end of every epoch: coming back fast is the normal case."""

LONGEST_S = 10.0
"""A process that cannot live is tried again this often, so that a repaired cause is noticed."""

FORGIVEN_S = 60.0
"""A process that lived for so long was healthy: the next exit counts as the first."""


class Backoff:
    """The waiting times of one process: doubling, from `FIRST_S` to `LONGEST_S`."""

    def __init__(self) -> None:
        self._next_s = FIRST_S

    def after(self, lived_s: float, *, is_own_fault: bool = True) -> float:
        """Return how many seconds to wait now that the process has exited after `lived_s`.

        Args:
            lived_s: seconds from its start.
            is_own_fault: False: it was told to end, which does not make the next wait longer.
        """
        if lived_s >= FORGIVEN_S:
            self.reset_backoff()
        wait_s = self._next_s
        if is_own_fault:
            self._next_s = min(self._next_s * 2.0, LONGEST_S)
        return wait_s

    def reset_backoff(self) -> None:
        """The process has served: its next exit counts as the first, however soon it comes."""
        self._next_s = FIRST_S
