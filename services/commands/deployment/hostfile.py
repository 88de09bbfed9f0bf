"""Command `lockstep hostfile`. Owns how an inventory's hosts become entries of MLX's hostfile."""

import json
from pathlib import Path
from typing import Literal

import click

from services.commands.cli.click_support import Command
from services.commands.cli.flags import file_option
from shared import limits
from shared.configuration import device_matrix, host_share, hostfile, inventory
from shared.configuration.inventory import HostEntry, Inventory
from shared.errors import ConfigError, UsageError
from shared.os import private_files
from shared.os.standard_streams import print_line

Backend = Literal["ring", "jaccl", "nccl"]

_ALONE = "127.0.0.1"
"""Address of an inventory's only host, if it gives none."""


@click.command(name="hostfile", cls=Command)
@click.option(
    "--inventory",
    "file",
    metavar="FILE",
    type=click.Path(),
    required=True,
    help="TOML file of several hosts.",
)
@click.option(
    "--backend",
    type=click.Choice(["ring", "jaccl", "nccl"]),
    help="What the file is for (default: world.backend of the inventory, else ring).",
)
@click.option(
    "--starting-port",
    "port",
    metavar="P",
    type=click.IntRange(1, 65_535 - limits.RANKS_MAX),
    help="Ring: write addresses with ports, P for rank 0 (default: MLX's ports, unwritten).",
)
@file_option("--output", "File to write (default: standard output).")
def write_hostfile(
    *, file: str, backend: Backend | None, port: int | None, output: str | None
) -> int:
    """Write MLX's hostfile for the ranks of an inventory."""
    text = render(inventory.read(file), backend, port)
    if output is None:
        print_line(text)
        return limits.EXIT_OK
    try:
        private_files.replace(Path(output), f"{text}\n")
    except OSError as error:
        raise ConfigError(f"Cannot write {output}: {error.strerror}.") from None
    return limits.EXIT_OK


def render(hosts: Inventory, backend: Backend | None = None, port: int | None = None) -> str:
    """Return the text of a hostfile with one entry per rank, in rank order.

    Args:
        hosts: the inventory.
        backend: what the file is for; None: `world.backend` of the inventory, else ring.
        port: for the ring: port of rank 0, counted up for the others; None: MLX's own ports, which
            the file does not contain.

    Raises:
        ConfigError: when the inventory lacks the addresses or devices that the backend needs.
        UsageError: when a port is given for another backend than ring.
    """
    kind = backend or _configured_backend(hosts)
    if port is not None and kind != "ring":
        raise UsageError(f"--starting-port is for ring, but this file is for {kind}.")
    by_rank = hosts.by_rank()
    matrix: device_matrix.Matrix = ()
    if kind == "jaccl":
        matrix = _devices(hosts)
        ips = [_address(hosts, host, "address", "rank 0 waits for the others") for host in by_rank]
    else:
        reason = "other ranks reach its ranks"
        ips = [_address(hosts, host, "data_address", reason) for host in by_rank]
    if port is not None:
        return json.dumps([[f"{ip}:{port + rank}"] for rank, ip in enumerate(ips)])
    destinations = [host.ssh or host.address or _ALONE for host in by_rank]
    return hostfile.to_json(kind, destinations, ips, matrix)


def _configured_backend(hosts: Inventory) -> Backend:
    world = hosts.settings.get("world", {})
    backend = world.get("backend", "auto") if isinstance(world, dict) else world
    if backend in ("jaccl", "nccl"):
        return backend  # type: ignore[no-any-return]  # one of the names above
    if backend in ("auto", "ring"):
        return "ring"
    raise ConfigError(
        f"{hosts.file}: world.backend is {backend}, for which there is no hostfile: give --backend."
    )


def _devices(hosts: Inventory) -> device_matrix.Matrix:
    name = f"{hosts.file}: The table of RDMA devices"
    matrix = host_share.rdma_matrix(hosts)
    if not matrix:
        raise ConfigError(
            f"{hosts.file}: No host has an rdma table, which jaccl needs: add them, or give "
            "--backend ring."
        )
    device_matrix.topology(matrix, name)
    return matrix


def _address(hosts: Inventory, host: HostEntry, key: str, reason: str) -> str:
    found: str = getattr(host, key)
    if found:
        return found
    if len(hosts.hosts) == 1:
        return _ALONE
    raise ConfigError(f"{hosts.file}: The host {host.name} has no {key}, where {reason}.")
