"""Grafana's dashboard and Prometheus' alert rules in `deploy` name only metrics that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy" / "grafana-dashboard.json"
ALERTS = ROOT / "deploy" / "prometheus-alerts.yml"
_SUFFIXES = ("_bucket", "_count", "_sum", "")


def _metrics() -> dict[str, set[str]]:
    """Return the labels of each metric in the reference."""
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| \w+ \| ([\w, ]*) \|", page, re.MULTILINE)
    return {name: {one.strip() for one in labels.split(",") if one} for name, labels in rows}


def _expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    shown = [target["expr"] for panel in panels for target in panel["targets"]]
    groups: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return shown + [rule["expr"] for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("expression", _expressions())
def test_expression_names_only_metrics_that_the_gateway_exposes(expression: str) -> None:
    """A panel without data, and an alert that never fires, would not be noticed."""
    metrics = _metrics()
    names = set(re.findall(r"lockstep_\w+", expression))
    assert names
    for name in names:
        bases = {name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)}
        assert bases & metrics.keys(), name
    assert expression.count("(") == expression.count(")")


@pytest.mark.parametrize("expression", _expressions())
def test_expression_groups_only_by_labels_of_its_metrics(expression: str) -> None:
    """A label that does not exist would join all series."""
    metrics = _metrics()
    labels = {"le"}
    for name in re.findall(r"lockstep_\w+", expression):
        for suffix in _SUFFIXES:
            labels |= metrics.get(name.removesuffix(suffix), set())
    for grouped in re.findall(r"\bby \(([\w, ]+)\)", expression):
        assert {one.strip() for one in grouped.split(",")} <= labels


def test_panels_of_dashboard_do_not_overlap_and_have_titles() -> None:
    """Grafana would move panels that overlap."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["title"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_alert_rules_say_what_to_do_and_are_accepted_by_promtool() -> None:
    """Each rule has a sentence and a remedy; where Prometheus' own tool is installed, it agrees."""
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    for rule in rules:
        assert rule["annotations"]["summary"].endswith((".", ")."))
        assert rule["annotations"]["description"].endswith(".")
        assert rule["labels"]["severity"] in ("warning", "critical")
    assert len({rule["alert"] for rule in rules}) == len(rules)
    if (promtool := shutil.which("promtool")) is not None:
        subprocess.run([promtool, "check", "rules", str(ALERTS)], check=True)
