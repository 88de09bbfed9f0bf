"""Jobs that keep one host's processes running: one per role, or one for all roles. Pure."""

import dataclasses
import math
from collections.abc import Iterable, Mapping

from services.commands.deployment.installation import Installation
from services.supervisor.children import process_group
from shared.configuration.host_share import HostShare
from shared.errors import UsageError

END_GRACE_S = 15.0
"""Time that a role needs to end in addition to its drain."""

FILES_MAX = 65_536
"""Limit of open files: a gateway has one per client, and the default of macOS is 256."""

SUPERVISED_JOB = "lockstep"
"""Name of the job that runs `lockstep up`."""

_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """Process that launchd or systemd starts at boot and keeps running."""

    name: str
    """`lockstep`, or the role: `gateway`, `scheduler`, `store`, `rank-0`."""
    summary: str
    """Description of the job, in a few words."""
    command: tuple[str, ...]
    """Program and arguments."""
    place: Installation
    """Paths on the host, and the user of the process."""
    environment: Mapping[str, str]
    """Environment variables of the process."""
    end_s: int
    """Seconds from SIGTERM to SIGKILL."""
    pause_s: int
    """Seconds between two starts."""
    after: tuple[str, ...]
    """Jobs that start before it and end after it, if the system supports an order."""

    @property
    def log_file(self) -> str:
        """Path of its log file under launchd; systemd keeps the log in its journal."""
        return f"{self.place.log_dir}/{self.name}.log"


def make_host_jobs(
    share: HostShare, place: Installation, variables: Mapping[str, str], *, supervised: bool
) -> list[Job]:
    """Return the jobs that keep the processes of one host running.

    Args:
        share: roles and settings of the host.
        place: paths and user on the host.
        variables: further environment variables of every job.
        supervised: whether one job runs `lockstep up`, instead of one job per role.
    """
    drain_s = share.config.scheduler.drain_s
    base = Job(
        name=SUPERVISED_JOB,
        summary="Lockstep on this host",
        command=(place.executable, "up", *place.settings),
        place=place,
        environment={**variables, "PYTHONUNBUFFERED": "1"},
        # Gateway and scheduler drain in turn, then ranks and stores end.
        end_s=math.ceil(2.0 * (drain_s + 5.0) + END_GRACE_S),
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
            end_s=math.ceil(END_GRACE_S + (drain_s if drains else 0.0)),
            # A rank ends with every epoch, and the next epoch waits until it runs again.
            pause_s=1 if is_rank else base.pause_s,
            after=tuple(before),
        )
        found.append(job)
    return found


def parse_variables(pairs: Iterable[str]) -> dict[str, str]:
    """Parse environment variables of jobs, each written as NAME=VALUE.

    Returns:
        Name -> value.

    Raises:
        UsageError: when one is malformed, its name indicates a secret, or it is a setting.
    """
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier() or not name.isascii() or not value.isprintable():
            raise UsageError(f"--env needs NAME=VALUE, not {pair!r}.")
        if any(word in name.upper() for word in _SECRETS):
            raise UsageError(
                f"--env {name}: every user can read a job's file, so it must not hold secrets."
            )
        if name.startswith("LOCKSTEP_"):
            raise UsageError(
                f"--env {name}: write settings into the configuration file of the jobs."
            )
        found[name] = value
    return found
