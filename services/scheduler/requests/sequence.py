"""Sequence. Owns the token ids of one request and how many of them are planned."""

import dataclasses
import math
from array import array
from enum import Enum

from services.scheduler.cache.index.sequence_blocks import SequenceBlocks
from services.scheduler.speculation.sequence_drafts import DraftState
from shared.identifiers import PeerId, SequenceId, Slot
from shared.messages import SubmitRequest


class SequenceState(Enum):
    """State of a sequence: in the waiting queue, in the running batch, or ended for good."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """A request, its tokens so far, and its place in the queue or the batch. Counts are in tokens.

    `planned_tokens` runs ahead of `tokens`: it counts what the KV row holds once all plans sent are
    computed, so it includes tokens that were sampled on the device and are not known here yet.
    """

    sequence_id: SequenceId
    gateway: PeerId
    request: SubmitRequest
    """The request, without its token ids."""
    tokens: "array[int]"
    """Prompt ids, then completion ids from receipts that agreed. Until its first admission equal
    prompts of one tenant are the same object."""
    prompt_tokens: int
    """Length of the prompt."""
    tokens_max: int
    """Most tokens of prompt and completion, by request, model context and KV budget."""
    arrival_number: int
    """Order of arrival; unchanged by preemption, so a preempted sequence comes first again."""
    accepted_at_s: float
    """When its request was accepted, on the scheduler's clock."""
    deadline_at_s: float
    """When its request fails if it has not finished, on the scheduler's clock."""
    owns_tokens: bool = False
    """It was admitted once, and `tokens` are a copy of its own."""
    queue_deadline_at_s: float = math.inf
    """Deadline of its first admission; infinite once it was admitted."""
    state: SequenceState = SequenceState.WAITING
    slot: Slot | None = None
    admission_number: int = 0
    """Number of its last admission; the highest is the youngest and is preempted first."""
    planned_tokens: int = 0
    """Length of its KV row once all plans in flight are computed."""
    is_decoding: bool = False
    """Its last prefill chunk is planned, so its next token comes from a decode."""
    samples_in_flight: int = 0
    """Samples in plans whose receipts have not arrived."""
    stop_ids: frozenset[int] = frozenset()
    """Token ids that end the completion."""
    admitted_at_s: float = 0.0
    """Time of its last admission."""
    started_at_s: float = 0.0
    """Time of its first admission; 0: it was never admitted."""
    first_step: tuple[int, int] = 0, 0
    """Epoch and id of the step that admitted it first; zeros: none has."""
    first_token_at_s: float = 0.0
    """Time of its first token since this scheduler accepted it; 0: none has come."""
    draft_state: DraftState | None = None
    """State of its speculation; None: it takes no drafts."""
    is_draft_state_chosen: bool = False
    """`draft_state` was decided, at the first need of it, and stays."""
    is_verifying: bool = False
    """Drafts of it are in flight, so it can be in no other plan."""
    drafts_in_flight: int = 0
    """Number of these drafts."""
    draft_row_tokens: int = 0
    """Length of its row in the ranks' draft model once all plans in flight are computed; at most
    the length of its own row."""
    epochs_without_token: int = 0
    """Consecutive epochs that failed while it ran and before it got a token."""
    blocks: SequenceBlocks = dataclasses.field(init=False)
    """Its blocks in the cache."""

    def __post_init__(self) -> None:
        """Share the tokens with the cache."""
        self.blocks = SequenceBlocks(
            self.sequence_id, self.tokens, self.prompt_tokens, self.request
        )

    @property
    def tenant(self) -> str:
        """Whose request it is."""
        return self.request.tenant

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, including those before a restart."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def computed_tokens(self) -> int:
        """Tokens of `tokens` that its KV row holds once all plans in flight are computed."""
        return min(self.planned_tokens, len(self.tokens))

    def own_tokens(self) -> None:
        """Copy the tokens, which may be shared, once, so that they can grow."""
        if not self.owns_tokens:
            self.owns_tokens = True
            self.tokens = self.tokens[:]
            self.blocks.replace_tokens(self.tokens)

    def preempt(self) -> None:
        """Mark the sequence as waiting: without slot and row, but with all its tokens.

        The caller has freed its slot.
        """
        self.state = SequenceState.WAITING
        self.slot = None
        self.planned_tokens = self.draft_row_tokens = 0
        self.is_decoding = False
        self.is_verifying = False

    def forget_in_flight(self) -> None:
        """Count no samples of this sequence as in flight, because their epoch has ended."""
        self.samples_in_flight = 0
        self.is_verifying = False
