"""Downloads files of a model from the Hugging Face hub, with one-sentence errors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.errors import ConfigError, UnavailableError


def fetch(name: str, patterns: Sequence[str], progress: type[Any] | None = None) -> Path:
    """Download a model's files, unless they are in the hub client's cache; return their folder.

    Processes of a host share one download.

    Args:
        name: Hugging Face id.
        patterns: glob patterns of the files to download.
        progress: a subclass of tqdm that shows progress; None: the hub client's own.

    Raises:
        ConfigError: when there is no such model, or access is denied.
        UnavailableError: when the hub does not answer and the model is not in the cache.
    """
    import huggingface_hub  # noqa: PLC0415 - slow, and only a model from the hub needs it
    from huggingface_hub import errors  # noqa: PLC0415

    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=list(patterns), tqdm_class=progress
        )
    except errors.GatedRepoError:
        raise ConfigError(
            f"The model {name} is gated: accept its terms on the hub, then run `hf auth login`."
        ) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise ConfigError(
            f"The Hugging Face hub has no model {name}, or it is private: check model.path, and "
            "run `hf auth login` if you have access to it."
        ) from None
    except errors.LocalEntryNotFoundError:
        raise UnavailableError(
            f"The model {name} is not on this machine, and the hub does not answer."
        ) from None
    except (errors.HfHubHTTPError, OSError) as error:
        raise UnavailableError(f"Downloading {name} failed: {error}."[:1_000]) from None
    return Path(folder)
