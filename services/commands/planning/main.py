"""`lockstep plan`: reads configs and headers, no weights, no network, no device."""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import msgspec

from services.commands.planning import from_inventory, recommend
from services.commands.planning.hosts import Kind, Memory, named, this_kind, this_machine
from services.commands.planning.local_model import find_folder
from services.commands.planning.model.checkpoint import Checkpoint, read_checkpoint
from services.commands.planning.model.kv import model_kv
from services.commands.planning.options import Model, PartialOption, PlanRequest, all_options
from services.commands.planning.report import HostMemory, MemoryPlan
from services.commands.planning.sizes import parse_sizes
from services.commands.planning.table import render
from shared import limits
from shared.configuration.loading import load_config
from shared.configuration.settings import Config
from shared.errors import ConfigError, UsageError
from shared.model import checkpoint_files

EXIT_DOES_NOT_FIT = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """What a command line asks for."""

    config: Config
    kind: Kind
    memory: list[Memory]
    context_tokens: int
    """Length that is to fit; 0: the longest that the model allows."""
    sequences: int
    is_asked: bool
    """Whether the length or number of sequences was given."""
    has_hosts: bool
    """Whether ranks are on hosts of an inventory, there already or still to be written."""


def run(options: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, int]:
    """Make a plan.

    Returns:
        What to print, and an exit code: 1 if what was asked for does not fit.

    Raises:
        ConfigError: there is no such model here, it is damaged, or a setting is wrong.
        UsageError: sizes, ranks or lengths make no sense.
    """
    inputs = _inputs(options, environment)
    plan = make_plan(inputs)
    text = msgspec.json.format(msgspec.json.encode(plan)).decode() if options.json else render(plan)
    best = plan.recommendation
    asked = best is not None and (
        best.context_tokens >= plan.asked_context_tokens and best.sequences >= plan.asked_sequences
    )
    fits = asked if inputs.is_asked else best is not None
    return text, limits.EXIT_OK if fits else EXIT_DOES_NOT_FIT


def make_plan(inputs: Inputs) -> MemoryPlan:
    """Read a model's headers and plan for it. Raises as `run`."""
    config, settings = inputs.config, inputs.config.model
    checkpoint = _read(settings.path, settings.dtype, inputs.kind)
    model = Model(checkpoint, model_kv(checkpoint), _draft(config, inputs.kind))
    context = checkpoint_files.context_tokens_max(checkpoint.config, settings.context_tokens_max)
    kv_bits = config.rank_worker.kv_bits
    if kv_bits and not model.kv.quantizable():
        raise ConfigError(
            f"rank_worker.kv_bits is {kv_bits}, but this model keeps sliding windows, recurrent or "
            "compressed state, or heads of a width that no group of 32 divides: set it to 0."
        )
    asked = PlanRequest(
        context_tokens=inputs.context_tokens or context,
        sequences=inputs.sequences,
        kv_bits=kv_bits,
        kv_row_growth_tokens=config.scheduler.kv_row_growth_tokens,
        kv_bytes_max=config.rank_worker.kv_bytes_max,
    )
    if asked.context_tokens > context:
        raise UsageError(
            f"--context is {asked.context_tokens:,}, but this model was made for {context:,} "
            "tokens: ask for at most so many, or set model.context_tokens_max."
        )
    choice = recommend.choose(model, inputs.memory, asked)
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
        memory=[
            HostMemory(host=one.host, total_bytes=one.total_bytes, usable_bytes=one.usable_bytes)
            for one in inputs.memory
        ],
        options=all_options(model, inputs.memory, asked),
        fits=recommend.fits(model, choice, asked, context) if choice else [],
        recommendation=(
            recommend.recommendation(
                model,
                choice,
                asked,
                path=settings.path,
                context_max=context,
                has_hosts=inputs.has_hosts,
            )
            if choice
            else None
        ),
        notes=_notes(model, inputs),
    )


def _inputs(options: argparse.Namespace, environment: Mapping[str, str]) -> Inputs:
    _check(options)
    flags = {
        "model.path": options.model,
        "speculation.draft_model": options.draft_model,
        "rank_worker.kv_bits": options.kv_bits,
    }
    if options.inventory:
        cluster = from_inventory.read_cluster(options.inventory, flags)
        config, sizes, names = cluster.config, cluster.sizes, cluster.names
        usual: Kind = "cuda" if cluster.has_gpus else "metal"
    else:
        config = load_config(options.config, flags, environment)
        sizes, names = _sizes(options), []
        usual = "metal" if sizes else this_kind()
    kind: Kind = options.device or usual
    if sizes:
        memory = named(sizes, kind, options.usable, names)
    else:
        memory = this_machine(options.ranks or config.world.size, kind, options.usable)
    return Inputs(
        config=config,
        kind=kind,
        memory=memory,
        context_tokens=options.context or 0,
        sequences=options.sequences or 1,
        is_asked=options.context is not None or options.sequences is not None,
        has_hosts=bool(options.inventory) or len(sizes) > 1,
    )


def _check(options: argparse.Namespace) -> None:
    if options.inventory and (options.memory or options.ranks or options.config):
        raise UsageError(
            "--inventory names hosts, memory and settings: leave out --memory, --ranks, --config."
        )
    for name in ("ranks", "context", "sequences"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}: it must be at least 1.")
    if options.ranks is not None and options.ranks > limits.RANKS_MAX:
        raise UsageError(f"--ranks is {options.ranks}: at most {limits.RANKS_MAX} form a world.")
    if options.usable is not None and not 0.0 < options.usable <= 1.0:
        raise UsageError(f"--usable is {options.usable}: it is a part, above 0 and up to 1.")


def _sizes(options: argparse.Namespace) -> list[int]:
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


def _read(path: str, dtype: str, kind: Kind) -> Checkpoint:
    folder = find_folder(path)
    config = checkpoint_files.read_config(folder)
    if dtype == "auto" and kind == "cpu":
        # As the rank worker casts: on the CPU only float32 goes through BLAS.
        dtype = "float32"
    return read_checkpoint(config, checkpoint_files.weight_files(folder), dtype=dtype)


def _draft(config: Config, kind: Kind) -> PartialOption:
    path = config.speculation.draft_model
    if not path:
        return PartialOption()
    checkpoint = _read(path, config.model.dtype, kind)
    return PartialOption(checkpoint.bytes, model_kv(checkpoint).bytes().per_token)


def _notes(model: Model, inputs: Inputs) -> list[str]:
    """Return what the figures do not say."""
    slots = inputs.config.scheduler.running_sequences_max
    notes = [
        "the reserve is for activations and MLX itself; resident blocks live in the KV budget too",
        f"at most {slots} sequences run at once (scheduler.running_sequences_max)",
    ]
    if not model.kv.known:
        notes.insert(
            0,
            "layers of this family keep what shapes do not tell: KV is not what is shown; "
            "`lockstep status` says it once the model runs",
        )
    if inputs.kind == "metal" and Path("/usr/sbin/sysctl").exists() is False:
        notes.append("usable memory is macOS' usual part; `sysctl iogpu.wired_limit_mb` moves it")
    return notes
