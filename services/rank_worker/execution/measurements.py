"""What a rank measures in its steps. Owns the measurements that were not reported yet."""

from collections import deque

import mlx.core as mx

from services.rank_worker.model.expert_counter import ExpertCounter
from services.rank_worker.sampling.vocabulary import VocabularyPart
from shared import limits
from shared.messages import HeadExchanges, LayerAssignments, StepsMeasured
from shared.messages.telemetry.step_profile import StepProfile
from shared.messages.telemetry.step_times import StepTimes, pack

EXPERT_COUNTS_PER_S = 1_024
"""Counts of experts that a rank may report per second on average: 2 to 4 KB. Larger tables are
reported more rarely."""


class StepMeasurements:
    """Collects the times of finished steps and the memory in use, for one report a second.

    One thread adds and another one takes.
    """

    def __init__(
        self,
        epoch: int,
        rank: int,
        expert_counter: ExpertCounter | None = None,
        vocabulary: VocabularyPart | None = None,
    ) -> None:
        """Begin without steps.

        Args:
            epoch: the epoch of all steps.
            rank: this rank.
            expert_counter: counts assignments to experts; None: they are not counted.
            vocabulary: counts how steps are sampled from a divided head; None: it is whole.
        """
        self._vocabulary = vocabulary
        self._reported_head = self._head_counts()
        self._experts = expert_counter
        self._reported_counts = expert_counter.counts if expert_counter is not None else None
        self._pause_s = 0.0
        """Reports, one a second, until the next one with counts of experts."""
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
        """Return a report of all since the last report; None without any. Called once a second."""
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        experts = self._take_experts()
        if not steps and not experts:
            return None
        first_step_id, origin_s = (steps[0][0], steps[0][1].came_s) if steps else (0, 0.0)
        active_bytes, peak_bytes, cached_bytes = self._memory
        return StepsMeasured(
            epoch=self._epoch,
            rank=self._rank,
            first_step_id=first_step_id,
            origin_s=origin_s,
            times=pack((times for _, times in steps), origin_s),
            profiles=[self._profiles.popleft() for _ in range(len(self._profiles))],
            experts=experts,
            head=self._take_head(),
            active_bytes=active_bytes,
            peak_bytes=peak_bytes,
            cached_bytes=cached_bytes,
        )

    def _head_counts(self) -> tuple[int, int, int]:
        known = self._vocabulary
        return (
            (known.candidate_steps, known.gathered_steps, known.sent_bytes) if known else (0,) * 3
        )

    def _take_head(self) -> HeadExchanges:
        """Return the counts since the last report."""
        before, self._reported_head = self._reported_head, self._head_counts()
        new = [now - then for now, then in zip(self._reported_head, before, strict=True)]
        return HeadExchanges(candidate_steps=new[0], gathered_steps=new[1], sent_bytes=new[2])

    def _take_experts(self) -> list[LayerAssignments]:
        """Return the assignments since the last report that had some; [] if it is too soon."""
        self._pause_s = max(0.0, self._pause_s - 1.0)
        counter = self._experts
        if counter is None or self._pause_s > 0.0 or counter.counts is self._reported_counts:
            return []
        # The main thread replaces the array at any time.
        layers, self._reported_counts = counter.report(self._reported_counts)
        self._pause_s = sum(len(one.counts) for one in layers) / EXPERT_COUNTS_PER_S
        return layers
