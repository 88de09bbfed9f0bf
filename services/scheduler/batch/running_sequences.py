"""Running sequences. Owns their slots and the list of rows to drop; plans no steps."""

from collections.abc import Iterator

from services.scheduler.batch.plan_builder import PlanBuilder
from services.scheduler.cache.kv_rows import Rows
from services.scheduler.requests.sequence import Sequence, SequenceState
from shared.errors import InvariantBroken
from shared.identifiers import SequenceId, Slot


class RunningSequences:
    """The running sequences and their slots, the longest-running first."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._by_id: dict[SequenceId, Sequence] = {}
        self._prefilling: dict[SequenceId, Sequence] = {}
        self.departed: list[tuple[Sequence, int]] = []
        """Sequences that have left since the last plan, whose rows the next plan drops, each with
        the number of known tokens in its row. The next plan can keep their blocks."""
        self._admissions = 0
        self.draft_room_tokens = 0
        """The most drafts of one row in the next plan. Every decoding row needs room for that many
        more tokens, since ranks may pad rows to one length."""

    def __len__(self) -> int:
        """Return the number of running sequences."""
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the sequences, which must not change meanwhile."""
        return iter(self._by_id.values())

    @property
    def prefilling(self) -> list[Sequence]:
        """The sequences whose last prefill chunk is not planned, the longest-running first."""
        return list(self._prefilling.values())

    def admit(self, sequence: Sequence, now_s: float) -> Slot:
        """Give a sequence the lowest free slot and return it.

        Args:
            sequence: a waiting sequence; the caller has made room for its row.
            now_s: when it is admitted.

        Raises:
            InvariantBroken: there is no row for that slot.
        """
        sequence.own_tokens()
        sequence.slot = self._rows.assign_slot(sequence.sequence_id)
        sequence.state = SequenceState.RUNNING
        sequence.admitted_at_s = now_s
        sequence.admission_number = self._admissions
        self._admissions += 1
        self._by_id[sequence.sequence_id] = sequence
        self._prefilling[sequence.sequence_id] = sequence
        return sequence.slot

    def begin_decoding(self, sequence: Sequence) -> None:
        """Record that the last prefill chunk of a sequence is planned, so that it decodes next."""
        sequence.is_decoding = True
        sequence.samples_in_flight += 1
        del self._prefilling[sequence.sequence_id]

    def remove(self, sequence: Sequence) -> None:
        """Free a sequence's slot; the next plan tells the ranks to drop its row.

        Raises:
            InvariantBroken: the sequence has no slot.
        """
        if sequence.slot is None:
            raise InvariantBroken(f"sequence {sequence.sequence_id} leaves without a slot")
        self._rows.release_slot(sequence.slot, sequence.sequence_id)
        del self._by_id[sequence.sequence_id]
        self._prefilling.pop(sequence.sequence_id, None)
        self.departed.append((sequence, sequence.computed_tokens))
        sequence.slot = None

    def compact(self, plan: PlanBuilder) -> None:
        """Move rows to the lowest slots, so that no slot below a used one is free.

        Args:
            plan: the plan being built, to which the moves are added.

        Raises:
            InvariantBroken: when the plan has admitted a sequence already.
        """
        if plan.admitted:
            raise InvariantBroken("rows cannot move after a sequence was admitted")
        for move in self._rows.compact():
            self._by_id[SequenceId(move.sequence_id)].slot = Slot(move.slot)
            plan.moves.append(move)

    def row_tokens_needed(self) -> int:
        """Return the row length in tokens that the longest running sequence needs next."""
        needed, room = 0, self.draft_room_tokens
        for one in self._by_id.values():
            tokens = one.planned_tokens
            if not one.is_decoding:
                tokens = len(one.tokens)
            elif not one.is_verifying:
                # One more if it can decode.
                tokens += room + (tokens + 1 < one.tokens_max)
            elif one.drafts_in_flight < room:
                # Its own drafts are planned already; its row is padded to the longest drafts.
                tokens += room - one.drafts_in_flight
            if tokens > needed:  # noqa: PLR1730 - a call of max takes twice as long
                needed = tokens
        return needed

    def decodable(self) -> list[Sequence]:
        """Return the sequences of which the next plan may decode a token.

        A decoding sequence has one token more than its row holds, known or in flight.
        """
        return [
            one
            for one in self._by_id.values()
            if one.is_decoding and not one.is_verifying and one.planned_tokens + 1 < one.tokens_max
        ]

    def take_departed(self) -> list[tuple[Sequence, int]]:
        """Return and clear the sequences that have left since the last plan.

        Returns:
            Each sequence, and how many known tokens its row holds.
        """
        left, self.departed = self.departed, []
        return left

    def check_invariants(self) -> None:
        """Raise InvariantBroken when slots, rows and sequences do not agree."""
        held: dict[Slot, SequenceId] = {}
        if self.prefilling != [one for one in self._by_id.values() if not one.is_decoding]:
            raise InvariantBroken("the sequences being prefilled are not those that do not decode")
        for sequence in self._by_id.values():
            if sequence.slot is None or sequence.state is not SequenceState.RUNNING:
                raise InvariantBroken(f"sequence {sequence.sequence_id} runs without a slot")
            if sequence.planned_tokens > self._rows.row_tokens:
                raise InvariantBroken(f"sequence {sequence.sequence_id} outgrew its row")
            sampled = len(sequence.tokens) + sequence.samples_in_flight
            is_counted = sequence.is_decoding and not sequence.is_verifying
            if is_counted and sampled != sequence.planned_tokens + 1:
                raise InvariantBroken(
                    f"sequence {sequence.sequence_id} has {sampled} tokens, known or in flight, "
                    f"but {sequence.planned_tokens} in its row"
                )
            held[sequence.slot] = sequence.sequence_id
        self._rows.check_invariants(held)
