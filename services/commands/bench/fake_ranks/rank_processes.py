"""Ranks without a scheduler, as child processes that measure what they are told. Parent's side.

Orders and answers are JSON lines; every rank gets the same orders. The ranks' side: `bare_rank`.
"""

import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from services.commands.bench.measuring.processes import MeasuredProcess, free_port


class RankProcesses:
    """One world of such processes."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        log_folder: Path,
    ) -> None:
        """Start a process per environment and wait for the first line of each.

        Args:
            name: for error messages and log files.
            command: the program and its arguments, the same for every rank.
            environments: each rank's variables, from the function `rank_environments`.
            log_folder: for `<name>-<rank>.log`.

        Raises:
            UnavailableError: one has ended instead.
        """
        self._children: list[MeasuredProcess] = []
        with ExitStack() as started:
            for rank, variables in enumerate(environments):
                title = f"rank {rank} of {name}" if len(environments) > 1 else name
                log = log_folder / f"{name.replace(' ', '-')}-{rank}.log"
                child = MeasuredProcess(title, command, log, variables, piped=True)
                started.callback(child.stop, 5.0)
                self._children.append(child)
            self.about = [child.receive() for child in self._children]
            self._started = started.pop_all()

    def request(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Give all ranks an order at once; return what each found.

        Raises:
            UnavailableError: one has ended instead.
        """
        for child in self._children:
            child.send(order)
        return [child.receive() for child in self._children]

    def close(self) -> None:
        """End them all."""
        self._started.close()


def rank_environments(
    log_folder: Path, backend: str, size: int, *, one_gpu_each: bool = False
) -> list[dict[str, str]]:
    """Return each rank's variables, as MLX wants them.

    Args:
        log_folder: where a ring's hostfile is written.
        backend: off, ring or nccl.
        size: number of ranks.
        one_gpu_each: the machine has GPUs: rank n sees GPU n only, also where it is alone.
    """
    common = {"RANKS": str(size), "HF_HUB_OFFLINE": "1"}
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(size)]
    if backend == "ring":
        hostfile = log_folder / f"hosts-{size}-{os.getpid()}.json"
        hostfile.write_text(json.dumps([[address] for address in addresses]))
        common["MLX_HOSTFILE"] = str(hostfile)
    if backend == "nccl":
        host, _, port = addresses[0].rpartition(":")
        common |= {"NCCL_HOST_IP": host, "NCCL_PORT": port, "MLX_WORLD_SIZE": str(size)}
    found = [{**common, "MLX_RANK": str(rank)} for rank in range(size)]
    if one_gpu_each:
        for rank, one in enumerate(found):
            one["CUDA_VISIBLE_DEVICES"] = str(rank)
    return found


def default_backend() -> str:
    """Return nccl where MLX is one for CUDA, else ring."""
    names = {str(one.metadata["Name"]).lower() for one in importlib.metadata.distributions()}
    return "nccl" if any(name.startswith("mlx-cuda") for name in names) else "ring"
