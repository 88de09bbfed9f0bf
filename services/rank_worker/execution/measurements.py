"""What a rank measures in its steps. Owns the measurements that were not reported yet."""

from collections import deque

import mlx.core as mx

from shared import limits
from shared.messages import StepsMeasured
from shared.messages.step_profile import StepProfile
from shared.messages.step_times import StepTimes, pack


class StepMeasurements:
    """Collects the times of finished steps and the memory in use, for one report a second.

    One thread adds and another one takes.
    """

    def __init__(self, epoch: int, rank: int) -> None:
        """Begin without steps.

        Args:
            epoch: the epoch of all steps.
            rank: this rank.
        """
        self._epoch = epoch
        self._rank = rank
        self._steps: deque[tuple[int, StepTimes]] = deque(maxlen=limits.STEPS_PER_MESSAGE_MAX)
        self._profiles: deque[StepProfile] = deque(maxlen=limits.PROFILES_PER_MESSAGE_MAX)
        self._memory = (0, 0, 0)

    def add(self, step_id: int, times: StepTimes, profile: StepProfile | None = None) -> None:
        """Add a finished step; read the memory in use.

        Args:
            step_id: the id that follows that of the last step.
            times: its times.
            profile: where it was measured part by part.
        """
        if profile is not None:
            self._profiles.append(profile)
        self._memory = mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory()
        self._steps.append((step_id, times))

    def take(self) -> StepsMeasured | None:
        """Return a report of the steps since the last report; None without any."""
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        if not steps:
            return None
        origin_s = steps[0][1].came_s
        active_bytes, peak_bytes, cached_bytes = self._memory
        return StepsMeasured(
            epoch=self._epoch,
            rank=self._rank,
            first_step_id=steps[0][0],
            origin_s=origin_s,
            times=pack((times for _, times in steps), origin_s),
            profiles=[self._profiles.popleft() for _ in range(len(self._profiles))],
            active_bytes=active_bytes,
            peak_bytes=peak_bytes,
            cached_bytes=cached_bytes,
        )
