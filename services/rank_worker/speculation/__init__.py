"""Verifying drafts: what they are, which forwards they share, what a row waits for."""

from services.rank_worker.speculation.drafts import Drafts
from services.rank_worker.speculation.groups import FORWARD_TOKENS, forward_tokens_of, group_rows
from services.rank_worker.speculation.verify import Verifying, count_accepted

__all__ = [
    "FORWARD_TOKENS",
    "Drafts",
    "Verifying",
    "count_accepted",
    "forward_tokens_of",
    "group_rows",
]
