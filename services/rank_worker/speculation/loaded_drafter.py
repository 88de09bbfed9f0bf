"""A loaded draft model or EAGLE head, and the `RankProposer` that runs it."""

import dataclasses
from typing import Literal

from mlx import nn

from services.rank_worker.kv_cache.rows.interface import KVStore
from services.rank_worker.model.forward import Forward
from services.rank_worker.sampling.sampler import Sampler, SynchronizeIds
from services.rank_worker.speculation.draft_model import DraftModelProposer
from services.rank_worker.speculation.eagle import EagleProposer
from services.rank_worker.speculation.eagle_head import EagleHead
from services.rank_worker.speculation.proposer import RankProposer
from shared.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A draft model or EAGLE head with its weights in memory."""

    method: Literal["draft_model", "eagle"]
    model: nn.Module
    """An `EagleHead` for the method `eagle`."""
    fingerprint: str = ""
    """Digest of the drafter's files, which must be equal on all ranks."""


def open_proposer(
    drafter: LoadedDrafter | None,
    forward: Forward,
    store: KVStore,
    sampler: Sampler,
    synchronize: SynchronizeIds,
) -> RankProposer:
    """Return the `RankProposer` that runs a drafter; nothing is computed.

    Args:
        drafter: None: the ranks propose no drafts.
        forward: the model that verifies the drafts.
        store: the rows of that model.
        sampler: samples the drafts, and the tokens that they are compared with.
        synchronize: makes ids equal on all ranks.

    Raises:
        ConfigError: rejected drafts cannot be removed from the rows of the model or the draft
            model, or the EAGLE head does not fit the model.
    """
    if drafter is None:
        return RankProposer()
    if not store.can_roll_back:
        raise ConfigError(
            f'speculation.method is "{drafter.method}", but this model keeps state that cannot '
            'be rolled back when drafts are rejected: set it to "off".'
        )
    if isinstance(drafter.model, EagleHead):
        return EagleProposer(drafter.model, forward, sampler, synchronize)
    return DraftModelProposer(drafter.model, sampler, synchronize)
