"""The running sequences, the slots that they hold, and who has left since the last plan."""

from collections.abc import Iterator

from services.scheduler.batch.plan_builder import PlanBuilder
from services.scheduler.cache.kv_rows import Rows
from services.scheduler.requests.sequence import Sequence, SequenceState
from shared.errors import InvariantBroken
from shared.identifiers import SequenceId, Slot


class RunningSequences:
    """Sequences by id, the longest-running first."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._by_id: dict[SequenceId, Sequence] = {}
        self._dropped: list[int] = []
        self._left: list[tuple[Sequence, int]] = []
        self._admissions = 0
        self.draft_tokens = 0
        """Most drafts of one row in the plan in the making: every row that decodes has room for so
        many more tokens, since rows may be padded to one length."""

    def __len__(self) -> int:
        """Return how many run."""
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over them; the caller lets nobody in or out meanwhile."""
        return iter(self._by_id.values())

    @property
    def has_left(self) -> bool:
        """Tell whether somebody has left whose row can still be kept."""
        return bool(self._left)

    def admit(self, sequence: Sequence, now_s: float) -> Slot:
        """Give a sequence the lowest free slot, for which there is room."""
        sequence.slot = self._rows.take(sequence.sequence_id)
        sequence.state = SequenceState.RUNNING
        sequence.admitted_at_s = now_s
        sequence.admitted_order = self._admissions
        self._admissions += 1
        self._by_id[sequence.sequence_id] = sequence
        return sequence.slot

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence off its slot; the next plan tells the ranks."""
        if sequence.slot is None:
            raise InvariantBroken(f"sequence {sequence.sequence_id} leaves without a slot")
        self._rows.give_back(sequence.slot, sequence.sequence_id)
        del self._by_id[sequence.sequence_id]
        self._dropped.append(sequence.sequence_id)
        self._left.append((sequence, sequence.computed))
        sequence.slot = None

    def compact(self, draft: PlanBuilder) -> None:
        """Move rows so that there are no holes between them."""
        if draft.admitted:
            raise InvariantBroken("rows move before anybody is admitted")
        for move in self._rows.compact():
            self._by_id[SequenceId(move.sequence_id)].slot = Slot(move.slot)
            draft.moves.append(move)

    def tokens_needed(self) -> int:
        """Return how long rows must be in the next step, each one's whole known text included."""
        longest = 0
        for one in self._by_id.values():
            tokens = one.planned
            if one.is_decoding:
                # What it has drafts for is planned already; to the longest drafts of the plan it is
                # padded.
                own = one.draft_count if one.is_verifying else 0
                tokens += one.may_decode + max(0, self.draft_tokens - own)
            longest = max(longest, tokens, len(one.tokens))
        return longest

    def take_dropped(self) -> list[int]:
        """Return who has left since the last plan, once."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def take_left(self) -> list[tuple[Sequence, int]]:
        """Return the same sequences, each with what its row held of its known tokens, once."""
        left, self._left = self._left, []
        return left

    def clear(self) -> None:
        """Tell nobody who has left: those ranks are gone."""
        self._dropped.clear()
        self._left.clear()

    def check_invariants(self) -> None:
        """Raise InvariantBroken when slots, rows and sequences do not agree."""
        held: dict[Slot, SequenceId] = {}
        for sequence in self._by_id.values():
            if sequence.slot is None or sequence.state is not SequenceState.RUNNING:
                raise InvariantBroken(f"sequence {sequence.sequence_id} runs without a slot")
            if sequence.planned > self._rows.row_tokens:
                raise InvariantBroken(f"sequence {sequence.sequence_id} outgrew its row")
            held[sequence.slot] = sequence.sequence_id
        self._rows.check_invariants(held)
