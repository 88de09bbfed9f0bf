"""An examination as text for people. Pure."""

from collections import Counter
from collections.abc import Sequence

from services.commands.doctor.facts import Examination
from services.commands.doctor.findings import SEVERITY, Finding


def render(examination: Examination) -> str:
    """Return one block per host, one for what concerns several, and a last line that sums up."""
    lines: list[str] = []
    for report in examination.hosts:
        facts = report.facts
        versions = ", ".join(f"{k} {v}" for k, v in facts.versions.items() if v)
        lines += [f"{facts.host}: {facts.platform} {facts.system}", f"  {versions}"]
        lines += [*_findings(report.findings), ""]
    if examination.findings:
        lines += ["all hosts", *_findings(examination.findings), ""]
    counts = Counter(one.verdict for one in all_findings(examination))
    lines.append(", ".join(f"{counts[verdict]} {verdict}" for verdict in SEVERITY))
    return "\n".join(lines)


def all_findings(examination: Examination) -> list[Finding]:
    """Return the findings of all hosts and about them together."""
    of_hosts = [one for report in examination.hosts for one in report.findings]
    return [*of_hosts, *examination.findings]


def _findings(findings: Sequence[Finding]) -> list[str]:
    lines = []
    for one in sorted(findings, key=lambda one: -SEVERITY[one.verdict]):
        lines.append(f"  {one.verdict:<12}  {one.check}: {one.cause}")
        if one.remedy:
            lines.append(f"  {'':<12}    -> {one.remedy}")
    return lines
