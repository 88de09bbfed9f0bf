"""The flags that every role has, in groups: which setting each of them overrides.

They are given once, to `lockstep up` or to any role, and win over environment and file. `lockstep
up` hands the merged settings on to its children.
"""

import argparse
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """One flag."""

    key: str
    """The setting that it overrides."""
    summary: str
    metavar: str = ""
    """Name of its value."""
    value: Any = None
    """What the setting becomes, for a flag without a value of its own."""
    is_exclusive: bool = False
    """It may not stand beside another flag of its setting."""


GROUPS: dict[str, dict[str, Flag]] = {
    "what is served, and where": {
        "model": Flag(
            "model.path", "the model: a folder, a Hugging Face id, or demo", "PATH_OR_HF_ID"
        ),
        "host": Flag(
            "gateway.host",
            "address on which the gateway listens; with --inventory: which host this is",
            "H",
        ),
        "port": Flag("gateway.port", "port on which the gateway listens", "P"),
    },
    "ranks": {
        "ranks": Flag("world.size", "number of ranks (default: the hostfile's, or 1)", "N"),
        "distributed-mode": Flag(
            "world.backend",
            "how ranks compute together (default: the hostfile's; ring for several ranks)",
            "off|ring|jaccl|nccl",
        ),
        "distributed-hostfile": Flag(
            "world.hostfile", "MLX's hostfile, as mlx.distributed_config writes it", "FILE"
        ),
        "distributed-ibv-devices": Flag(
            "world.jaccl_devices",
            "jaccl: the matrix of RDMA devices (default: the hostfile's)",
            "FILE",
        ),
        "distributed-jaccl-coordinator": Flag(
            "world.jaccl_coordinator",
            "jaccl: where ranks meet, on rank 0 (default: from the hostfile)",
            "HOST:PORT",
        ),
        "distributed-strict": Flag(
            "world.jaccl_fallback", "jaccl or nothing (default)", value="none", is_exclusive=True
        ),
        "no-distributed-strict": Flag(
            "world.jaccl_fallback",
            "ring after three starts of jaccl in a row have failed",
            value="ring",
            is_exclusive=True,
        ),
    },
    "how the model is split over ranks": {
        "distributed-sharding": Flag(
            "world.sharding",
            "every matrix (default), whole experts, or layers",
            "tensor|expert|pipeline",
            is_exclusive=True,
        ),
        "expert-parallel": Flag(
            "world.sharding",
            "short for --distributed-sharding expert",
            value="expert",
            is_exclusive=True,
        ),
        "enable-pipeline-distributed": Flag(
            "world.enable_pipeline", "allow pipeline, which saves memory, not time", value=True
        ),
    },
    "speculation": {
        "speculative-method": Flag(
            "speculation.method",
            "how drafts are proposed (default: off)",
            "off|ngram|draft_model|eagle",
        ),
        "draft-model": Flag(
            "speculation.draft_model",
            "the draft model, or eagle's head: a folder or a Hugging Face id",
            "PATH_OR_HF_ID",
        ),
        "num-speculative-tokens": Flag("speculation.tokens_max", "most drafts per step", "N"),
        "speculative-disable-batch-size": Flag(
            "speculation.batch_max",
            "with more running sequences none gets drafts; 0: as measured",
            "N",
        ),
    },
}
"""Group -> flag, without its dashes -> what it does."""


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add `--config`, `--inventory` and every flag to a command."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings for every role")
    parser.add_argument(
        "--inventory", metavar="FILE", help="TOML file of several hosts, in place of all settings"
    )
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        exclusive: dict[str, argparse._MutuallyExclusiveGroup] = {}
        for name, flag in flags.items():
            where: argparse._ActionsContainer = group
            if flag.is_exclusive:
                if flag.key not in exclusive:
                    exclusive[flag.key] = group.add_mutually_exclusive_group()
                where = exclusive[flag.key]
            if flag.metavar:
                where.add_argument(f"--{name}", metavar=flag.metavar, help=flag.summary)
            else:
                where.add_argument(
                    f"--{name}", action="store_const", const=flag.value, help=flag.summary
                )


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that a command line has given, by key.

    Values stay strings: the check of all settings together names key and range.
    """
    found: dict[str, Any] = {}
    for flags in GROUPS.values():
        for name, flag in flags.items():
            value = getattr(options, name.replace("-", "_"), None)
            if value is not None:
                found[flag.key] = value
    return found
