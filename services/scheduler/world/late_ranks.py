"""Ranks that miss a deadline. Owns the sentences that name them and where they are. Pure."""

from collections.abc import Sequence

from services.scheduler.world.members import RankProcess
from shared.configuration.settings import SchedulerConfig
from shared.messages.rank_link import Backend


def explain_lateness(
    ranks: Sequence[RankProcess], age_s: float, backend: Backend, settings: SchedulerConfig
) -> str | None:
    """Return a sentence with the remedy if ranks have not joined or loaded in time, else None.

    Args:
        ranks: all ranks of an epoch that is not ready, in rank order.
        age_s: seconds since they were ordered to join.
        backend: the epoch's backend for collectives.
        settings: the deadlines.
    """
    joining = [one for one in ranks if one.state == "joining"]
    if joining and age_s > settings.init_deadline_s:
        return _explain_late_joining(joining, backend, settings.init_deadline_s)
    if age_s > settings.init_deadline_s + settings.load_deadline_s:
        late = [one for one in ranks if one.state != "ready"]
        return (
            f"The ranks have not loaded within {settings.load_deadline_s:.0f} s "
            f"(scheduler.load_deadline_s): {_names(late)} loading or warming up. Raise "
            "scheduler.load_deadline_s, or use a faster disk."
        )
    return None


def _explain_late_joining(
    joining: Sequence[RankProcess], backend: Backend, deadline_s: float
) -> str:
    inside = [one for one in joining if one.is_in_init]
    before = [one for one in joining if not one.is_in_init]
    parts = []
    if inside:
        parts.append(f"{_names(inside)} inside MLX's init of {backend}")
    if before:
        parts.append(f"{_names(before)} on the way to MLX's init of {backend}")
    return (
        f"The ranks have not joined within {deadline_s:.0f} s (scheduler.init_deadline_s): "
        f"{', '.join(parts)}. `lockstep doctor` checks the links between them; raise "
        "scheduler.init_deadline_s if joining takes longer here."
    )


def explain_place(member: RankProcess, backend: Backend) -> str:
    """Return where a rank is in joining, as a clause with a space before; "" once it has joined."""
    if member.state != "joining":
        return ""
    if member.is_in_init:
        return f" inside MLX's init of {backend}"
    return f" on its way to MLX's init of {backend}"


def _names(members: Sequence[RankProcess]) -> str:
    """Return "rank 0 on mac1 is", or "rank 0 on mac1 and rank 1 on mac2 are"."""
    names = [member.describe() for member in members]
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"
