"""`docker-compose.dev.yml` as data, parsed as Docker does: merges, anchors, variables."""

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
    """One service of the file."""

    name: str
    command: list[str]
    environment: dict[str, str]
    tree: dict[str, Any]
    """All keys of the service."""

    @property
    def mounts(self) -> set[str]:
        """Folders of the container that are volumes."""
        return {volume.partition(":")[2] for volume in self.tree["volumes"]}


def compose_tree() -> dict[str, Any]:
    """Return the parsed file."""
    found: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return found


def read_services(variables: Mapping[str, str]) -> dict[str, Service]:
    """Return the services, with `${NAME:?why}` replaced.

    Raises:
        KeyError: when a variable is unset.
    """
    return {
        name: Service(
            name,
            [str(word) for word in entry["command"]],
            {
                key: _substitute_variables(value, variables)
                for key, value in entry["environment"].items()
            },
            entry,
        )
        for name, entry in compose_tree()["services"].items()
    }


def _substitute_variables(text: str, variables: Mapping[str, str]) -> str:
    # Docker refuses a value that is not a string, or guesses its type.
    assert isinstance(text, str), text
    return _VARIABLE.sub(lambda found: variables[found[1]], text)
