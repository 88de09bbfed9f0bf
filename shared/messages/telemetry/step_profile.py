"""Profile of one step on one rank: how its time divides between parts."""

import struct
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, NamedTuple, get_args

from msgspec import Meta

from shared.messages.base import Count, MessagePart, Seconds
from shared.messages.telemetry.step_times import STEP_BYTES

Part = Literal[
    "host",
    "blocks",
    "embedding",
    "attention",
    "kv_write",
    "mlp",
    "experts",
    "collective",
    "send",
    "receive",
    "norms",
    "head",
    "drafting",
    "masks",
    "sampling",
]
"""What a step consists of. `host`: plan and receipt. `blocks`: changes of rows and blocks. `norms`:
norms, residuals and all else between the other parts of the model. `attention`: also other mixers
of tokens, with their projections. `kv_write`: writing new keys and values into rows. `collective`:
exchanges of all ranks. `send`, `receive`: between two ranks of a pipeline."""

PARTS: tuple[Part, ...] = get_args(Part)

_SPAN = struct.Struct("<BhII")
SPAN_BYTES = _SPAN.size
SPANS_MAX = 16_384
NO_LAYER = -1


class Span(NamedTuple):
    """One run of a part. Spans nest: a collective within attention within nothing."""

    part: Part
    layer: int
    """Number of the model's layer; NO_LAYER outside of layers."""
    began_s: float
    """Seconds after the step began."""
    seconds: float


class PartTotal(MessagePart, frozen=True, kw_only=True):
    """All runs of one part in a step."""

    part: Part
    """The part of the step."""
    runs: Count
    """How often it ran."""
    seconds: Seconds
    """Without the parts within it, so that all parts add up to the step."""
    bytes: Count = 0
    """Bytes of the weights that it reads; of a collective, bytes that this rank contributes; of
    `send` and `receive`, bytes of the message."""
    primitives: Count = 0
    """MLX operations, without those of the parts within it; 0 where they were not counted."""


class StepProfile(MessagePart, frozen=True, kw_only=True):
    """How the time of one step divides between its parts, on one rank."""

    rank: Count
    step_id: Count
    began_s: Seconds
    """By the rank's monotonic clock."""
    seconds: Seconds
    """Duration of the step, which waiting makes longer than that of others."""
    kv_bytes: Count
    """Bytes of keys and values that attention reads."""
    parts: Annotated[list[PartTotal], Meta(max_length=len(PARTS))]
    """Sums of its parts."""
    spans: Annotated[bytes, Meta(max_length=SPANS_MAX * SPAN_BYTES)]
    """Every run of a part in the order of their ends (`pack_spans`); of too many the first ones."""
    bytes_per_s: Annotated[float, Meta(ge=0.0, le=1e18)] = 0.0
    """Bytes that the device reads and writes in a second, measured; 0: not measured."""

    def __post_init__(self) -> None:
        """Refuse bytes that are not a whole number of spans of known parts."""
        if len(self.spans) % SPAN_BYTES or max(self.spans[::SPAN_BYTES], default=0) >= len(PARTS):
            raise ValueError("The spans of a profile are damaged")


StepKind = Literal["prefill", "decode", "verify", "other"]
"""`prefill`: has prompt tokens, and may decode too. `verify`: decodes with drafts. `other`: only
moves and blocks."""


class RecordedStep(MessagePart, frozen=True, kw_only=True):
    """One step, with the times of each rank, by the scheduler's monotonic clock."""

    epoch: Count
    step_id: Count
    kind: StepKind
    """Kind of its work."""
    prefill_tokens: Count
    """Prompt tokens that it computed."""
    decodes: Count
    """Rows that decoded, with or without drafts."""
    drafts: Count
    """Drafts that it verified."""
    sent_at_s: Seconds
    """The plan was sent."""
    finished_at_s: Seconds | None = None
    """The receipts of all ranks agreed; None: not yet, or the epoch ended before."""
    ranks: list[Annotated[bytes, Meta(max_length=STEP_BYTES)]] = []
    """By rank: its times after `sent_at_s` (`step_times.pack`); b"": not reported."""


class MeasuredStep(MessagePart, frozen=True, kw_only=True):
    """One step that was measured part by part, with its profiles."""

    epoch: Count
    step_id: Count
    kind: StepKind
    """Kind of its work."""
    prefill_tokens: Count
    """Prompt tokens that it computed."""
    decodes: Count
    """Rows that decoded, with or without drafts."""
    profiles: list[StepProfile] = []
    """One per rank that has reported it."""


def pack_spans(spans: Iterable[Span]) -> bytes:
    """Return spans as bytes: index of the part, layer, begin and duration in microseconds.

    Begins and ends are rounded, so that what nests or follows each other still does.
    """
    packed = []
    for one in spans:
        began_us, ended_us = _us(one.began_s), _us(one.began_s + one.seconds)
        number = PARTS.index(one.part)
        packed.append(_SPAN.pack(number, one.layer, began_us, ended_us - began_us))
    return b"".join(packed)


def unpack_spans(packed: bytes) -> Iterator[Span]:
    """Yield the spans in what `pack_spans` has returned.

    Raises:
        ValueError: when the bytes are not a whole number of spans, or name an unknown part.
    """
    if len(packed) % SPAN_BYTES:
        raise ValueError(f"A span has {SPAN_BYTES} bytes")
    for part, layer, began_us, microseconds in _SPAN.iter_unpack(packed):
        if part >= len(PARTS):
            raise ValueError(f"There is no part {part}")
        yield Span(PARTS[part], layer, began_us / 1e6, microseconds / 1e6)


def _us(seconds: float) -> int:
    return max(0, min(2**32 - 1, round(seconds * 1e6)))
