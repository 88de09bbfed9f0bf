"""Verifying drafts: which forwards they share, what is accepted, what a row waits for."""

from services.rank_worker.speculation.groups import FORWARD_TOKENS, forward_tokens_of, group_rows
from services.rank_worker.speculation.verify import Verifying, count_accepted

__all__ = ["FORWARD_TOKENS", "Verifying", "count_accepted", "forward_tokens_of", "group_rows"]
