"""Waits for grammars. Owns which running sequences wait until all ranks have compiled theirs. Pure.

Such a sequence is prefilled up to its last chunk, which samples, so no step waits for a grammar and
all ranks sample the sequence in the same step.
"""

import dataclasses

from services.scheduler.requests.sequence import Sequence
from shared import limits
from shared.identifiers import SequenceId
from shared.messages import GrammarCompiled


@dataclasses.dataclass(frozen=True, slots=True)
class _Wait:
    sequence: Sequence
    step_id: int
    """The plan that admitted it."""
    deadline_at_s: float
    ranks: set[int] = dataclasses.field(default_factory=set)
    """Ranks that have compiled the grammar."""


_LATE = (
    "The ranks are compiling too many grammars: that of the answer, which response_format, a "
    "strict tool or another field demands, was not ready within "
    f"{limits.GRAMMAR_COMPILE_MAX_S:.0f} s "
    "(ranks that compiled it: {ranks}). Try again later, or make the schema or grammar smaller."
)


class GrammarWaits:
    """The running sequences whose grammars some ranks have not compiled yet."""

    def __init__(self) -> None:
        self._waits: dict[SequenceId, _Wait] = {}

    def begin(self, sequence: Sequence, step_id: int, now_s: float) -> None:
        """Wait for the grammar of a sequence, if it has one.

        Args:
            sequence: the sequence that is being admitted.
            step_id: the plan that admits it.
            now_s: the monotonic time in seconds.
        """
        if sequence.request.grammar is not None:
            deadline_at_s = now_s + limits.GRAMMAR_COMPILE_MAX_S
            self._waits[sequence.sequence_id] = _Wait(sequence, step_id, deadline_at_s)

    def end(self, sequence: Sequence) -> None:
        """Wait no longer for the grammar of a sequence, which leaves the batch."""
        self._waits.pop(sequence.sequence_id, None)

    def is_waiting(self, sequence: Sequence) -> bool:
        """Tell whether a rank has not compiled the grammar of a running sequence."""
        return sequence.sequence_id in self._waits

    def record(self, rank: int, message: GrammarCompiled, world_size: int) -> Sequence | None:
        """Record a rank's report. One about an earlier admission is ignored.

        Args:
            rank: the rank that sent it.
            message: the report.
            world_size: number of ranks.

        Returns:
            The sequence, if its grammar cannot be compiled and its request must end, else None.
        """
        wait = self._waits.get(SequenceId(message.sequence_id))
        if wait is None or wait.step_id != message.step_id:
            return None
        if message.failure:
            return wait.sequence
        wait.ranks.add(rank)
        if len(wait.ranks) == world_size:
            self.end(wait.sequence)
        return None

    def expired(self, now_s: float) -> list[tuple[Sequence, str]]:
        """Return each sequence that has waited too long, with a sentence for the client.

        Args:
            now_s: the monotonic time in seconds.
        """
        late = [wait for wait in self._waits.values() if now_s > wait.deadline_at_s]
        return [(wait.sequence, _LATE.format(ranks=sorted(wait.ranks) or "none")) for wait in late]
