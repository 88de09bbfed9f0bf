"""Base class, value types and common parts of all messages."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared import limits

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A token id, int32 on the device."""

Seconds = Annotated[float, Meta(ge=0.0, le=limits.SECONDS_MAX)]
Milliseconds = Annotated[float, Meta(ge=0.0, le=1e12)]
Count = Annotated[int, Meta(ge=0, le=limits.COUNT_MAX)]
ShortText = Annotated[str, Meta(max_length=4_096)]
RequestName = Annotated[str, Meta(min_length=1, max_length=limits.REQUEST_ID_CHARS_MAX)]
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
BlockHash = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""Identifies a block or checkpoint: keyed hash of namespace, salt and all tokens up to its end."""
Namespace = Annotated[str, Meta(max_length=64, pattern=r"\A[0-9a-f]*\Z")]
"""Identifies compatible blocks, in hexadecimal digits: one model with one split and KV layout."""
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Sharding = Literal["none", "tensor", "expert", "tensor+expert", "pipeline"]
"""How ranks divide a model."""


class MessagePart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Base of the values in a message. Subclasses repeat `kw_only`, which msgspec does not inherit.

    They repeat `frozen` for type checkers.
    """


class Message(MessagePart, frozen=True, kw_only=True, tag=True):
    """Base of every message. The tag on the wire is the name of the class."""


class TokenLogprobs(MessagePart, frozen=True, kw_only=True):
    """Natural-log probabilities at one position, before temperature, top_k, top_p and min_p."""

    logprob: float
    """Log probability of the chosen token."""
    top_ids: list[TokenId] = []
    """Most likely token ids, likeliest first, as many as requested."""
    top_logprobs: list[float] = []
    """Log probabilities of `top_ids`, in the same order."""


class Sampling(MessagePart, frozen=True, kw_only=True):
    """Parameters for sampling the next token.

    Applied in this order: bias and penalties, temperature, top_k, top_p, min_p, random choice.
    """

    seed: Seed
    """From the client, or chosen by the gateway. The random choice depends on it and on the
    position only."""
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    """0 is greedy: the token with the highest logit after bias and penalties."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """0: off."""
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or completion."""
    presence_penalty: Annotated[float, Meta(ge=-100.0, le=100.0)] = 0.0
    """Subtracted from the logits of tokens in the completion."""
    frequency_penalty: Annotated[float, Meta(ge=-100.0, le=100.0)] = 0.0
    """Subtracted from a token's logit once per occurrence in the completion."""
    logit_bias: Annotated[
        list[tuple[TokenId, Annotated[float, Meta(ge=-1e9, le=1e9)]]],
        Meta(max_length=limits.LOGIT_BIAS_MAX),
    ] = []
    """(token id, addend) pairs, each id at most once."""
    top_logprobs: Annotated[int, Meta(ge=0, le=limits.TOP_LOGPROBS_MAX)] | None = None
    """None: no log probabilities. 0: the chosen token's. n: also those of the n most likely
    tokens."""


class Grammar(MessagePart, frozen=True, kw_only=True):
    """A grammar that a completion must match. Each rank compiles it once, for its own draws."""

    text: Annotated[str, Meta(min_length=1, max_length=limits.GRAMMAR_CHARS_MAX)]
    """In the form that llguidance reads: its JSON, or Lark."""
    end_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=limits.STOP_IDS_MAX)]
    """Token ids that end the completion. They are allowed only where the grammar accepts."""
    begin_ids: Annotated[list[TokenId], Meta(max_length=limits.STOP_IDS_MAX)] = []
    """The grammar holds from the token after the first of these ids on, such as the end of the
    reasoning. []: from the first token on."""
    barred_ids: Annotated[list[TokenId], Meta(max_length=limits.STOP_IDS_MAX)] = []
    """Token ids that are not allowed before the grammar holds, such as the openings of calls; nor
    are `end_ids`."""


class GrammarFailure(MessagePart, frozen=True, kw_only=True):
    """Why a grammar cannot be matched any further, so that its request must end."""

    sequence_id: Count
    detail: ShortText
    """One sentence."""


class CanaryFinding(MessagePart, frozen=True, kw_only=True):
    """Result of one computation of the canary, which all ranks run before they are ready."""

    name: ShortText
    """The computation, for example "sum of 4 KiB"; the same on all ranks, in the same order."""
    digest: Digest
    """Digest of the result's bytes. The world starts only if it is equal on all ranks."""
    bytes: Count
    """Bytes that each rank contributes."""
    microseconds: Annotated[float, Meta(ge=0.0)]
    """Median duration on this rank."""
