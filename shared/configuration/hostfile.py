"""MLX's hostfiles: addresses and RDMA devices of each rank. Owns their three forms. Pure.

As MLX 0.32 writes and reads them:

- `[["10.0.0.1:5000"], ["10.0.0.2:5000"]]`: addresses per rank for the ring (`MLX_HOSTFILE`)
- `[{"ssh": ..., "ips": [...], "rdma": [...]}, ...]`: `mlx.launch`'s
- `{"backend": ..., "envs": [...], "hosts": [...]}`: `mlx.distributed_config`'s

Missing ports are those of `mlx.launch`.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from shared.configuration import device_matrix
from shared.configuration.device_matrix import Matrix
from shared.configuration.host_addresses import address_fault, is_loopback
from shared.errors import ConfigError

NAME = "world.hostfile"
"""Name of the file in errors."""

STARTING_PORT = 32_323
"""`mlx.launch --starting-port`: jaccl's port, and the ring's first one, counted up per address."""

NCCL_PORT = 12_345
"""Default of `mlx.launch --nccl-port`, at which rank 0 waits for the others."""

Backend = Literal["", "ring", "jaccl", "nccl"]
_BACKENDS: dict[str, Backend] = {
    "": "", "any": "", "ring": "ring", "jaccl": "jaccl", "jaccl-ring": "jaccl", "nccl": "nccl",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Hostfile:
    """Content of a hostfile: addresses, machines and devices of each rank, and the backend."""

    addresses: tuple[tuple[str, ...], ...]
    """host:port on which each rank accepts its neighbour; () for a rank without an IP address."""
    machines: tuple[str, ...]
    """Machine of each rank, by its name or address in the file."""
    devices: Matrix = ()
    """RDMA devices; () if the file names none."""
    backend: Backend = ""
    """Backend that the file is for; "" if it does not say."""
    prefers_ring: bool = False
    """For jaccl: use a ring even where a mesh is possible ("jaccl-ring")."""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Variables that the launcher would set for every rank ("envs")."""
    has_ports: bool = False
    """The ports are from the file, not defaults of MLX's launcher."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.addresses)

    @property
    def has_several_machines(self) -> bool:
        """The file names more than one machine."""
        named = [name for rank, name in enumerate(self.machines) if name != _unnamed(rank)]
        return len({"" if is_loopback(name) else name for name in named}) > 1

    def check_reachable(self, rank: int, address: str) -> None:
        """Check that ranks of other machines can reach an address of a rank.

        Args:
            rank: the rank.
            address: its host:port, from the file or a setting.

        Raises:
            ConfigError: when only processes on the same machine can.
        """
        if self.has_several_machines and is_loopback(_host(address)):
            raise ConfigError(
                f"{NAME} is for several machines, but the address of rank {rank} on "
                f"{self.machines[rank]} is {_host(address)}, which the others cannot reach: write "
                "its address in their network."
            )

    def coordinator(self, port: int = STARTING_PORT) -> str:
        """Return the host:port at which rank 0 of jaccl waits for the other ranks.

        Args:
            port: used unless the file itself gives ports (`has_ports`).

        Returns:
            Rank 0's first address; "" if the file has none for rank 0.
        """
        if not self.addresses[0]:
            return ""
        return self.addresses[0][0] if self.has_ports else f"{_host(self.addresses[0][0])}:{port}"


def parse(text: str) -> Hostfile:
    """Parse the text of a hostfile in any of the three forms.

    Raises:
        ConfigError: when it is malformed, contains an address twice, or its devices are no matrix.
    """
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{NAME} is not valid JSON: {error}.") from None
    backend, variables = "", {}
    if isinstance(tree, dict):
        backend = str(tree.get("backend") or "")
        variables = _variables(tree.get("envs") or [])
        tree = tree.get("hosts")
    if backend not in _BACKENDS:
        raise ConfigError(
            f'{NAME} is for the backend "{backend}", but Lockstep supports ring, jaccl, jaccl-ring '
            "and nccl."
        )
    if not isinstance(tree, list) or not tree:
        raise ConfigError(f'{NAME} must contain a list of hosts, or {{"hosts": [...]}}.')
    if all(isinstance(entry, list) for entry in tree):
        found = _of_lists(tree)
    elif all(isinstance(entry, dict) for entry in tree):
        found = _of_hosts(tree)
    else:
        raise ConfigError(f"{NAME} must contain either only objects or only lists of addresses.")
    _check_addresses(found.addresses)
    return dataclasses.replace(
        found,
        backend=_BACKENDS[backend],
        prefers_ring=backend == "jaccl-ring",
        variables=variables,
    )


def to_json(
    backend: str, destinations: Sequence[str], ips: Sequence[str], matrix: Matrix = ()
) -> str:
    """Return the text of a hostfile in the form of `mlx.distributed_config`.

    Args:
        backend: backend of the ranks: "ring", "jaccl" or "nccl".
        destinations: where `ssh` reaches each rank's machine, by rank.
        ips: address of each rank, by rank.
        matrix: RDMA devices by rank; () without RDMA.
    """
    rows: Sequence[Any] = device_matrix.to_rows(matrix) or [[]] * len(ips)
    hosts = [
        {"ssh": ssh, "ips": [ip], "rdma": row}
        for ssh, ip, row in zip(destinations, ips, rows, strict=True)
    ]
    return json.dumps({"backend": backend, "envs": [], "hosts": hosts}, indent=4)


def _of_lists(rows: Sequence[Sequence[Any]]) -> Hostfile:
    if any(entry is None for row in rows for entry in row):
        raise ConfigError(
            f"{NAME} contains a matrix of RDMA devices: use it as world.jaccl_devices "
            "(--distributed-ibv-devices)."
        )
    for rank, row in enumerate(rows):
        for entry in row:
            if not isinstance(entry, str) or not _is_address(entry):
                raise ConfigError(
                    f"{NAME} gives rank {rank} the address {json.dumps(entry)}, "
                    'which is not "ip:port".'
                )
    machines = tuple(_host(row[0]) if row else _unnamed(rank) for rank, row in enumerate(rows))
    return Hostfile(tuple(map(tuple, rows)), machines, has_ports=True)


def _of_hosts(hosts: Sequence[Mapping[str, Any]]) -> Hostfile:
    rows: list[tuple[str, ...]] = []
    port = STARTING_PORT
    for rank, host in enumerate(hosts):
        ips = host.get("ips") or []
        if not isinstance(ips, list) or not all(isinstance(ip, str) and ip for ip in ips):
            raise ConfigError(f'{NAME}: "ips" of rank {rank} must be a list of addresses.')
        for ip in ips:
            if ":" in ip:
                raise ConfigError(
                    f'{NAME}: "ips" of rank {rank} contains {ip}: write an IPv4 address or a '
                    "name without a port."
                )
        rows.append(tuple(f"{ip}:{port + index}" for index, ip in enumerate(ips)))
        port += len(ips)
    machines = tuple(
        str(host.get("ssh") or (_host(row[0]) if row else _unnamed(rank)))
        for rank, (host, row) in enumerate(zip(hosts, rows, strict=True))
    )
    devices = [host.get("rdma") or [] for host in hosts]
    if not any(devices):
        return Hostfile(tuple(rows), machines)
    for rank, row in enumerate(devices):
        if not isinstance(row, list) or not row:
            raise ConfigError(f'{NAME}: "rdma" of rank {rank} is missing or not a list.')
    matrix = device_matrix.matrix_from_rows(devices, f'{NAME} ("rdma")')
    return Hostfile(tuple(rows), machines, matrix)


def _check_addresses(rows: Sequence[Sequence[str]]) -> None:
    seen: dict[str, int] = {}
    for rank, row in enumerate(rows):
        for address in row:
            if fault := address_fault(_host(address)):
                raise ConfigError(
                    f"{NAME} gives rank {rank} the address {_host(address)}, {fault}: write the "
                    "address at which the other ranks reach it."
                )
            if address in seen:
                raise ConfigError(
                    f"{NAME} gives {address} to rank {seen[address]} and to rank {rank}: each "
                    "needs its own port."
                )
            seen[address] = rank
    counts = {len(row) for row in rows}
    if len(counts) > 1 and all(rows):
        raise ConfigError(
            f"{NAME} gives some ranks {min(counts)} and others {max(counts)} addresses: a ring "
            "needs equal numbers."
        )


def _variables(entries: Any) -> dict[str, str]:
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ConfigError(f'{NAME}: "envs" must be a list of "NAME=value".')
    pairs = [entry.partition("=") for entry in entries]
    return {name: value for name, _, value in pairs if name}


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 65_536
    # MLX splits at the first colon and opens IPv4 sockets only.
    return bool(host) and ":" not in host and is_port


def _unnamed(rank: int) -> str:
    """Return the placeholder for the machine of a rank whose entry names none."""
    return f"rank {rank}"


def _host(address: str) -> str:
    return address.rpartition(":")[0]
