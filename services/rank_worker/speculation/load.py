"""Loads what proposes drafts: a whole draft model, or a head. Every rank holds all of it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from mlx.utils import tree_flatten

from services.rank_worker.collectives import Collectives
from services.rank_worker.model import loading
from services.rank_worker.model.download import download
from services.rank_worker.model.fingerprint import model_fingerprint
from services.rank_worker.model.loading import Needs
from services.rank_worker.model.sharding import Split
from services.rank_worker.speculation.eagle import PADDING_TOKENS
from services.rank_worker.speculation.eagle_head import read_head
from services.rank_worker.speculation.loaded_drafter import LoadedDrafter
from services.rank_worker.speculation.same_tokenizer import check_same_tokenizer
from shared.configuration.settings import Config, ModelConfig
from shared.errors import ConfigError
from shared.model import checkpoint_files
from shared.model.location import local_folder

Report = Callable[[float], None]


def check_draft(config: Config) -> None:
    """Refuse, before anything is loaded, a draft that cannot be used. What must be fetched waits.

    Raises:
        ConfigError: there is no such model, or it does not fit the one that is served.
    """
    method = config.speculation.method
    if method not in {"draft_model", "eagle"}:
        return
    if not config.speculation.draft_model:
        raise ConfigError(
            f'speculation.method is "{method}", but speculation.draft_model names none: set it to '
            "a folder or a Hugging Face id."
        )
    folder, model_folder = (
        local_folder(config.speculation.draft_model),
        local_folder(config.model.path),
    )
    if folder is not None and model_folder is not None:
        _check(config, model_folder, folder)


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedDraft:
    """A draft model or head whose weights are not read yet."""

    needs: Needs
    """What it takes, besides the model that it drafts for."""
    read: Callable[[], LoadedDrafter]
    """Reads it, once. Raises ConfigError: it is damaged or too large."""


def open_draft(
    config: Config, context_tokens_max: int, dtype: mx.Dtype, report: Report
) -> OpenedDraft | None:
    """Find, check and weigh the configured draft model or head; None where ranks propose nothing.

    Args:
        config: says which.
        context_tokens_max: of the model that is served.
        dtype: of that model's hidden states; a head computes in it.
        report: told the fraction, 0 to 1.

    Raises:
        ConfigError: as `check_draft`, or it is damaged.
        UnavailableError: the hub does not answer.
    """
    method = config.speculation.method
    if method not in {"draft_model", "eagle"}:
        return None
    check_draft(config)
    folder = _folder(config.speculation.draft_model, config.model, report)
    _check(config, _folder(config.model.path, config.model, report), folder)
    if method == "eagle":
        return _open_head(folder, dtype)
    settings = msgspec.structs.replace(
        config.model, path=str(folder), context_tokens_max=context_tokens_max
    )

    def tell(_: str, fraction: float) -> None:
        report(fraction)

    source, alone = loading.find(settings, 1, "none"), Collectives(None, 0, 1)
    opened = loading.open_model(settings, source, Split("none", 0, 1), alone, tell)

    def read() -> LoadedDrafter:
        draft = opened.read(tell)
        return LoadedDrafter("draft_model", draft.model, draft.fingerprint)

    return OpenedDraft(opened.needs, read)


def _folder(path: str, settings: ModelConfig, report: Report) -> Path:
    return local_folder(path) or download(path, report, code=settings.trust_remote_code)


def _check(config: Config, model_folder: Path, folder: Path) -> None:
    """Compare what both folders say of themselves."""
    ours = checkpoint_files.text_config(checkpoint_files.read_config(model_folder)).get(
        "vocab_size"
    )
    theirs = checkpoint_files.text_config(checkpoint_files.read_config(folder)).get("vocab_size")
    if config.speculation.method == "draft_model":
        check_same_tokenizer(model_folder, folder, theirs if isinstance(theirs, int) else None)
        return
    if None not in {ours, theirs} and ours != theirs:
        raise ConfigError(
            f"speculation.draft_model: the head in {folder} was made for {theirs} tokens, the "
            f"model in {model_folder} has {ours}: choose its own head."
        )
    if not list(folder.glob(checkpoint_files.WEIGHT_PATTERN)) and list(folder.glob("*.bin")):
        raise ConfigError(
            f"speculation.draft_model: {folder} holds its weights in PyTorch's format only: save "
            "them as model.safetensors."
        )


def _open_head(folder: Path, dtype: mx.Dtype) -> OpenedDraft:
    config, files = checkpoint_files.read_config(folder), checkpoint_files.weight_files(folder)
    head: Any = read_head(config, files)
    head.set_dtype(dtype)
    arrays: dict[str, mx.array] = dict(tree_flatten(head.parameters()))
    fingerprint = model_fingerprint(config, files, dtype="model's", world_size=1, sharding="none")

    def read() -> LoadedDrafter:
        try:
            # One by one, so that what is cast is not held twice.
            for array in arrays.values():
                mx.eval(array)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise ConfigError(f"speculation.draft_model: it cannot be read: {error}.") from error
        return LoadedDrafter("eagle", head, fingerprint)

    per_token = sum(shape.bytes_per_token for shape in head.layer_shapes())
    weight_bytes = sum(array.nbytes for array in arrays.values())
    return OpenedDraft(Needs(weight_bytes, per_token, PADDING_TOKENS * per_token), read)
