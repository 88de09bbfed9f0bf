"""Flags that commands share: overrides of settings, and where the settings are.

`lockstep up` hands the merged settings on to its children.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, Self

import click
from click.shell_completion import CompletionItem

from services.commands.cli.click_support import GroupedOption
from shared.configuration import host_selection
from shared.configuration.host_share import HostShare
from shared.errors import UsageError


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """Command-line flag that overrides one setting."""

    key: str
    """The setting, as `section.name`."""
    summary: str
    """Its text in `--help`."""
    metavar: str = ""
    """Name of its value; "a|b" lists the values."""
    value: Any = None
    """What the setting becomes, for a flag without a value of its own."""
    is_exclusive: bool = False
    """Whether it must not be given together with another flag of the same setting."""


GROUPS: dict[str, dict[str, Flag]] = {
    "Model and address": {
        "model": Flag(
            "model.path", "Model: a folder, a Hugging Face id, or demo.", "PATH_OR_HF_ID"
        ),
        "host": Flag(
            "gateway.host",
            "Address on which the gateway listens; with --inventory: name of this host.",
            "H",
        ),
        "port": Flag("gateway.port", "Port on which the gateway listens.", "P"),
    },
    "Ranks": {
        "ranks": Flag("world.size", "Number of ranks (default: from the hostfile, or 1).", "N"),
        "distributed-mode": Flag(
            "world.backend",
            "Backend of collectives (default: from the hostfile; ring for several ranks).",
            "off|ring|jaccl|nccl",
        ),
        "distributed-hostfile": Flag(
            "world.hostfile", "MLX hostfile, as mlx.distributed_config writes it.", "FILE"
        ),
        "distributed-ibv-devices": Flag(
            "world.jaccl_devices",
            "jaccl: file with the matrix of RDMA devices (default: from the hostfile).",
            "FILE",
        ),
        "distributed-jaccl-coordinator": Flag(
            "world.jaccl_coordinator",
            "jaccl: address of the coordinator, on rank 0 (default: from the hostfile).",
            "HOST:PORT",
        ),
        "distributed-strict": Flag(
            "world.jaccl_fallback",
            "Use jaccl or fail (default).",
            value="none",
            is_exclusive=True,
        ),
        "no-distributed-strict": Flag(
            "world.jaccl_fallback",
            "Use ring after three failed starts of jaccl in a row.",
            value="ring",
            is_exclusive=True,
        ),
    },
    "How the model is split over ranks": {
        "distributed-sharding": Flag(
            "world.sharding",
            "Split every matrix (tensor, the default), whole experts, both, or layers (pipeline).",
            "tensor|expert|tensor+expert|pipeline",
            is_exclusive=True,
        ),
        "expert-parallel": Flag(
            "world.sharding",
            "Short for --distributed-sharding expert.",
            value="expert",
            is_exclusive=True,
        ),
        "enable-pipeline-distributed": Flag(
            "world.enable_pipeline",
            "Allow pipeline, which saves memory but no time.",
            value=True,
        ),
    },
    "Speculation": {
        "speculative-method": Flag(
            "speculation.method",
            "Source of drafts (default: off).",
            "off|ngram|draft_model|eagle",
        ),
        "draft-model": Flag(
            "speculation.draft_model",
            "Draft model or EAGLE head: a folder or a Hugging Face id.",
            "PATH_OR_HF_ID",
        ),
        "num-speculative-tokens": Flag(
            "speculation.tokens_max", "Maximum number of drafts per sequence and step.", "N"
        ),
        "speculative-disable-batch-size": Flag(
            "speculation.disable_above_sequences",
            "Propose no drafts with more running sequences than this; 0: decide by measurement.",
            "N",
        ),
    },
}
"""Group -> name of a flag, without dashes -> the flag."""


@dataclasses.dataclass(frozen=True, slots=True)
class SettingSources:
    """Configuration file, inventory and flags of a command line, from which settings are read."""

    config: str | None = None
    """Configuration file."""
    inventory: str | None = None
    """Inventory file of several hosts."""
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings given as flags, by key. Values are still text: loading checks name and range."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Return the sources of settings that a command's options name.

        Args:
            options: name of each option's parameter -> its value, as click passes them.

        Raises:
            UsageError: when two flags exclude each other.
        """
        return cls(options.get("config"), options.get("inventory"), overrides(options))

    def share(self) -> HostShare:
        """Merge file, environment and flags; return roles and settings of this machine.

        Raises:
            ConfigError: when a setting is wrong.
            UsageError: when this machine is not a host of the inventory.
        """
        return host_selection.select_share(self.inventory, self.config, self.overrides, os.environ)


def overrides(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a command's options override.

    Args:
        options: name of each option's parameter -> its value, as click passes them.

    Returns:
        Key of the setting, as `section.name` -> its value, not yet checked.

    Raises:
        UsageError: when two flags exclude each other.
    """
    found: dict[str, Any] = {}
    names: dict[str, str] = {}
    for flags in GROUPS.values():
        for name, flag in flags.items():
            given = options.get(_parameter(name))
            if given is None or given is False:
                continue
            if flag.is_exclusive and flag.key in names:
                raise UsageError(
                    f"--{name} is not allowed together with --{names[flag.key]}: both set "
                    f"{flag.key}."
                )
            names[flag.key] = name
            found[flag.key] = given if flag.metavar else flag.value
    return found


def settings_options(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Decorate a command's function so that it has the options for sources of settings.

    These are `--config`, `--inventory` and the flags in GROUPS. The function gets all of them as
    one SettingSources, its first argument.
    """
    adders = {
        "config": file_option("--config", "TOML file with settings for every role."),
        "inventory": file_option(
            "--inventory", "TOML file of several hosts, in place of all settings."
        ),
    }
    for heading, flags in GROUPS.items():
        for name, flag in flags.items():
            adders[_parameter(name)] = _override_option(name, flag, heading)
    return _with_sources(function, adders)


def source_options(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Decorate a command's function so that it has `--config`, `--inventory` and `--host`.

    The function gets them as one SettingSources, its first argument.
    """
    adders = {
        "config": file_option("--config", "TOML file with settings for every role."),
        "inventory": file_option("--inventory", "TOML file of several hosts."),
        "host": click.option("--host", metavar="H", help="With --inventory: name of this host."),
    }
    return _with_sources(function, adders)


def file_option(name: str, summary: str) -> Callable[..., Any]:
    """Return a decorator that adds an option whose value is a path, which shells complete.

    Args:
        name: name of the option, with its dashes.
        summary: its text in `--help`.
    """
    return click.option(name, metavar="FILE", type=click.Path(), help=summary)


def _with_sources(
    function: Callable[..., int | None], adders: dict[str, Callable[..., Any]]
) -> Callable[..., int | None]:
    """Add options, by the names of their parameters, and pass their values as one argument."""

    @functools.wraps(function)
    def command(**options: Any) -> int | None:
        sources = SettingSources.of({name: options.pop(name) for name in adders})
        return function(sources, **options)

    for add in reversed(adders.values()):
        command = add(command)
    return command


def _override_option(name: str, flag: Flag, heading: str) -> Callable[..., Any]:
    if not flag.metavar:
        return click.option(
            f"--{name}", cls=GroupedOption, help_group=heading, is_flag=True, help=flag.summary
        )
    return click.option(
        f"--{name}",
        cls=GroupedOption,
        help_group=heading,
        metavar=flag.metavar,
        type=click.Path() if flag.metavar in ("FILE", "PATH_OR_HF_ID") else None,
        help=flag.summary,
        shell_complete=_values(flag.metavar) if "|" in flag.metavar else None,
    )


def _values(metavar: str) -> Callable[..., list[CompletionItem]]:
    """Return a function that completes the values of a setting; loading checks them."""

    def complete(_ctx: object, _param: object, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(one) for one in metavar.split("|") if one.startswith(incomplete)]

    return complete


def _parameter(name: str) -> str:
    return name.replace("-", "_")
