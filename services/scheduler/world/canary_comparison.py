"""Comparison of rank reports. Owns finding mismatched configurations and canary results. Pure."""

from collections import Counter
from collections.abc import Sequence

from shared.messages import CanaryFinding, RankReady


def explain_mismatch(reports: Sequence[RankReady], hosts: Sequence[str]) -> str | None:
    """Compare the ranks' models and canary computations by fingerprint and by name.

    Args:
        reports: of the ranks that have loaded, in rank order.
        hosts: their machines, in the same order.

    Returns:
        A sentence on which ranks differ, with the remedy; None if all have the same.
    """
    if len({report.model_fingerprint for report in reports}) > 1:
        ranks = _describe_ranks(reports, hosts, [one.model_fingerprint[:8] for one in reports])
        return (
            f"The ranks have loaded different models ({ranks}): give model.path, model.dtype and "
            "speculation.draft_model the same files everywhere."
        )
    names = [[one.name for one in report.canary] for report in reports]
    if any(other != names[0] for other in names):
        ranks = _describe_ranks(reports, hosts, [f"{len(one)} findings" for one in names])
        return (
            f"The ranks have run different canary computations ({ranks}): start the same "
            "version of Lockstep with the same settings everywhere."
        )
    return None


def explain_difference(reports: Sequence[RankReady]) -> str | None:
    """Compare the digests of the ranks' canary results; explain who differs from the majority.

    Args:
        reports: of all ranks, in rank order; `explain_mismatch` has found nothing.

    Returns:
        A sentence about the first canary result that differs; None if all ranks agree.
    """
    columns = zip(*(report.canary for report in reports), strict=True)
    differences = [text for column in columns if (text := _explain_finding(column))]
    if not differences:
        return None
    more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
    return f"The canary differs: {differences[0]}{more}."


def _explain_finding(findings: Sequence[CanaryFinding]) -> str:
    """Return which ranks differ in one finding; "" if none does."""
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


def _describe_ranks(
    reports: Sequence[RankReady], hosts: Sequence[str], values: Sequence[str]
) -> str:
    columns = zip(reports, hosts, values, strict=True)
    return ", ".join(f"rank {one.rank} on {host} {value}" for one, host, value in columns)
