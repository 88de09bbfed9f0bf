"""The methods that propose drafts, and what a model and its ranks must support for them. Pure."""

from collections.abc import Sequence
from typing import Literal, TypeGuard

from shared.configuration.settings import SpeculationConfig
from shared.errors import ConfigError
from shared.messages import RankReady

Method = Literal["ngram", "draft_model", "eagle"]
Model = Literal["draft_model", "eagle"]
"""Methods whose drafts the ranks propose, in the step that verifies them."""

WHY_NOT = "sliding windows, recurrent state, or a family that cannot verify several tokens at once"
"""Why the KV rows of a model cannot be rolled back."""


def is_model(method: str) -> TypeGuard[Model]:
    """Tell whether the ranks propose the drafts of this method: a draft model or an EAGLE head."""
    return method in ("draft_model", "eagle")


def check_roll_back(config: SpeculationConfig, reports: Sequence[RankReady]) -> bool:
    """Compare speculation settings with the ranks; return whether rows can be rolled back.

    Drafts can be verified only if every rank can take rejected ones out of its rows again.

    Args:
        config: the scheduler's settings.
        reports: of all ranks, in rank order.

    Raises:
        ConfigError: when the model cannot roll back but drafts are configured, or when a rank is
            configured for another method.
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
