"""What the canaries of all ranks have found, compared. Pure."""

from collections import Counter
from collections.abc import Sequence

from shared.messages import CanaryFinding, RankReady


def mismatch(reports: Sequence[RankReady], hosts: Sequence[str]) -> str | None:
    """Return what ranks were started with that differs, with the remedy; None: nothing is known.

    Args:
        reports: of the ranks that have loaded, in rank order.
        hosts: their machines.
    """
    if len({report.model_fingerprint for report in reports}) > 1:
        who = _each(reports, hosts, [report.model_fingerprint[:8] for report in reports])
        return (
            f"The ranks have loaded different models ({who}): give model.path, model.dtype and "
            "speculation.draft_model the same files everywhere."
        )
    names = [[one.name for one in report.canary] for report in reports]
    if any(other != names[0] for other in names):
        who = _each(reports, hosts, [f"{len(one)} findings" for one in names])
        return (
            f"The ranks have computed different things in the canary ({who}): start the same "
            "version of Lockstep with the same settings everywhere."
        )
    return None


def difference(reports: Sequence[RankReady]) -> str | None:
    """Return which ranks found something else than most, and what; None when all agree.

    Args:
        reports: of all ranks, in rank order, that have computed the same things (`mismatch`).
    """
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


def _each(reports: Sequence[RankReady], hosts: Sequence[str], words: Sequence[str]) -> str:
    columns = zip(reports, hosts, words, strict=True)
    return ", ".join(f"rank {one.rank} on {host} {word}" for one, host, word in columns)
