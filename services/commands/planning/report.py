"""What a plan says, as one structure: `--json` is it, the table is made from it."""

from msgspec import Struct


class HostMemory(Struct, frozen=True, kw_only=True):
    """What one rank may use."""

    host: str
    total_bytes: int
    usable_bytes: int


class RankShare(Struct, frozen=True, kw_only=True):
    """One rank of a splitting."""

    host: str
    whole_bytes: int
    """Weights that every rank holds, the draft model among them."""
    divided_bytes: int
    """Its part of those that are divided."""
    kv_bytes_per_token: int
    kv_bytes_per_row: int
    usable_bytes: int
    kv_budget_bytes: int
    """Memory for KV rows."""
    reserve_bytes: int
    """What stays free for activations and MLX itself."""
    short_bytes: int
    """What is missing for the sequences that were asked for; 0: they fit."""


class Option(Struct, frozen=True, kw_only=True):
    """One way to split the model over so many ranks."""

    ranks: int
    sharding: str
    obstacle: str = ""
    """Why it cannot be; "": it can."""
    fits: bool = False
    """Whether weights and the sequences that were asked for fit on every rank."""
    short_bytes: int = 0
    """What the poorest rank lacks."""
    context_tokens: int = 0
    """Longest sequence that fits alone."""
    shares: list[RankShare] = []


class Fit(Struct, frozen=True, kw_only=True):
    """How many sequences of one length run at once."""

    context_tokens: int
    sequences: dict[str, int]
    """`kv_bits` -> how many; kv_bits that the model cannot have are left out."""


class Recommendation(Struct, frozen=True, kw_only=True):
    """What to set."""

    ranks: int
    sharding: str
    kv_bits: int
    context_tokens: int
    sequences: int
    """How many sequences of this length run at once."""
    hosts: list[str]
    """Each rank's host."""
    flags: list[str]
    """For `lockstep up` where all ranks are on one host; none for hosts of an inventory."""
    settings: dict[str, int | str]
    """Settings that have no flag; for hosts of an inventory all that are to stand there."""


class MemoryPlan(Struct, frozen=True, kw_only=True):
    """All of it. Sizes in bytes, lengths in tokens."""

    model: str
    model_type: str
    device: str
    weights_bytes: int
    draft_bytes: int
    layers: int
    context_tokens_max: int
    asked_context_tokens: int
    asked_sequences: int
    kv_bits: int
    kv_known: bool
    """False: some layers keep what cannot be told from shapes; sizes of KV are too small."""
    memory: list[HostMemory]
    options: list[Option]
    fits: list[Fit]
    """For the recommended splitting; none without one."""
    recommendation: Recommendation | None
    notes: list[str]
