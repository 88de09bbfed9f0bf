"""Detection of processes that cannot end by themselves. Pure. Owns when; does not kill them.

A dismissed rank is one that the scheduler has told to leave an ended epoch. It normally ends within
milliseconds. A stopped rank, or one inside a system call, does not, and the next epoch waits for
its successor. A scheduler that hangs keeps its process but sends no status.
"""

from shared.messages import StatusReported

LEAVE_GRACE_S = 0.5
"""Seconds that a dismissed rank gets to end by itself. All of an epoch should end within 1 s."""

SILENCES = 2.0
"""A scheduler without a status for this many times `scheduler.silence_s` is killed. After one such
time links declare a peer lost, so its ranks have ended."""

START_S = 60.0
"""Seconds within which a restarted scheduler must report, at least. It usually takes 1 or 2."""


class LingeringRanks:
    """Ranks of this host that the scheduler told to leave an ended epoch and that still run."""

    def __init__(self, host: str) -> None:
        """Start without any; `host` is the host name that this host's ranks report."""
        self._host = host
        self._listed_since_s: dict[int, float] = {}

    def update(self, status: StatusReported, now_s: float) -> None:
        """Replace the list by the processes of this host that the scheduler reports as dismissed.

        A process keeps the time of its first listing while it stays in the reports. Process ids of
        the present world are left out, because the system may have reused them.

        Args:
            status: the scheduler's report.
            now_s: time of the report in seconds.
        """
        present = {rank.pid for rank in status.ranks if rank.host == self._host}
        listed = {rank.pid for rank in status.dismissed if rank.host == self._host}
        # The system reuses process ids: one of the present world belongs to a new process.
        self._listed_since_s = {
            pid: self._listed_since_s.get(pid, now_s) for pid in listed - present
        }

    def due(self, now_s: float) -> set[int]:
        """Return the process ids that must be killed: those listed for at least `LEAVE_GRACE_S`.

        Args:
            now_s: the monotonic time in seconds, by the clock of `update`.
        """
        since_s = self._listed_since_s.items()
        return {pid for pid, listed_s in since_s if now_s - listed_s >= LEAVE_GRACE_S}


class SchedulerLiveness:
    """Detection of a scheduler process that hangs: it runs, but its status reports have ended."""

    def __init__(self, silence_s: float) -> None:
        """Start without a report.

        Args:
            silence_s: `scheduler.silence_s`.
        """
        self._silent_s = SILENCES * silence_s
        self._start_s = max(START_S, self._silent_s)
        self._start = 0
        self._status_at_s = 0.0
        self._latest_start = 0
        self._started_at_s = 0.0

    def update(self, start: int, now_s: float) -> None:
        """Record that the running scheduler process has sent a status report.

        Args:
            start: number of the process among those started by this supervisor, counted from 1.
            now_s: time of the status in seconds.
        """
        self._start, self._status_at_s = start, now_s

    def expired(self, start: int, now_s: float) -> bool:
        """Return whether the scheduler process sent no status for too long and must be killed.

        That is `SILENCES` times the silence of a lost peer after its last status or, without one,
        `START_S` (or that time, if it is longer) after its number was first seen here, so call
        this regularly. It is False as long as no scheduler has ever reported: this host's key may
        lack the permission.

        Args:
            start: number of the running process among those started, counted from 1.
            now_s: the monotonic time in seconds, by the clock of `update`.
        """
        if start != self._latest_start:
            self._latest_start, self._started_at_s = start, now_s
        if start == self._start:
            return now_s - self._status_at_s >= self._silent_s
        return self._start > 0 and now_s - self._started_at_s >= self._start_s
