"""Types of the response bodies of /v1/models."""

from typing import Literal

from msgspec import Struct

from shared.messages.gateway_link import DraftMethod


class MethodStatistics(Struct, forbid_unknown_fields=True):
    """Drafts of one method since the scheduler's start. A row is a sequence in a step."""

    method: DraftMethod
    """The drafting method."""
    rows: int
    """Rows in which its drafts were verified."""
    proposed: int
    """Drafts that were verified."""
    accepted: int
    """Drafts that were accepted."""
    accepted_per_row: float
    """Mean number of accepted drafts of a row."""
    accepted_by_position: list[int]
    """Accepted drafts by position in their row, from 0."""


class ModelInfo(Struct, forbid_unknown_fields=True):
    """Name and limits of the served model."""

    id: str
    """Name for the field `model` of requests."""
    object: Literal["model"]
    """Always `model`."""
    created: int
    """Time of the gateway's start in seconds since 1970."""
    owned_by: Literal["lockstep"]
    """Always `lockstep`."""
    max_model_len: int | None
    """Longest prompt plus completion in tokens; null if it is not known yet."""
    tool_format: str
    """Format in which the model writes tool calls; `off`: it cannot call tools."""
    reasoning_format: str
    """Format in which the model writes its reasoning; `off`: reasoning is part of the answer."""
    speculation: list[MethodStatistics]
    """One entry per method whose drafts were verified."""


class ModelList(Struct, forbid_unknown_fields=True):
    """The list of served models, which has one entry."""

    object: Literal["list"]
    """Always `list`."""
    data: list[ModelInfo]
    """The served model."""
