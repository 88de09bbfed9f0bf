"""Counts of assignments to experts: a pair of a token and an expert that it is routed to is one."""

from typing import Annotated

from msgspec import Meta

from shared import limits
from shared.messages.base import Count, Message, MessagePart, Sharding, ShortText

LayerNumber = Annotated[int, Meta(ge=0, lt=limits.LAYERS_MAX)]
ExpertNumber = Annotated[int, Meta(ge=0, lt=limits.EXPERTS_MAX)]
ExpertTotal = Annotated[int, Meta(ge=1, le=limits.EXPERTS_MAX)]
ReportedCount = Annotated[int, Meta(ge=0, le=2**40)]


class LayerAssignments(MessagePart, frozen=True, kw_only=True):
    """New assignments to the experts of one layer that a rank holds."""

    layer: LayerNumber
    """Number of the model's layer."""
    experts: ExpertTotal
    """Number of experts in the layer, on all ranks together."""
    first: ExpertNumber
    """The first expert that is counted; the others follow it without gaps."""
    counts: Annotated[list[ReportedCount], Meta(max_length=limits.EXPERTS_MAX)]
    """Assignments to each expert since the rank's last report."""

    def __post_init__(self) -> None:
        """Refuse counts of experts that the layer does not have."""
        if self.first + len(self.counts) > self.experts:
            raise ValueError(f"A layer of {self.experts} experts has no further ones")


class ExpertRange(MessagePart, frozen=True, kw_only=True):
    """Adjacent experts of one layer that a rank holds, whole or a part of each matrix."""

    rank: Count
    """The rank that holds them."""
    first: ExpertNumber
    """The first expert."""
    count: ExpertTotal
    """How many they are."""


class ExpertLayer(MessagePart, frozen=True, kw_only=True):
    """One layer of routed experts: how often each was used, and which ranks hold it."""

    layer: LayerNumber
    """Number of the model's layer."""
    counts: Annotated[list[Count], Meta(min_length=1, max_length=limits.EXPERTS_MAX)]
    """Assignments to each expert since the scheduler's start, by number of the expert."""
    ranges: Annotated[list[ExpertRange], Meta(max_length=limits.RANKS_MAX)]
    """By rank, as far as ranks of this epoch have reported."""


class QueryExperts(Message, frozen=True, kw_only=True):
    """Query of the assignments to all routed experts."""


class ExpertsReported(Message, frozen=True, kw_only=True):
    """Answer to QueryExperts: the whole table since the scheduler's start."""

    model: ShortText
    """The model's name in the API."""
    model_fingerprint: ShortText
    """Of the ranks of this epoch; "" before they are ready."""
    sharding: Sharding
    """How the model is split."""
    world_size: Count
    """Number of ranks."""
    layers: Annotated[list[ExpertLayer], Meta(max_length=limits.LAYERS_MAX)]
    """Layers of routed experts, in their order; empty without any, or before the first report."""
