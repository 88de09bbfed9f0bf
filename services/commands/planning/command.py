"""Command `lockstep plan`. Owns its options and inputs; reads headers, not weights."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import click
from huggingface_hub import try_to_load_from_cache

from services.commands.cli.click_support import Command, json_option, json_text
from services.commands.cli.flags import file_option
from services.commands.planning import from_inventory, recommend
from services.commands.planning.experts import propose
from services.commands.planning.hosts import (
    DeviceKind,
    RankMemory,
    device_of_this_machine,
    memory_of_sizes,
    memory_of_this_machine,
    parse_sizes,
)
from services.commands.planning.model.checkpoint import Checkpoint, read_checkpoint
from services.commands.planning.model.kv import model_kv
from services.commands.planning.report import ExpertProposal, MemoryPlan, Recommendation
from services.commands.planning.splits import DraftMemory, MemoryDemand, PlannedModel, all_splits
from services.commands.planning.table import render
from shared import limits
from shared.configuration.loading import load_config, read_world_files
from shared.configuration.setting_rules import PIPELINE_OVER_JACCL
from shared.configuration.settings import Config
from shared.configuration.world_addresses import rdma_device_uses
from shared.errors import ConfigError, UsageError
from shared.measurements import expert_file
from shared.messages import ExpertsReported
from shared.messages.base import Sharding
from shared.model import checkpoint_files
from shared.model.location import local_folder
from shared.model.sharding.shares import DIVIDES_EXPERTS
from shared.os.standard_streams import print_line

EXIT_DOES_NOT_FIT = 1
"""Exit code if the model, or the requested length and number of sequences, does not fit."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `lockstep plan`; None: not given."""

    config: str | None
    inventory: str | None
    model: str | None
    draft_model: str | None
    memory: str | None
    usable_share: float | None
    ranks: int | None
    device: DeviceKind | None
    context_tokens: int | None
    sequences: int | None
    kv_bits: str | None
    expert_stats: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """Input of one memory plan: settings, device, ranks and the sequences that must fit.

    Options that the command line leaves out have their defaults here.
    """

    config: Config
    kind: DeviceKind
    memory: list[RankMemory]
    """Memory of each rank that may be used."""
    context_tokens: int
    """Length that must fit; 0: the longest that the model allows."""
    sequences: int
    """Number of sequences that must fit at once."""
    has_hosts: bool
    """Whether ranks run on several hosts, which an inventory lists or will have to list."""
    backend: str = ""
    """Backend of the ranks' collectives, as configured; "" or "off": not decided."""
    sharding: str = ""
    """Configured way of splitting the model."""
    expert_stats: ExpertsReported | None = None
    """Measured loads of routed experts, by which their shares are to be proposed."""
    expert_shares: list[int] = dataclasses.field(default_factory=list)
    """`world.expert_shares`."""
    world_note: str = ""
    """Needs of a world for its RDMA devices, or a fault of its files, one sentence."""


@click.command(cls=Command)
@file_option("--config", "TOML file with settings for every role.")
@file_option("--inventory", "TOML file of several hosts.")
@click.option(
    "--model", metavar="PATH_OR_HF_ID", type=click.Path(), help="A folder, a downloaded id, demo."
)
@click.option(
    "--draft-model", metavar="PATH_OR_HF_ID", type=click.Path(), help="Every rank holds all of it."
)
@click.option(
    "--memory", metavar="SIZES", help="Of each host, like 512GB,192GB (default: this machine)."
)
@click.option(
    "--usable",
    "usable_share",
    metavar="SHARE",
    type=float,
    help="Share of memory that a GPU may use, 0 to 1.",
)
@click.option("--ranks", metavar="N", type=int, help="With one size: number of such hosts.")
@click.option(
    "--device",
    type=click.Choice(["metal", "cuda", "cpu"]),
    help="Device of the ranks (default: metal with --memory, else that of this machine).",
)
@click.option(
    "--context", "context_tokens", metavar="TOKENS", type=int, help="Length that must fit."
)
@click.option(
    "--sequences", metavar="N", type=int, help="Number of sequences that must fit at once."
)
@click.option("--kv-bits", type=click.Choice(["0", "4", "8"]), help="Bits per number of stored KV.")
@file_option("--expert-stats", "Propose shares of experts by these counts of a running Lockstep.")
@json_option
def plan(*, as_json: bool, **given: Any) -> int:
    """Show how a model fits into memory, before it is loaded.

    Reads config and headers, without weights, network or device. The exit code is 1 if the model,
    or the requested length and number of sequences, does not fit.
    """
    options = PlanOptions(**given)
    planned = make_plan(_inputs(options))
    print_line(json_text(planned) if as_json else render(planned))
    best = planned.recommendation
    fits = best is not None and (
        (options.context_tokens is None and options.sequences is None)
        or (
            best.context_tokens >= planned.asked_context_tokens
            and best.sequences >= planned.asked_sequences
        )
    )
    return limits.EXIT_OK if fits else EXIT_DOES_NOT_FIT


def make_plan(inputs: Inputs) -> MemoryPlan:
    """Read a model's headers, plan every split over the given ranks, and recommend one.

    Raises:
        ConfigError: when the model is missing or damaged, or a setting is wrong.
        UsageError: when the requested length is longer than the model allows.
    """
    config, settings = inputs.config, inputs.config.model
    checkpoint = _read(settings.path, settings.dtype, inputs.kind)
    model = PlannedModel(checkpoint, model_kv(checkpoint), _draft(config, inputs.kind))
    context = checkpoint_files.context_tokens_max(checkpoint.config, settings.context_tokens_max)
    kv_bits = config.rank_worker.kv_bits
    if kv_bits and not model.kv.quantizable():
        raise ConfigError(
            f"rank_worker.kv_bits is {kv_bits}, but this model keeps sliding windows, recurrent or "
            "compressed state, or heads of a width that no group of 32 divides: set it to 0."
        )
    asked = MemoryDemand(
        context_tokens=inputs.context_tokens or context,
        sequences=inputs.sequences,
        kv_bits=kv_bits,
        kv_row_growth_tokens=config.scheduler.kv_row_growth_tokens,
        kv_bytes_max=config.rank_worker.kv_bytes_max,
        weight_copies=config.rank_worker.weight_copies,
        backend=inputs.backend,
        vocabulary=config.world.split_vocabulary,
        expert_shares=inputs.expert_shares,
    )
    if asked.context_tokens > context:
        raise UsageError(
            f"--context is {asked.context_tokens:,}, but this model allows at most {context:,} "
            "tokens: ask for that length at most, or set model.context_tokens_max."
        )
    choice = recommend.choose(model, inputs.memory, asked)
    recommendation = None
    if choice:
        recommendation = recommend.recommendation(
            model, choice, asked,
            path=settings.path, context_max=context, has_hosts=inputs.has_hosts,
        )  # fmt: skip
    return MemoryPlan(
        model=settings.path,
        model_type=checkpoint.model_type,
        device=inputs.kind,
        weights_bytes=checkpoint.bytes,
        draft_bytes=model.draft.weights_bytes,
        layers=len(checkpoint.layers),
        context_tokens_max=context,
        asked_context_tokens=asked.context_tokens,
        asked_sequences=asked.sequences,
        kv_bits=kv_bits,
        kv_known=model.kv.known,
        memory=inputs.memory,
        options=all_splits(model, inputs.memory, asked),
        fits=recommend.sequence_fits(model, choice, asked, context) if choice else [],
        recommendation=recommendation,
        experts=_propose_experts(model, inputs, asked, choice),
        notes=_notes(model, inputs, recommendation),
    )


def _propose_experts(
    model: PlannedModel, inputs: Inputs, asked: MemoryDemand, choice: recommend.ChosenSplit | None
) -> ExpertProposal | None:
    """Propose shares for the ranks of the recommended split, else for all ranks."""
    if inputs.expert_stats is None:
        return None
    chosen = choice.option.sharding if choice is not None else ""
    wanted = inputs.sharding if inputs.sharding in DIVIDES_EXPERTS else chosen
    sharding: Sharding = "tensor+expert" if wanted == "tensor+expert" else "expert"
    memory = choice.memory if choice is not None and chosen == sharding else inputs.memory
    return propose(model, inputs.expert_stats, sharding, memory, asked)


def _inputs(options: PlanOptions) -> Inputs:
    _check(options)
    share, has_hosts = options.usable_share, True
    flags = {
        "model.path": options.model,
        "speculation.draft_model": options.draft_model,
        "rank_worker.kv_bits": options.kv_bits,
    }
    if options.inventory:
        config, kind, memory = from_inventory.read_inventory_memory(
            options.inventory, flags, options.device, share
        )
        backend, sharding = from_inventory.planned_world(options.inventory)
        expert_shares = from_inventory.configured_shares(options.inventory)
    else:
        config = load_config(options.config, flags, os.environ)
        backend, sharding = config.backend, config.world.sharding
        expert_shares = config.world.expert_shares
        sizes = _sizes(options)
        kind = options.device or ("metal" if sizes else device_of_this_machine())
        ranks = options.ranks or config.world.size
        part = config.rank_worker.memory_share
        memory = (
            memory_of_sizes(sizes, kind, share, machine_share=part)
            if sizes
            else memory_of_this_machine(ranks, kind, share, machine_share=part)
        )
        has_hosts = len(sizes) > 1
    return Inputs(
        config=config,
        kind=kind,
        memory=memory,
        context_tokens=options.context_tokens or 0,
        sequences=options.sequences or 1,
        has_hosts=has_hosts,
        backend=backend,
        sharding=sharding,
        expert_shares=expert_shares,
        expert_stats=expert_file.read(Path(options.expert_stats)) if options.expert_stats else None,
        world_note=_world_note(options, config),
    )


def _world_note(options: PlanOptions, config: Config) -> str:
    uses = {}
    try:
        if options.inventory:
            uses = from_inventory.inventory_rdma_uses(options.inventory)
        else:
            files = read_world_files(config)
            if config.backend == "jaccl":
                uses = rdma_device_uses(config, files.hostfile, files.jaccl_devices)
    except ConfigError as error:
        return f"the world cannot start: {error}".rstrip(".")
    for (machine, device), use in uses.items():
        if use.exceeded:
            return (
                f"{use.explain(f'{device} of {machine}')}, so MLX's init fails there: run one rank "
                "per host, with a cable of its own between each pair of hosts"
            )
    if not uses:
        return ""
    most = max(uses.values(), key=lambda use: use.memory_regions)
    return f"{most.explain('each RDMA device')}, which all processes of its host share"


def _check(options: PlanOptions) -> None:
    if options.inventory and (options.memory or options.ranks or options.config):
        raise UsageError(
            "--inventory lists hosts, memory and settings: leave out --memory, --ranks, --config."
        )
    for name, value in (
        ("ranks", options.ranks),
        ("context", options.context_tokens),
        ("sequences", options.sequences),
    ):
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}: it must be at least 1.")
    if options.ranks is not None and options.ranks > limits.RANKS_MAX:
        raise UsageError(f"--ranks is {options.ranks}: at most {limits.RANKS_MAX} form a world.")
    share = options.usable_share
    if share is not None and not 0.0 < share <= 1.0:
        raise UsageError(f"--usable is {share}: it must be above 0 and at most 1.")


def _sizes(options: PlanOptions) -> list[int]:
    if not options.memory:
        return []
    sizes = parse_sizes(options.memory)
    if options.ranks is not None and len(sizes) == 1:
        sizes *= options.ranks
    if len(sizes) > limits.RANKS_MAX or options.ranks not in (None, len(sizes)):
        raise UsageError(
            f"--memory names {len(sizes)} hosts and --ranks says {options.ranks}: give one size "
            "for all, or one for each rank."
        )
    return sizes


def _find_folder(path: str) -> Path:
    """Return the folder of a model.

    Args:
        path: a folder, "demo", or a Hugging Face id.

    Raises:
        ConfigError: when the model is not on this machine.
    """
    folder = local_folder(path)
    if folder is not None:
        return folder
    config = try_to_load_from_cache(path, "config.json")
    if isinstance(config, str):
        return Path(config).parent
    raise ConfigError(
        f"{path} is not on this machine, and planning downloads nothing: fetch it with "
        f"`hf download {path}`, or name a folder that holds it."
    )


def _read(path: str, dtype: str, kind: DeviceKind) -> Checkpoint:
    folder = _find_folder(path)
    config = checkpoint_files.read_config(folder)
    if dtype == "auto" and kind == "cpu":
        # As the rank worker casts: on the CPU only float32 goes through BLAS.
        dtype = "float32"
    return read_checkpoint(config, checkpoint_files.weight_files(folder), dtype=dtype)


def _draft(config: Config, kind: DeviceKind) -> DraftMemory:
    path = config.speculation.draft_model
    if not path:
        return DraftMemory()
    checkpoint = _read(path, config.model.dtype, kind)
    return DraftMemory(checkpoint.bytes, model_kv(checkpoint).bytes().per_token)


def _notes(model: PlannedModel, inputs: Inputs, recommendation: Recommendation | None) -> list[str]:
    """Return explanations of the figures."""
    slots = inputs.config.scheduler.running_sequences_max
    notes = [
        "the reserve is for activations and MLX itself; resident blocks share the KV budget",
        f"at most {slots} sequences run at once (scheduler.running_sequences_max)",
    ]
    if not model.kv.known:
        notes.insert(
            0,
            "layers of this family keep state whose size is not in the headers, so KV is larger "
            "than shown; `lockstep status` shows it once the model runs",
        )
    if inputs.config.rank_worker.spare == "loaded":
        notes.append("as much memory as the weights take is left for loaded spare processes")
    part = inputs.config.rank_worker.memory_share
    if part and inputs.kind != "cuda":
        notes.append(f"each rank may use {part:g} of its host's memory (rank_worker.memory_share)")
    if inputs.world_note:
        notes.append(inputs.world_note)
    splits = {inputs.sharding, recommendation.sharding if recommendation else ""}
    if inputs.backend == "jaccl" and "pipeline" in splits:
        notes.append(PIPELINE_OVER_JACCL)
    if inputs.kind == "metal" and not Path("/usr/sbin/sysctl").exists():
        notes.append(
            "usable memory is the default share of macOS; `sysctl iogpu.wired_limit_mb` changes it"
        )
    return notes
