"""The jobs that keep one host's processes running: one per role, or one for all of them. Pure."""

import dataclasses
import math
from collections.abc import Iterable, Mapping

from services.commands.deployment.place import Place
from services.supervisor.children import process_group
from shared.configuration.host_share import HostShare
from shared.errors import UsageError

END_S = 15.0
"""What a role needs to end beyond the time in which it drains."""

FILES_MAX = 65_536
"""Open files: a gateway has one per client, and macOS begins with 256."""

ALL = "lockstep"
"""The job that runs `lockstep up`."""

_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One process that is to run always."""

    name: str
    """`lockstep`, or the role: `gateway`, `scheduler`, `store`, `rank-0`."""
    summary: str
    command: tuple[str, ...]
    place: Place
    environment: Mapping[str, str]
    end_s: int
    """It gets so long to end after SIGTERM."""
    pause_s: int
    """Between two starts of a process that ends at once."""
    after: tuple[str, ...]
    """Jobs that start before it and end after it, where the system can."""

    @property
    def log_file(self) -> str:
        """Where it writes, unless the system keeps a log."""
        return f"{self.place.log_dir}/{self.name}.log"


def make(
    share: HostShare, place: Place, variables: Mapping[str, str], *, supervised: bool
) -> list[Job]:
    """Return the jobs of one host.

    Args:
        share: what runs there.
        place: where it is.
        variables: further environment of every job.
        supervised: one job that runs `lockstep up`.
    """
    drain_s = share.config.scheduler.drain_s
    base = Job(
        name=ALL,
        summary="Lockstep on this host",
        command=(place.executable, "up", *place.settings),
        place=place,
        environment={**variables, "PYTHONUNBUFFERED": "1"},
        # Gateway and scheduler drain one after the other, then ranks and stores end.
        end_s=math.ceil(2.0 * (drain_s + 5.0) + END_S),
        pause_s=5,
        after=(),
    )
    if supervised:
        return [base]
    found: list[Job] = []
    for role in process_group.roles(share):
        is_rank, drains = role.name.startswith("rank"), role.name in ("gateway", "scheduler")
        before = [job.name for job in found if not (is_rank and job.name.startswith("rank"))]
        job = dataclasses.replace(
            base,
            name=role.name.replace(" ", "-"),
            summary=f"Lockstep's {role.name}",
            command=(place.executable, *role.arguments, *place.settings),
            end_s=math.ceil(END_S + (drain_s if drains else 0.0)),
            # A rank ends with every epoch, and the next epoch waits for it.
            pause_s=1 if is_rank else base.pause_s,
            after=tuple(before),
        )
        found.append(job)
    return found


def variables(pairs: Iterable[str]) -> dict[str, str]:
    """Return NAME=VALUE pairs as a mapping.

    Raises:
        UsageError: one is none, or its name says that it holds a secret.
    """
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier() or not name.isascii() or "\n" in value:
            raise UsageError(f"--env needs NAME=VALUE, not {pair!r}.")
        if any(word in name.upper() for word in _SECRETS):
            raise UsageError(
                f"--env {name}: jobs are files that everybody may read, so they hold no secrets."
            )
        if name.startswith("LOCKSTEP_"):
            raise UsageError(f"--env {name}: write settings into the file that the jobs read.")
        found[name] = value
    return found
