"""What proposes drafts, as it is loaded, and how it becomes a proposer."""

import dataclasses
from typing import Literal

from mlx import nn

from services.rank_worker.kv_cache.rows import KVStore
from services.rank_worker.model.forward import Forward
from services.rank_worker.sampling import Sampler
from services.rank_worker.speculation.draft_model import DraftModel
from services.rank_worker.speculation.eagle import Eagle
from services.rank_worker.speculation.eagle_head import EagleHead
from services.rank_worker.speculation.proposer import RankProposer, Share
from shared.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A draft model, or a head, in memory."""

    method: Literal["draft_model", "eagle"]
    model: nn.Module
    """An `EagleHead` for that method."""
    fingerprint: str = ""


def open_proposer(
    draft: LoadedDrafter | None, forward: Forward, store: KVStore, sampler: Sampler, share: Share
) -> RankProposer:
    """Return what proposes drafts; nothing is computed.

    Args:
        draft: None: nothing does.
        forward: the model whose tokens are guessed.
        store: its rows.
        sampler: draws its tokens.
        share: makes ids equal on all ranks.

    Raises:
        ConfigError: the model or the draft cannot do this, or they do not fit.
    """
    if draft is None:
        return RankProposer()
    if not store.can_roll_back:
        raise ConfigError(
            f'speculation.method is "{draft.method}", but this model keeps state that cannot be '
            'cut back when drafts are rejected: set it to "off".'
        )
    if isinstance(draft.model, EagleHead):
        return Eagle(draft.model, forward, sampler, share)
    return DraftModel(draft.model, sampler, share)
