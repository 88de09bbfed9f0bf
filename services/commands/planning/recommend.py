"""Choice of split, ranks, `kv_bits` and context for a request. Pure.

All hosts are used if possible. Whole experts come before matrices (one collective a layer less; on
H200s as fast for up to 32 sequences and slower for 128, as measured), both at once after them (as
fast as matrices; 7 % slower on four ranks with 128 sequences), layers only if nothing else fits,
fewer bits for KV only if full KV does not fit, and a shorter context last.
"""

import dataclasses
from collections.abc import Sequence

from services.commands.planning.budget import row_length
from services.commands.planning.hosts import RankMemory
from services.commands.planning.report import Recommendation, SequenceFit, SplitOption
from services.commands.planning.splits import (
    MemoryDemand,
    PlannedModel,
    all_splits,
    rank_parts,
    richest,
)

KV_BITS = (0, 8, 4)
"""Possible bits per number of stored KV (0: not quantized), the preferred first."""

_PREFERENCE = {"none": 0, "expert": 0, "tensor": 1, "tensor+expert": 2, "pipeline": 3}
_CONTEXT_MIN = 1_024
"""A split with a shorter context is never recommended."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenSplit:
    """Split that is recommended, with its ranks, bits of KV and length."""

    option: SplitOption
    memory: Sequence[RankMemory]
    """Memory of the ranks that it uses."""
    kv_bits: int
    """Bits per number of stored KV, 4 or 8; 0: not quantized."""
    context_tokens: int
    """Length of sequences that fits: the requested one or, if that does not fit, a shorter one."""


def choose(
    model: PlannedModel, memory: Sequence[RankMemory], asked: MemoryDemand
) -> ChosenSplit | None:
    """Choose the best split for the requested sequences.

    Unquantized KV comes before quantized KV, then a split within layers on more ranks before one
    on fewer, then whole experts, matrices, both; a pipeline of layers comes last.

    Args:
        model: the model.
        memory: memory of each rank that may be used.
        asked: number and length of the sequences that must fit, and `kv_bits` (0: try all).

    Returns:
        The best split that holds all of them; without one, the split with the longest single
        sequence; None: no split has room for the weights and 1,024 tokens.
    """
    bits = _bits(model, asked)
    tables = {
        one: all_splits(model, memory, dataclasses.replace(asked, kv_bits=one)) for one in bits
    }
    for one in bits:
        fitting = [option for option in tables[one] if option.fits]
        if fitting:
            best = min(fitting, key=_rank_of)
            return ChosenSplit(best, richest(memory, best.ranks), one, asked.context_tokens)
    # The request does not fit: choose the split with the longest single sequence.
    shorter = [
        ChosenSplit(
            option,
            richest(memory, option.ranks),
            one,
            min(option.context_tokens, asked.context_tokens),
        )
        for one in bits
        for option in tables[one]
        if option.context_tokens >= _CONTEXT_MIN
    ]
    return max(shorter, key=_worth, default=None)


def recommendation(
    model: PlannedModel,
    choice: ChosenSplit,
    asked: MemoryDemand,
    *,
    path: str,
    context_max: int,
    has_hosts: bool = False,
) -> Recommendation:
    """Return the flags and settings with which `lockstep up` runs the chosen split.

    Args:
        model: the model.
        choice: from `choose`.
        asked: the requested sequences.
        path: folder or Hugging Face id of the model.
        context_max: longest context that the model allows, in tokens.
        has_hosts: whether ranks run on hosts of an inventory, so that flags do not suffice.
    """
    option = choice.option
    flags: list[str] = []
    settings: dict[str, int | str | list[int]] = {}
    if has_hosts:
        settings = {"model.path": path, "world.size": option.ranks}
        if option.ranks > 1:
            settings["world.sharding"] = option.sharding
        if option.sharding == "pipeline":
            settings["world.enable_pipeline"] = True
    else:
        flags = ["--model", path, "--ranks", str(option.ranks)]
        if option.ranks > 1:
            flags += ["--distributed-sharding", option.sharding]
        if option.sharding == "pipeline":
            flags.append("--enable-pipeline-distributed")
    if choice.kv_bits:
        settings["rank_worker.kv_bits"] = choice.kv_bits
    if option.context_tokens < context_max:
        # Otherwise clients are told of a length that does not fit into any row.
        settings["model.context_tokens_max"] = option.context_tokens
    return Recommendation(
        ranks=option.ranks,
        sharding=option.sharding,
        kv_bits=choice.kv_bits,
        context_tokens=choice.context_tokens,
        sequences=_sequences(model, choice, asked, choice.context_tokens, choice.kv_bits),
        hosts=[one.host for one in choice.memory],
        flags=flags,
        settings=settings,
    )


def sequence_fits(
    model: PlannedModel, choice: ChosenSplit, asked: MemoryDemand, context_max: int
) -> list[SequenceFit]:
    """Return how many sequences of each of several lengths fit at once under the chosen split.

    Args:
        model: the model.
        choice: from `choose`.
        asked: its `kv_bits` (0: every possible value) are counted too, besides those of `choice`;
            its number and length of sequences are not used.
        context_max: longest context that the model allows, in tokens.

    Returns:
        One element per length: up to seven powers of 2 below `context_max`, then `context_max`.
    """
    lengths = [length for length in (2**power for power in range(10, 24)) if length < context_max]
    bits = dict.fromkeys((choice.kv_bits, *_bits(model, asked)))
    return [
        SequenceFit(
            context_tokens=length,
            sequences={str(one): _sequences(model, choice, asked, length, one) for one in bits},
        )
        for length in [*lengths[-7:], context_max]
    ]


def _sequences(
    model: PlannedModel, choice: ChosenSplit, asked: MemoryDemand, tokens: int, bits: int
) -> int:
    wanted = dataclasses.replace(asked, kv_bits=bits)
    parts = rank_parts(model, choice.option.sharding, choice.memory, wanted)
    length = row_length(tokens, asked.kv_row_growth_tokens)
    return min(part.room.sequences(length) for part in parts)


def _bits(model: PlannedModel, asked: MemoryDemand) -> Sequence[int]:
    """Return the kv_bits to try: the configured one, else full KV, then fewer if possible."""
    if asked.kv_bits:
        return (asked.kv_bits,)
    return KV_BITS if model.kv.quantizable() else (0,)


def _rank_of(option: SplitOption) -> tuple[int, int]:
    """Return the sort key of splits that fit; the smallest is best."""
    is_pipeline = option.sharding == "pipeline"
    return (1000 if is_pipeline else -option.ranks, _PREFERENCE[option.sharding])


def _worth(choice: ChosenSplit) -> tuple[int, ...]:
    """Return the sort key of splits that do not fit: longest context, then fewest changes."""
    ranks, kind = _rank_of(choice.option)
    return choice.context_tokens, -KV_BITS.index(choice.kv_bits), -ranks, -kind
