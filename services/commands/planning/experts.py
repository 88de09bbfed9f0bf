"""Shares of routed experts by measured load. Pure.

The load of an expert is the number of tokens that were routed to it. Ranks count as equally fast.
"""

from collections.abc import Sequence

from services.commands.planning.budget import row_length
from services.commands.planning.hosts import RankMemory
from services.commands.planning.model.parts import whole_and_divided
from services.commands.planning.report import ExpertProposal
from services.commands.planning.splits import MemoryDemand, PlannedModel, rank_parts
from shared.errors import UsageError
from shared.measurements.expert_balance import balance, loads_by_rank, rank_imbalance
from shared.messages import ExpertsReported
from shared.messages.base import Sharding
from shared.model.sharding import shares
from shared.model.sharding.feasibility import expert_count, sharding_obstacle


def propose(
    model: PlannedModel,
    report: ExpertsReported,
    sharding: Sharding,
    memory: Sequence[RankMemory],
    asked: MemoryDemand,
) -> ExpertProposal:
    """Propose numbers of experts by rank that balance the measured loads, as far as memory allows.

    Args:
        model: the model.
        report: measured loads, of the same model.
        sharding: how ranks divide the model; one by experts.
        memory: memory of each rank.
        asked: the sequences that must fit. Present shares follow its `expert_shares` if there is
            one for each rank; else they follow memory.

    Raises:
        UsageError: when the loads are of another model, or its experts cannot be divided.
    """
    count, ranks = _check(model, report, sharding, len(memory))
    weights = shares.rank_weights([one.usable_bytes for one in memory], ranks)
    configured = asked.expert_shares
    present = shares.divide(count, configured if len(configured) == ranks else weights)
    loads = [one.counts for one in report.layers]
    proposed = balance(loads, present, _most(model, sharding, memory, asked, present))
    before, after = (_imbalance(loads, one) for one in (present, proposed))
    return ExpertProposal(
        ranks=ranks,
        assignments=sum(map(sum, loads)),
        present=present,
        present_imbalance=before,
        proposed=proposed,
        proposed_imbalance=after,
        sentence=_sentence(present, before, proposed, after),
    )


def _imbalance(loads: Sequence[Sequence[int]], by_rank: Sequence[int]) -> float:
    return rank_imbalance([loads_by_rank(counts, by_rank) for counts in loads])


def _check(
    model: PlannedModel, report: ExpertsReported, sharding: Sharding, ranks: int
) -> tuple[int, int]:
    """Return the number of experts of a layer, and of ranks."""
    config, layers = model.checkpoint.config, len(model.checkpoint.layers)
    count = expert_count(config)
    sizes = {len(one.counts) for one in report.layers}
    if sizes != {count} or max(one.layer for one in report.layers) >= layers:
        found = " or ".join(map(str, sorted(sizes)))
        raise UsageError(
            f"The counts of --expert-stats are of another model ({report.model}, {found} experts "
            f"per layer): this one has {count or 'no'} routed experts in each of at most {layers} "
            "layers."
        )
    if ranks < 2:
        raise UsageError("--expert-stats divides experts between ranks: give --ranks or --memory.")
    if obstacle := sharding_obstacle(config, sharding, ranks):
        raise UsageError(f"Experts cannot be divided between {ranks} ranks, because {obstacle}.")
    return count, ranks


def _most(
    model: PlannedModel,
    sharding: Sharding,
    memory: Sequence[RankMemory],
    asked: MemoryDemand,
    present: Sequence[int],
) -> list[int]:
    """Return how many experts of each layer fit on each rank, with the requested sequences."""
    count = expert_count(model.checkpoint.config)
    bytes_each = whole_and_divided(model.checkpoint, sharding)["experts"] / count
    tokens = row_length(asked.context_tokens, asked.kv_row_growth_tokens)
    most = []
    parts = rank_parts(model, sharding, memory, asked)
    for number, part in zip(present, parts, strict=True):
        spare = part.room.spare_bytes(asked.sequences, tokens)
        most.append(number + max(0, int(spare / bytes_each)))
    return most


def _sentence(present: Sequence[int], before: float, proposed: Sequence[int], after: float) -> str:
    now = "+".join(map(str, present))
    start = f"with {now} experts the busiest rank of each layer gets {before:.2f} times the mean"
    if list(proposed) == list(present):
        return f"{start}, and no other division into adjacent experts that fits is better"
    return (
        f"{start}; with {'+'.join(map(str, proposed))} it gets {after:.2f} times: set "
        f"world.expert_shares = {list(proposed)}"
    )
