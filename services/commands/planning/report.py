"""Content of a memory plan: the JSON document, from which the table is made."""

from msgspec import Struct

from services.commands.planning.hosts import RankMemory
from shared.messages.base import Sharding


class RankShare(Struct, frozen=True, kw_only=True):
    """Memory of one rank under a split, in bytes."""

    host: str
    whole_bytes: int
    """Weights that every rank holds in full, including the draft model."""
    divided_bytes: int
    """Its part of the divided weights."""
    kv_bytes_per_token: int
    """KV of model and draft model for each token of a row."""
    kv_bytes_per_row: int
    """KV for each row of any length: sliding windows and recurrent state."""
    usable_bytes: int
    """Memory that the rank's device may use, weights included."""
    kv_budget_bytes: int
    """Memory for KV rows."""
    reserve_bytes: int
    """Memory that stays free for activations and MLX itself."""
    short_bytes: int
    """Bytes missing for the requested sequences; 0: they fit."""


class SplitOption(Struct, frozen=True, kw_only=True):
    """One way to split the model over a number of ranks."""

    ranks: int
    sharding: Sharding
    """How the model is divided."""
    obstacle: str = ""
    """Reason why it is impossible; "": it is possible."""
    fits: bool = False
    """Whether weights and the requested sequences fit on every rank."""
    short_bytes: int = 0
    """Largest number of bytes that a rank lacks; 0: it fits."""
    context_tokens: int = 0
    """Length of the longest sequence that fits alone."""
    shares: list[RankShare] = []
    """Memory of each rank; empty if the split is impossible."""


class SequenceFit(Struct, frozen=True, kw_only=True):
    """How many sequences of one length run at once under the recommended split."""

    context_tokens: int
    """The length."""
    sequences: dict[str, int]
    """`kv_bits` -> number of sequences, for each kv_bits that the model supports."""


class Recommendation(Struct, frozen=True, kw_only=True):
    """Recommended split, with the flags and settings that choose it."""

    ranks: int
    sharding: str
    kv_bits: int
    """Bits per number of stored KV, 4 or 8; 0: not quantized."""
    context_tokens: int
    """Length of sequences that fit: the requested one, or a shorter one that still fits."""
    sequences: int
    """How many sequences of this length run at once."""
    hosts: list[str]
    """Each rank's host."""
    flags: list[str]
    """Flags of `lockstep up` if all ranks are on one host; empty for hosts of an inventory."""
    settings: dict[str, int | str | list[int]]
    """Settings without a flag; for hosts of an inventory all recommended settings."""


class ExpertProposal(Struct, frozen=True, kw_only=True):
    """Numbers of experts by rank that balance measured loads. Ranks hold adjacent experts."""

    ranks: int
    assignments: int
    """Measured: tokens routed to experts, once for each expert, over all layers."""
    present: list[int]
    """Experts of each layer by rank, as memory or `world.expert_shares` divides them."""
    present_imbalance: float
    """Load of each layer's busiest rank over the mean of its ranks, both summed over layers."""
    proposed: list[int]
    """The same as `present` if nothing better fits."""
    proposed_imbalance: float
    """The imbalance of `proposed`, for the measured loads."""
    sentence: str
    """All this as a clause."""


class MemoryPlan(Struct, frozen=True, kw_only=True):
    """Result of `lockstep plan` for one model. Sizes in bytes, lengths in tokens."""

    model: str
    model_type: str
    device: str
    weights_bytes: int
    draft_bytes: int
    """Weights of the draft model; 0: none."""
    layers: int
    """Number of layers."""
    context_tokens_max: int
    """Longest context that the model allows."""
    asked_context_tokens: int
    """Length that must fit."""
    asked_sequences: int
    """Number of sequences of this length that must fit at once."""
    kv_bits: int
    """Configured bits per number of stored KV; 0: not quantized."""
    kv_known: bool
    """False: headers do not show what some layers store, so KV is larger than planned."""
    memory: list[RankMemory]
    """Memory of each rank that may be used."""
    options: list[SplitOption]
    """All splits over 1 to N ranks, impossible ones included."""
    fits: list[SequenceFit]
    """Lengths and numbers of sequences under the recommended split; empty without one."""
    recommendation: Recommendation | None
    """None: no split has room for the weights and 1,024 tokens."""
    experts: ExpertProposal | None
    """Shares of experts by measured load; None: no loads were given."""
    notes: list[str]
    """Explanations of the figures, one sentence each."""
