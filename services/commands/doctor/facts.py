"""What is known about one host, in a form that travels: other hosts' facts are compared with it."""

from typing import Literal

from msgspec import Struct

from services.commands.doctor.findings import Finding


class ThunderboltPort(Struct, frozen=True, kw_only=True):
    """One port of this host."""

    receptacle: str
    """The number that macOS gives it."""
    uuid: str
    """Domain of its controller: by it the other end of a cable names this port."""
    speed_gbps: int
    """Of the link, or the most that an empty port can do; 0: not said."""
    connected: bool
    peer_uuid: str = ""
    """Domain of the controller at the other end, if that is a computer."""
    peer_name: str = ""
    interface: str = ""
    """The network interface that goes with it, such as en5."""


class Facts(Struct, frozen=True, kw_only=True):
    """One host."""

    host: str
    platform: Literal["macOS", "Linux"]
    system: str = ""
    """Version of the operating system, with its build."""
    chip: str = ""
    versions: dict[str, str] = {}
    """Package -> version; Python and Lockstep among them."""
    environment: dict[str, str] = {}
    """Variables that change what ranks compute or how; secrets as digests."""
    time_s: float = 0.0
    """The date as seconds since 1970."""
    public_key: str = ""
    allowed: dict[str, list[str]] = {}
    """Public keys that may speak here -> as what."""
    listens_on_tcp: bool = False
    """Links between processes use tcp, so keys count."""
    model: str = ""
    model_digest: str = ""
    """Over config and headers of the model; "" where it is not on this host."""
    ports: list[ThunderboltPort] = []
    rdma_devices: list[str] = []
    backend: str = ""
    ranks: int = 0
    """Ranks that run on this host."""
    roles: list[str] = []


class HostReport(Struct, frozen=True, kw_only=True):
    """What one host says about itself."""

    facts: Facts
    findings: list[Finding]


class Examination(Struct, frozen=True, kw_only=True):
    """All hosts, and what follows from comparing them: `lockstep doctor --json`."""

    hosts: list[HostReport]
    findings: list[Finding]
