"""Loading of a draft model or an EAGLE head. Every rank holds all of it; proposing is elsewhere."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from mlx.utils import tree_flatten

from services.rank_worker.model.download import download
from services.rank_worker.model.loading.loader import open_model
from services.rank_worker.model.loading.memory_fit import MemoryNeeds
from services.rank_worker.model.loading.source import find_source
from services.rank_worker.peers.collectives import Collectives
from services.rank_worker.speculation.eagle import ROW_PADDING_TOKENS
from services.rank_worker.speculation.eagle_head import load_head
from services.rank_worker.speculation.loaded_drafter import LoadedDrafter
from services.rank_worker.speculation.same_tokenizer import check_same_tokenizer
from shared.configuration.settings import Config, ModelConfig
from shared.errors import ConfigError
from shared.model import checkpoint_files
from shared.model.fingerprint import model_fingerprint
from shared.model.location import local_folder
from shared.model.sharding.shares import Split

ReportFraction = Callable[[float], None]


def check_drafter(config: Config) -> None:
    """Compare the configured drafter with the model: tokenizers or vocabulary sizes must agree.

    Reads only files on this machine: if the drafter or the model must be downloaded first, they are
    not compared. Does nothing if the ranks propose no drafts.

    Raises:
        ConfigError: no drafter is configured, it does not exist, or it does not fit the model.
    """
    method = config.speculation.method
    if method not in {"draft_model", "eagle"}:
        return
    if not config.speculation.draft_model:
        raise ConfigError(
            f'speculation.method is "{method}", but speculation.draft_model is empty: set it to '
            "a folder or a Hugging Face id."
        )
    folder, model_folder = (
        local_folder(config.speculation.draft_model),
        local_folder(config.model.path),
    )
    if folder is not None and model_folder is not None:
        _check_compatible(config, model_folder, folder)


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedDrafter:
    """A draft model or EAGLE head whose weights are not read yet."""

    needs: MemoryNeeds
    """Memory that it needs, besides the model."""
    read: Callable[[], LoadedDrafter]
    """Reads the weights; to be called once. Raises ConfigError if they are damaged or too large."""


def open_drafter(
    config: Config, context_tokens_max: int, dtype: mx.Dtype, report: ReportFraction
) -> OpenedDrafter | None:
    """Find the configured drafter, compare it with the model and compute the memory that it needs.

    Args:
        config: the settings, of which `speculation` names the drafter.
        context_tokens_max: longest sequence of the model that it drafts for, in tokens.
        dtype: of that model's hidden states; an EAGLE head computes in it.
        report: called with the loaded fraction, 0 to 1.

    Returns:
        The drafter, whose weights are not read yet; None if the ranks propose no drafts.

    Raises:
        ConfigError: as `check_drafter`, or the files are damaged.
        UnavailableError: the Hugging Face hub does not answer.
    """
    method = config.speculation.method
    if method not in {"draft_model", "eagle"}:
        return None
    check_drafter(config)
    folder = _folder(config.speculation.draft_model, config.model, report)
    _check_compatible(config, _folder(config.model.path, config.model, report), folder)
    if method == "eagle":
        return _open_head(folder, dtype)
    settings = msgspec.structs.replace(
        config.model, path=str(folder), context_tokens_max=context_tokens_max
    )

    def report_stage(_: str, fraction: float) -> None:
        report(fraction)

    source, single_rank = find_source(settings, 1, "none"), Collectives(None, 0, 1)
    opened = open_model(settings, source, Split("none", 0, 1), single_rank, report_stage)

    def read() -> LoadedDrafter:
        drafter = opened.read(report_stage)
        return LoadedDrafter("draft_model", drafter.model, drafter.fingerprint)

    return OpenedDrafter(opened.needs, read)


def _folder(path: str, settings: ModelConfig, report: ReportFraction) -> Path:
    return local_folder(path) or download(path, report, code=settings.trust_remote_code)


def _check_compatible(config: Config, model_folder: Path, folder: Path) -> None:
    """Compare the configs of both models; raises ConfigError."""
    model_vocab_size, draft_vocab_size = (
        checkpoint_files.text_config(checkpoint_files.read_config(one)).get("vocab_size")
        for one in (model_folder, folder)
    )
    if config.speculation.method == "draft_model":
        check_same_tokenizer(
            model_folder, folder, draft_vocab_size if isinstance(draft_vocab_size, int) else None
        )
        return
    if None not in {model_vocab_size, draft_vocab_size} and model_vocab_size != draft_vocab_size:
        raise ConfigError(
            f"speculation.draft_model: the EAGLE head in {folder} was trained for a vocabulary of "
            f"{draft_vocab_size} tokens, but the model in {model_folder} has "
            f"{model_vocab_size}: choose a head for it."
        )
    if not list(folder.glob(checkpoint_files.WEIGHT_PATTERN)) and list(folder.glob("*.bin")):
        raise ConfigError(
            f"speculation.draft_model: {folder} holds weights in PyTorch's format only: convert "
            "them to model.safetensors."
        )


def _open_head(folder: Path, dtype: mx.Dtype) -> OpenedDrafter:
    config, files = checkpoint_files.read_config(folder), checkpoint_files.weight_files(folder)
    head: Any = load_head(config, files)
    head.set_dtype(dtype)
    arrays: dict[str, mx.array] = dict(tree_flatten(head.parameters()))
    fingerprint = model_fingerprint(config, files, dtype="model's", world_size=1, sharding="none")

    def read() -> LoadedDrafter:
        try:
            # One by one, so that only one array exists in two dtypes at a time.
            for array in arrays.values():
                mx.eval(array)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise ConfigError(
                f"speculation.draft_model: the weights in {folder} cannot be read: {error}."
            ) from error
        return LoadedDrafter("eagle", head, fingerprint)

    per_token = sum(part.bytes_per_token for parts in head.layer_parts() for part in parts)
    weight_bytes = sum(array.nbytes for array in arrays.values())
    return OpenedDrafter(MemoryNeeds(weight_bytes, per_token, ROW_PADDING_TOKENS * per_token), read)
