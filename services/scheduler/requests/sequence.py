"""One sequence: the token ids of one request being generated, and how much of it is planned."""

import dataclasses
import math
from enum import Enum

from services.scheduler.cache.index.sequence_blocks import SequenceBlocks
from services.scheduler.speculation.sequence_drafts import Drafting
from shared.identifiers import PeerId, SequenceId, Slot
from shared.messages import SubmitRequest


class SequenceState(Enum):
    """Where a sequence is. `ENDED` is final."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """Everything the scheduler knows of one request. All counts are tokens.

    `planned` runs ahead of `tokens`: it counts what the KV row holds once all plans sent are
    computed, so it includes tokens that were sampled on the device and are not known here yet.
    """

    sequence_id: SequenceId
    gateway: PeerId
    request: SubmitRequest
    tokens: list[int]
    """Prompt ids, then the completion's ids as far as receipts have agreed."""
    tokens_max: int
    """Longest prompt plus completion: by the request, the model's context, or the KV budget."""
    arrival: int
    """Order of arrival; kept through preemption, so that who was preempted returns first."""
    deadline_at_s: float
    queue_deadline_at_s: float = math.inf
    """By then it must run for the first time; infinite once it has."""
    state: SequenceState = SequenceState.WAITING
    slot: Slot | None = None
    admitted_order: int = 0
    """Counts admissions; the highest is the youngest and is preempted first."""
    planned: int = 0
    """Tokens whose KV is computed once every plan sent is done."""
    is_decoding: bool = False
    """Its sampling prefill chunk is planned: its next token comes from a decode."""
    samples_in_flight: int = 0
    """Tokens sampled by plans whose receipts are not back."""
    stop_ids: frozenset[int] = frozenset()
    admitted_at_s: float = 0.0
    """When it was admitted last."""
    drafting: Drafting | None = None
    """Proposes its drafts; None: it takes none."""
    has_drafting: bool = False
    """`drafting` is decided."""
    is_verifying: bool = False
    """Drafts of it are in flight: what comes next is not known."""
    draft_count: int = 0
    """How many those are."""
    draft_row: int = 0
    """Tokens that its row of the ranks' draft model holds once every plan sent is done: of its own
    row's, never more than that holds."""
    epochs_lost: int = 0
    """Epochs in a row that ended while it ran and before it got a token."""
    blocks: SequenceBlocks = dataclasses.field(init=False)
    """What the cache remembers of it."""

    def __post_init__(self) -> None:
        """Share the tokens with what the cache sees."""
        self.blocks = SequenceBlocks(self.sequence_id, self.tokens, self.request)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, those of before a restart counted in."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def computed(self) -> int:
        """Known tokens that are in its row once every plan sent is done."""
        return min(self.planned, len(self.tokens))

    @property
    def may_decode(self) -> bool:
        """One more token may be planned without passing the length at which the sequence ends."""
        return (
            self.is_decoding
            and not self.is_verifying
            and len(self.tokens) + self.samples_in_flight < self.tokens_max
        )

    def preempt(self) -> None:
        """Go back to the queue with all tokens; the row is given up."""
        self.state = SequenceState.WAITING
        self.slot = None
        self.planned = self.draft_row = 0
        self.is_decoding = False
        self.is_verifying = False

    def forget_flights(self) -> None:
        """Every plan in flight is void: its epoch has ended."""
        self.samples_in_flight = 0
        self.is_verifying = False
