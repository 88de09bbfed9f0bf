"""What a world must have for drafts: rows that can be cut back, and one way to propose. Pure."""

from collections.abc import Sequence

from shared.configuration.settings import SpeculationConfig
from shared.errors import ConfigError
from shared.messages import RankReady

WHY_NOT = "sliding windows, recurrent state, or a family that cannot verify several tokens at once"
"""What keeps a model's rows from being cut back."""


def can_roll_back(config: SpeculationConfig, reports: Sequence[RankReady]) -> bool:
    """Tell whether rows can be cut back, so that drafts can be verified.

    Args:
        config: what the server is set up for.
        reports: of all ranks, in rank order.

    Raises:
        ConfigError: drafts are asked for in vain, or a rank is set up for others.
    """
    possible = all(report.can_roll_back for report in reports)
    if config.method != "off" and not possible:
        raise ConfigError(
            f"speculation.method is {config.method}, but this model cannot roll back ({WHY_NOT}): "
            "set it to off."
        )
    others = [report for report in reports if report.draft_method != config.method]
    if others:
        raise ConfigError(
            f'speculation.method is "{config.method}" for the scheduler and '
            f'"{others[0].draft_method}" on rank {others[0].rank}: give the scheduler and all '
            "ranks the same [speculation] section."
        )
    return possible
