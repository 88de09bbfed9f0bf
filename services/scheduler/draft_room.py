"""What a world must have for drafts: rows that can be cut back, and room for draft rows. Pure."""

import dataclasses
from collections.abc import Sequence

from services.scheduler.rows import RowBudget
from services.scheduler.speculation.method import is_model
from shared.errors import ConfigError
from shared.messages import RankReady
from shared.settings import SpeculationConfig


def can_roll_back(config: SpeculationConfig, reports: Sequence[RankReady]) -> bool:
    """Tell whether rows can be cut back, so that drafts can be verified.

    Args:
        config: what the server is set up for.
        reports: of all ranks, in rank order.

    Raises:
        ConfigError: drafts are asked for in vain.
    """
    possible = all(report.can_roll_back for report in reports)
    if config.method != "off" and not possible:
        raise ConfigError(
            f"speculation.method is {config.method}, but this model's state cannot be rolled back "
            "(sliding windows or recurrent state): set it to off."
        )
    without = [report.rank for report in reports if not report.draft_bytes_per_token]
    if is_model(config.method) and without:
        raise ConfigError(
            f"speculation.method is {config.method}, but rank {without[0]} has loaded nothing that "
            "proposes drafts: start every rank with the scheduler's [speculation] section."
        )
    return possible


def with_drafts(budget: RowBudget, reports: Sequence[RankReady]) -> RowBudget:
    """Return a budget whose rows count what drafts take, such that they fit on every rank.

    Args:
        budget: of rows without drafts.
        reports: of all ranks, in rank order.
    """
    draft_bytes = max(report.draft_bytes_per_token for report in reports)
    if not draft_bytes:
        return budget
    whole = dataclasses.replace(budget, draft_bytes_per_token=draft_bytes)
    # Drafts take as much on every rank, the model's own tokens need not: the rank with the least
    # room for both is not always the one with the least room for tokens.
    tokens = min(
        report.kv_budget_bytes // (report.kv_bytes_per_token + report.draft_bytes_per_token)
        for report in reports
        if report.draft_bytes_per_token
    )
    fitting = min(budget.bytes_max, tokens * whole.row_bytes_per_token)
    return dataclasses.replace(whole, bytes_max=fitting)
