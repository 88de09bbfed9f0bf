"""Inventory: one TOML file with the settings and hosts of a cluster. Owns reading and checking it.

It is a configuration file (`lockstep.example.toml`) with two more parts: `[cluster]`, and
`[[hosts]]` once per host. `shared.configuration.host_share` derives each host's settings from it
alone, so hosts with the same file agree.
"""

import ipaddress
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from shared import limits
from shared.configuration.host_addresses import address_fault, is_loopback
from shared.configuration.loading import read_toml
from shared.configuration.settings import Port
from shared.errors import ConfigError, UsageError

HostLabel = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
UserName = Annotated[str, Meta(pattern=r"^([A-Za-z_][A-Za-z0-9._-]{0,31})?$")]
FolderName = Annotated[str, Meta(max_length=1_024, pattern=r"^([/~][^\x00-\x1f\x7f]*)?$")]
RankNumber = Annotated[int, Meta(ge=0, lt=limits.RANKS_MAX)]
Device = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
HostRole = Literal["gateway", "scheduler", "cache_store"]


class ClusterEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ports at which the scheduler and rank 0 of jaccl listen, known to all hosts."""

    bus_port: Annotated[int, Meta(ge=1, le=65_534)] = 7610
    """Port of the scheduler for gateways. The next port is for ranks."""
    coordinator_port: Port = 7620
    """Port on which rank 0 of jaccl's ranks waits for the others."""


class HostEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One host. Paths are absolute or start with ~."""

    name: HostLabel
    """Name in this file: the machine's host name, or the value of `--host` on it."""
    address: str = ""
    """IP address for links between processes. Optional with a single host."""
    data_address: str = ""
    """IP address for the ranks' collectives (ring, nccl). Use the Thunderbolt or another private
    network, because MLX's collectives are not authenticated."""
    ssh: Annotated[str, Meta(max_length=255, pattern=r"^([A-Za-z0-9_.@:-]+)?$")] = ""
    """Destination for `ssh`, for example user@host. "": `address`."""
    roles: list[HostRole] = []
    """Roles of this host in addition to ranks."""
    ranks: list[RankNumber] | Annotated[int, Meta(ge=0, le=limits.RANKS_MAX)] = []
    """Numbers of its ranks, or how many; then numbers follow the order of hosts."""
    rdma: dict[HostLabel, Device | list[Device]] = {}
    """Name of another host -> RDMA device (or devices) whose cable leads there (jaccl)."""
    memory_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 0
    """Memory of this host, for plans made on another machine. 0: unknown."""
    user: UserName = ""
    """User as which launchd or systemd run Lockstep. "": the user who calls
    `lockstep launchd` or `lockstep systemd`."""
    executable: FolderName = ""
    """Path of the console script `lockstep`. "": its path on the machine that runs
    `lockstep launchd` or `lockstep systemd`."""
    inventory: FolderName = ""
    """Path of this file on this host. "": its path on the machine that runs these."""
    work_dir: FolderName = ""
    """Working folder. "": the folder of this file."""
    log_dir: FolderName = ""
    """Folder of the log files that launchd writes. "": `/var/log`."""
    run_dir: FolderName = ""
    """`paths.run_dir` of this host. "": the common setting."""
    keys_dir: FolderName = ""
    """`paths.keys_dir` of this host. "": the common setting."""
    cache_dir: FolderName = ""
    """`cache.directory` of this host. "": the common setting."""
    model_path: FolderName = ""
    """`model.path` of this host. "": the common setting."""


class Inventory(Struct, frozen=True, kw_only=True):
    """A checked inventory: settings, hosts, and the rank numbers of each host."""

    file: str
    """Path of the file, for errors."""
    cluster: ClusterEntry
    settings: dict[str, Any]
    """Sections and keys as in a configuration file."""
    hosts: tuple[HostEntry, ...]
    ranks: dict[str, tuple[int, ...]]
    """Host -> numbers of its ranks. Every number below `world_size` occurs once."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.ranks.values()))

    @property
    def scheduler(self) -> HostEntry:
        """The scheduler's host."""
        return next(host for host in self.hosts if "scheduler" in host.roles)

    def by_rank(self) -> list[HostEntry]:
        """Return the host of each rank, in rank order."""
        found = {rank: host for host in self.hosts for rank in self.ranks[host.name]}
        return [found[rank] for rank in range(self.world_size)]

    def host(self, name: str) -> HostEntry:
        """Return a host by its name. Raises UsageError for an unknown name."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise UsageError(
            f"{self.file} has no host {name[:64]}: it has {', '.join(h.name for h in self.hosts)}."
        )

    def this_host(self, host_name: str) -> HostEntry:
        """Return the host whose name is this machine's, with or without its domain.

        Args:
            host_name: name that the machine reports. Upper and lower case are the same.

        Raises:
            UsageError: when no host or several hosts match.
        """
        whole, short = host_name.lower(), host_name.lower().partition(".")[0]
        named = [host for host in self.hosts if host.name.lower() == whole]
        similar = [host for host in self.hosts if host.name.lower().partition(".")[0] == short]
        found = named or similar
        if len(found) == 1:
            return found[0]
        matching = "several hosts" if found else "no host"
        raise UsageError(
            f"This machine calls itself {host_name}, which matches {matching} of {self.file}: name "
            f"one with --host ({', '.join(host.name for host in self.hosts)})."
        )


def read(file: str) -> Inventory:
    """Read an inventory from a file and check it as `parse` does.

    Raises:
        ConfigError: when it is wrong; names the place and the remedy.
    """
    return parse(read_toml(file, "inventory"), file)


def parse(tree: dict[str, Any], file: str) -> Inventory:
    """Check the hosts of an inventory and number their ranks.

    Checked are types and ranges, unique names and addresses, addresses that other hosts can reach,
    RDMA cables with two ends, one scheduler, a gateway, and rank numbers without gaps.
    `shared.configuration.host_share` checks the settings per host.

    Args:
        tree: the parsed TOML file.
        file: its path, for errors.

    Raises:
        ConfigError: as `read`.
    """
    settings = {key: value for key, value in tree.items() if key not in ("cluster", "hosts")}
    part = "cluster"
    try:
        cluster = msgspec.convert(tree.get("cluster", {}), ClusterEntry)
        part = "hosts"
        hosts = msgspec.convert(tree.get("hosts", []), tuple[HostEntry, ...])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {_sentence(str(error), part, tree)}") from None
    for sentence in _host_errors(hosts):
        raise ConfigError(f"{file}: {sentence}")
    ranks = _numbered(hosts, file)
    size = sum(map(len, ranks.values()))
    world = settings.get("world")
    if isinstance(world, dict) and world.get("size", size) != size:
        raise ConfigError(
            f"{file}: world.size is {world['size']!r}, but the hosts have {size} "
            f"rank{'s' if size != 1 else ''}: remove world.size, or correct `ranks`."
        )
    return Inventory(file=file, cluster=cluster, settings=settings, hosts=hosts, ranks=ranks)


def _host_errors(hosts: Sequence[HostEntry]) -> Iterator[str]:
    """Yield a sentence for each error in the hosts."""
    if not hosts:
        yield "There are no hosts: add a [[hosts]] table per host."
    for what in ("name", "address", "data_address"):
        seen: dict[str, str] = {}
        for host in hosts:
            value: str = getattr(host, what).lower()
            if value and value in seen:
                yield f"The hosts {seen[value]} and {host.name} have the same {what}, {value}."
            seen[value] = host.name
    for host in hosts:
        yield from _address_errors(host, is_alone=len(hosts) == 1)
        yield from _rdma_errors(host, hosts)
        if len(set(host.roles)) < len(host.roles):
            yield f"The host {host.name} has a role twice."
        if not host.roles and host.ranks in ([], 0):
            yield f"The host {host.name} has neither roles nor ranks: add some, or remove it."
    schedulers = [host.name for host in hosts if "scheduler" in host.roles]
    if len(schedulers) != 1:
        yield (
            f"{'Two hosts have' if schedulers else 'No host has'} the role scheduler"
            f"{f' ({schedulers[0]}, {schedulers[1]})' if schedulers else ''}: assign it to one "
            "host."
        )
    if not any("gateway" in host.roles for host in hosts):
        yield "No host has the role gateway: assign it to one or more."


def _address_errors(host: HostEntry, *, is_alone: bool) -> Iterator[str]:
    for what, value in (("address", host.address), ("data_address", host.data_address)):
        if not value:
            continue
        try:
            address = ipaddress.ip_address(value)
        except ValueError:
            yield (
                f"{what} of the host {host.name} is {value!r}, not an IP address. Names cannot be "
                "used, because processes listen there."
            )
            continue
        if what == "data_address" and address.version != 4:
            yield f"data_address of the host {host.name} is {value}: MLX needs an IPv4 address."
        elif fault := address_fault(value):
            yield f"{what} of the host {host.name} is {value}, {fault}."
        elif is_loopback(value) and not is_alone:
            yield f"{what} of the host {host.name} is {value}, which other hosts cannot reach."
    if not host.address and not is_alone:
        yield f"The host {host.name} has no address, where the other hosts reach it."


def _rdma_errors(host: HostEntry, hosts: Sequence[HostEntry]) -> Iterator[str]:
    others = {other.name: other for other in hosts if other.name != host.name}
    for peer in host.rdma:
        if peer not in others:
            yield f"rdma of the host {host.name} names {peer}, which is not another host."
        elif host.name not in others[peer].rdma:
            yield (
                f"rdma of the host {host.name} names {peer}, but that of {peer} does not name "
                f"{host.name}: a cable has two ends."
            )


def _numbered(hosts: Sequence[HostEntry], file: str) -> dict[str, tuple[int, ...]]:
    """Return the rank numbers of each host. Raises ConfigError if they are inconsistent."""
    counts = [host for host in hosts if isinstance(host.ranks, int) and host.ranks]
    lists = [host for host in hosts if isinstance(host.ranks, list) and host.ranks]
    if counts and lists:
        raise ConfigError(
            f"{file}: The host {counts[0].name} has a number of ranks and the host "
            f"{lists[0].name} a list of them: use the same form for all hosts."
        )
    ranks: dict[str, tuple[int, ...]] = {}
    size = 0
    for host in hosts:
        if isinstance(host.ranks, int):
            ranks[host.name] = tuple(range(size, size + host.ranks))
            size += host.ranks
        else:
            ranks[host.name] = tuple(sorted(host.ranks))
            size += len(host.ranks)
    if not 0 < size <= limits.RANKS_MAX:
        raise ConfigError(
            f"{file}: The hosts have {size} ranks together: there must be 1 to {limits.RANKS_MAX}."
        )
    owner: dict[int, str] = {}
    for name, numbers in ranks.items():
        for number in numbers:
            if number in owner:
                raise ConfigError(
                    f"{file}: Rank {number} belongs to two hosts, {owner[number]} and {name}."
                )
            owner[number] = name
    if missing := sorted(set(range(size)) - owner.keys()):
        raise ConfigError(
            f"{file}: {size} ranks have the numbers 0 to {size - 1}, but {missing[0]} is missing."
        )
    return ranks


def _sentence(error: str, part: str, tree: dict[str, Any]) -> str:
    """Turn msgspec's "Expected `str` ... - at `$[1].address`" into a sentence about a host."""
    text, _, place = error.partition(" - at ")
    key = part + place.strip("`").removeprefix("$")
    number, closing, rest = key.removeprefix("hosts[").partition("]")
    if closing and number.isdigit():
        entry = tree["hosts"][int(number)]
        name = entry.get("name", number) if isinstance(entry, dict) else number
        key = f"hosts.{name}{rest}"
    if "unknown field" in text:
        return f"Unknown key {key}.{text.rsplit('`', 2)[-2]}."
    return f"{key}: {text[:1].lower() + text[1:]}."
