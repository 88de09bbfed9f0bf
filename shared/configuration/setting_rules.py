"""Rules across several settings: contradictions, and settings without effect. Pure."""

from shared.configuration.host_addresses import address_fault
from shared.configuration.settings import Config
from shared.errors import ConfigError

PIPELINE_OVER_JACCL = (
    "with some versions MLX's send and receive over jaccl have given wrong data or never ended "
    "when sizes changed from call to call (MLX issue 3149), and Lockstep's pipelines are tested "
    "over ring only, so prefer tensor or expert, or ring"
)
"""Known risk of a pipeline over jaccl, as a clause."""


def check_consistency(config: Config) -> None:
    """Check that settings do not contradict each other, and that those they need are given.

    Several ranks need a backend, jaccl needs devices and a coordinator, pipelining must be enabled,
    two drafting methods need a draft model, and batch invariance excludes some settings.

    Raises:
        ConfigError: when a rule is broken; names the settings and the remedy.
    """
    world, scheduler = config.world, config.scheduler
    if scheduler.step_deadline_min_s > scheduler.step_deadline_max_s:
        raise ConfigError(
            f"scheduler.step_deadline_min_s is {scheduler.step_deadline_min_s:g}, and "
            f"scheduler.step_deadline_max_s is {scheduler.step_deadline_max_s:g}: set the shortest "
            "deadline to at most the longest."
        )
    if config.backend == "off" and world.size > 1:
        raise ConfigError(
            f"world.backend is off, but world.size is {world.size}: "
            "set world.backend to ring, nccl or jaccl, or world.size to 1."
        )
    if config.backend == "jaccl":
        _check_jaccl(config)
    if world.sharding == "pipeline" and not world.enable_pipeline:
        raise ConfigError(
            "world.sharding is pipeline, whose ranks compute one after another (this saves memory, "
            "not time): set world.enable_pipeline (--enable-pipeline-distributed) to allow it."
        )
    check_pipeline(config.backend, config.sharding)
    if world.expert_shares and len(world.expert_shares) != world.size:
        raise ConfigError(
            f"world.expert_shares has {len(world.expert_shares)} numbers, but world.size is "
            f"{world.size}: give one number for each rank, or [] for shares by memory."
        )
    if world.size > 1 and (fault := address_fault(world.data_host)):
        raise ConfigError(
            f"world.data_host is {world.data_host!r}, {fault}: write the address at which other "
            "ranks reach this machine, or 127.0.0.1 if all ranks run on it."
        )
    speculation = config.speculation
    if speculation.method in ("draft_model", "eagle") and not speculation.draft_model:
        raise ConfigError(
            f"speculation.method is {speculation.method}: it needs speculation.draft_model "
            "(--draft-model), a folder or a Hugging Face id."
        )
    if config.rank_worker.batch_invariant and (obstacle := _invariance_obstacle(config)):
        raise ConfigError(
            f"rank_worker.batch_invariant is true, but {obstacle}, so numbers would depend on "
            "other requests: change one of the two."
        )


def _invariance_obstacle(config: Config) -> str:
    """Return what makes results depend on other requests, as a clause; "" if nothing does."""
    if config.speculation.method != "off":
        # The number of drafts depends on the load, and a verified token is computed otherwise.
        return f"speculation.method is {config.speculation.method}, not off"
    if config.rank_worker.fast_path != "auto":
        return f"rank_worker.fast_path is {config.rank_worker.fast_path}"
    if config.vocabulary_split != "off":
        # Some settings of a request have the ranks gather all logits of a step.
        return f"world.split_vocabulary is {config.world.split_vocabulary}"
    if config.world.size > 2:
        # In a ring of three, which rank comes first in a sum depends on the place in the array.
        return f"world.size is {config.world.size}, more than 2"
    return ""


def check_pipeline(backend: str, sharding: str) -> None:
    """Refuse a split into layers over a backend without send and receive.

    Args:
        backend: `world.backend`, or what "auto" stands for.
        sharding: `world.sharding`.

    Raises:
        ConfigError: when the ranks could not send their results to each other.
    """
    if sharding == "pipeline" and (obstacle := pipeline_obstacle(backend)):
        raise ConfigError(
            f"world.sharding is pipeline, but world.backend is {backend}: {obstacle}, which "
            "pipelines need. Set world.sharding to tensor, expert or tensor+expert "
            "(--distributed-sharding), or world.backend to ring."
        )


def pipeline_obstacle(backend: str) -> str:
    """Return why ranks cannot be a pipeline over this backend, as a clause; "" if they can."""
    return "MLX has no send and receive over nccl" if backend == "nccl" else ""


def settings_without_effect(config: Config) -> list[str]:
    """Return one sentence per setting that has no effect or whose value is a known risk."""
    world, sentences = config.world, []
    if config.backend == "off":
        why = (
            "world.backend is off" if world.backend == "off" else "there is only one rank (--ranks)"
        )
        sentences += [f"{key} has no effect: {why}." for key in _changed_distributed(config)]
    elif config.backend != "jaccl":
        sentences += [
            f"{key} has no effect: world.backend is {config.backend}, not jaccl."
            for key in _changed_jaccl(config)
        ]
    if world.size == 1 and world.sharding not in ("auto", "tensor"):
        sentences.append(
            f"world.sharding has no effect: a model is not split over 1 rank by {world.sharding}."
        )
    if world.expert_shares and config.sharding not in ("expert", "tensor+expert"):
        sentences.append(
            f"world.expert_shares has no effect: world.sharding is {config.sharding}, not expert "
            "or tensor+expert."
        )
    if world.canary_prompt_s and not world.canary and world.size > 1:
        sentences.append("world.canary_prompt_s has no effect: world.canary is off.")
    if config.backend == "jaccl" and config.sharding == "pipeline":
        sentences.append(f"world.sharding is pipeline: {PIPELINE_OVER_JACCL}.")
    if world.metal_fast_synch == "on":
        sentences.append(
            "world.metal_fast_synch is on: it can block a Mac's GPU until the next boot, and only "
            'with "auto" the canary decides whether it is used.'
        )
    speculation = config.speculation
    if speculation.draft_model and speculation.method not in ("draft_model", "eagle"):
        sentences.append(
            f"speculation.draft_model has no effect: speculation.method is {speculation.method}, "
            "not draft_model or eagle."
        )
    return sentences


def _check_jaccl(config: Config) -> None:
    world = config.world
    if not world.hostfile and not (world.jaccl_devices and world.jaccl_coordinator):
        raise ConfigError(
            "world.backend is jaccl: it needs world.jaccl_devices (--distributed-ibv-devices) and "
            "world.jaccl_coordinator (--distributed-jaccl-coordinator), or world.hostfile "
            "(--distributed-hostfile), which holds both."
        )
    if world.jaccl_coordinator:
        host, _, port = world.jaccl_coordinator.rpartition(":")
        is_port = port.isdecimal() and 0 < int(port) < 65_536
        if ":" in host or not is_port or address_fault(host):
            raise ConfigError(
                f"world.jaccl_coordinator is {world.jaccl_coordinator!r}: write host:port, an "
                "IPv4 address or a name of rank 0 that all ranks reach."
            )


def _changed_distributed(config: Config) -> list[str]:
    """Return the keys of changed settings that apply to several ranks only."""
    world = config.world
    changed = {
        "world.backend": world.backend not in ("auto", "off"),
        "world.hostfile": world.hostfile,
        "world.sharding": world.sharding == "tensor",
        "world.enable_pipeline": world.enable_pipeline,
        "world.canary_prompt_s": world.canary_prompt_s,
    }
    return [*(key for key, value in changed.items() if value), *_changed_jaccl(config)]


def _changed_jaccl(config: Config) -> list[str]:
    world = config.world
    changed = {
        "world.jaccl_devices": world.jaccl_devices,
        "world.jaccl_coordinator": world.jaccl_coordinator,
        "world.jaccl_fallback": world.jaccl_fallback == "ring",
    }
    return [key for key, value in changed.items() if value]
