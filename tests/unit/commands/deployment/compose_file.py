"""`docker-compose.dev.yml` as data, parsed as Docker does: merges, anchors, variables."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml

ROOT = Path(__file__).resolve().parents[4]
FILE = ROOT / "docker-compose.dev.yml"
SCHEMA = Path(__file__).with_name("compose_spec.json")
"""The compose specification's JSON schema, as docker-compose 1.29.2 has it (Apache License 2.0)."""
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


def find_schema_errors(tree: dict[str, Any]) -> list[str]:
    """Return what the compose specification's schema finds wrong in a parsed file."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    # Names no version of JSON schema that a validator knows.
    del schema["$schema"]
    validator = jsonschema_rs.Draft7Validator(schema)
    return [f"{list(one.instance_path)}: {one.message}" for one in validator.iter_errors(tree)]


def has_docker_compose() -> bool:
    """Tell whether Docker with its plugin "compose" is installed."""
    docker = shutil.which("docker")
    if docker is None:
        return False
    done = subprocess.run([docker, "compose", "version"], check=False, capture_output=True)
    return done.returncode == 0


def run_docker_compose_config(
    variables: Mapping[str, str],
) -> "subprocess.CompletedProcess[str]":
    """Return the result of Docker's own check of the file."""
    return subprocess.run(
        ["docker", "compose", "--file", str(FILE), "config", "--quiet"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60.0,
        env={**os.environ, **variables},
    )


def _substitute_variables(text: str, variables: Mapping[str, str]) -> str:
    # Docker refuses a value that is not a string, or guesses its type.
    assert isinstance(text, str), text
    return _VARIABLE.sub(lambda found: variables[found[1]], text)
