"""Facts and findings of hosts. Owns the JSON document of `lockstep doctor`, read by other hosts."""

from typing import Literal

import msgspec
from msgspec import Struct

from services.commands.checks.check_results import CheckResult, Verdict


class Finding(CheckResult, frozen=True, kw_only=True):
    """Result of one check of `lockstep doctor`, about one host or several together."""

    host: str
    """The host; "" if the finding concerns several."""
    detail: str = msgspec.field(name="cause")


class Findings:
    """List of the findings about one host, which checks append to in order.

    Args:
        host: name of the host; "" for findings about several.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.all: list[Finding] = []

    def ok(self, check: str, detail: str) -> None:
        """Add an OK finding of the check named `check`, with the facts found: nothing is wrong."""
        self._add(check, "OK", detail, "")

    def warn(self, check: str, detail: str, remedy: str) -> None:
        """Add a WARN finding: this works, but worse or for less time than it should.

        Args:
            check: name of the check.
            detail: cause of the warning.
            remedy: exact command or change.
        """
        self._add(check, "WARN", detail, remedy)

    def fail(self, check: str, detail: str, remedy: str) -> None:
        """Add a FAIL finding: this does not work. Arguments: as for `warn`."""
        self._add(check, "FAIL", detail, remedy)

    def cannot_check(self, check: str, detail: str, remedy: str = "") -> None:
        """Add a CANNOT CHECK finding: this host gives no answer, which is no failure.

        Args:
            check: name of the check.
            detail: reason why nothing was checked.
            remedy: command that makes the check possible; "" if no command does.
        """
        self._add(check, "CANNOT CHECK", detail, remedy)

    def _add(self, check: str, verdict: Verdict, detail: str, remedy: str) -> None:
        self.all.append(
            Finding(host=self.host, check=check, verdict=verdict, detail=detail, remedy=remedy)
        )


class ThunderboltPort(Struct, frozen=True, kw_only=True):
    """One Thunderbolt port of a Mac, with the computer at the other end of its cable."""

    receptacle: str
    """The number that macOS gives it."""
    uuid: str
    """Domain of its controller, which the other end of a cable reports for this port."""
    speed_gbps: int
    """Speed of the link, or the maximum of an empty port; 0: unknown."""
    connected: bool
    """Whether any device is plugged in."""
    peer_uuid: str = ""
    """Domain of the controller at the other end, if that is a computer; else ""."""
    peer_name: str = ""
    """Name of the computer at the other end, as it calls itself."""
    interface: str = ""
    """Its network interface, such as en5; "" if it has none."""


class Facts(Struct, frozen=True, kw_only=True):
    """Facts about one host that `lockstep doctor` compares with those of others."""

    host: str
    platform: Literal["macOS", "Linux"]
    system: str = ""
    """Version of the operating system, with its build."""
    chip: str = ""
    """Name of the chip, such as "Apple M4 Max"; on Linux the kind of processor."""
    versions: dict[str, str] = {}
    """Package -> version; Python and Lockstep among them."""
    environment: dict[str, str] = {}
    """Environment variables that change what ranks compute or how; secrets as digests."""
    time_s: float = 0.0
    """The date as seconds since 1970."""
    public_key: str = ""
    """Public key of this host; "" without a key pair."""
    allowed: dict[str, list[str]] = {}
    """Public keys that may connect here -> their roles."""
    listens_on_tcp: bool = False
    """Whether links between processes use TCP, and so need keys."""
    model: str = ""
    """The configured model: a folder or a Hugging Face id."""
    model_digest: str = ""
    """Digest of the model's config and headers; "" if the model is not on this host."""
    ports: list[ThunderboltPort] = []
    """Thunderbolt ports of a Mac."""
    rdma_devices: list[str] = []
    """Names of the RDMA devices, such as rdma_en5."""
    backend: str = ""
    """Configured backend of collectives: off, ring, jaccl or nccl."""
    ranks: int = 0
    """Number of ranks on this host."""
    roles: list[str] = []
    """Roles that the host runs besides ranks: gateway, scheduler, store."""


class HostReport(Struct, frozen=True, kw_only=True):
    """Facts and findings of one host about itself."""

    facts: Facts
    findings: list[Finding]
    """One or more per check, in the order of the checks."""


class Examination(Struct, frozen=True, kw_only=True):
    """Result of `lockstep doctor`, and its JSON document."""

    hosts: list[HostReport]
    """Report of each host that was examined."""
    findings: list[Finding]
    """Findings from reaching the hosts and comparing them."""
