"""What the canaries of all ranks have found, compared. Pure."""

from collections import Counter
from collections.abc import Sequence

from shared.messages import CanaryFinding, RankReady


def difference(reports: Sequence[RankReady]) -> str | None:
    """Return which ranks found something else than most, and what; None when all agree.

    Args:
        reports: of all ranks, in rank order.
    """
    names = [[one.name for one in report.canary] for report in reports]
    if any(other != names[0] for other in names):
        counts = ", ".join(f"rank {rank} {len(one)}" for rank, one in enumerate(names))
        return (
            f"The ranks have computed different things in the canary ({counts} findings): "
            "start the same version of Lockstep with the same settings everywhere."
        )
    columns = zip(*(report.canary for report in reports), strict=True)
    said = [sentence for column in columns if (sentence := _odd_ones(column))]
    if not said:
        return None
    more = f" (and {len(said) - 1} more)" if len(said) > 1 else ""
    return f"The canary differs: {said[0]}{more}."


def _odd_ones(findings: Sequence[CanaryFinding]) -> str:
    """Return who differs in one finding; "" when nobody does."""
    digests = [finding.digest for finding in findings]
    ((common, most), *others) = Counter(digests).most_common()
    if not others:
        return ""
    name = findings[0].name
    if 2 * most > len(digests):
        odd = [rank for rank, digest in enumerate(digests) if digest != common]
        return f"{_ranks(odd)} got another result than most for the {name}"
    each = ", ".join(f"rank {rank} {digest.hex()[:8]}" for rank, digest in enumerate(digests))
    return f"no result of the {name} has a majority ({each})"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
