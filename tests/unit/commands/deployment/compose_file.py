"""`docker-compose.dev.yml` as data, read as Docker would: merges, anchors, variables."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[4]
FILE = ROOT / "docker-compose.dev.yml"
_VARIABLE = re.compile(r"\$\{(\w+):\?([^}]*)\}")


@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    """One service."""

    name: str
    command: list[str]
    environment: dict[str, str]
    tree: dict[str, Any]
    """Everything that stands there."""

    @property
    def mounts(self) -> set[str]:
        """Folders of the container that are volumes."""
        return {volume.partition(":")[2] for volume in self.tree["volumes"]}


def tree() -> dict[str, Any]:
    """Return the file."""
    found: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return found


def services(variables: Mapping[str, str]) -> dict[str, Service]:
    """Return the services, with `${NAME:?why}` replaced. Raises KeyError for one that is unset."""
    return {
        name: Service(
            name,
            [str(word) for word in entry["command"]],
            {key: _filled(value, variables) for key, value in entry["environment"].items()},
            entry,
        )
        for name, entry in tree()["services"].items()
    }


def _filled(text: str, variables: Mapping[str, str]) -> str:
    # Docker refuses what is no string here, or guesses.
    assert isinstance(text, str), text
    return _VARIABLE.sub(lambda found: variables[found[1]], text)
