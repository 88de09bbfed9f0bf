"""Loading of the tokenizer of the library `transformers` from a model's folder or the hub.

Owns which files are fetched and read. Runs code of the model only with `model.trust_remote_code`.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from services.gateway.tokenizing import typescript_tools
from services.gateway.tokenizing.typescript_tools import declare_tools
from shared.configuration.settings import ModelConfig
from shared.errors import ConfigError
from shared.model import hub, tokenizer_json
from shared.model.location import local_folder

FILES = (
    *("config.json", "generation_config.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("tokenizer.json", "tiktoken.model", "tekken.json", "tokenizer.model", "spiece.model"),
    *("vocab.json", "merges.txt", "vocab.txt"),
)
"""Files that are fetched from the hub, if it has them: configs, chat templates, tokenizers."""
_CODE_FILES = ("*.py", "*.tiktoken")
"""Files that only a tokenizer with code of its own needs."""
_SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
_TEMPLATES_FOLDER = Path(__file__).parent / "templates"
_TEMPLATES = {"deepseek_v32": "deepseek_v32.jinja"}
"""Files of chat templates in this package, by mlx-lm's name of the template or `model_type`."""
_TEKKEN_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def find_folder(config: ModelConfig, progress: Callable[[str], None] | None = None) -> Path:
    """Return the folder with the configured model's tokenizer; fetch it if it is on the hub.

    Args:
        config: the settings, with the model's path or its id on the hub.
        progress: called with a line of text before a download; None: not called.

    Raises:
        ConfigError: when there is no such model.
        UnavailableError: when the hub does not answer.
    """
    folder = local_folder(config.path)
    if folder is not None:
        return folder
    if progress is not None:
        progress(f"fetching the tokenizer of {config.path}")
    files = (*FILES, *_CODE_FILES) if config.trust_remote_code else FILES
    return hub.fetch(config.path, files)


def load_inner(folder: Path, config: ModelConfig) -> Any:
    """Return the tokenizer of a model folder, as an object of the library `transformers`.

    Models that ship a program in place of a chat template get a template of this package, and
    templates that expect their tools as TypeScript get them so.

    Args:
        folder: the model's folder.
        config: the settings of the model.

    Raises:
        ConfigError: when files are missing or not valid.
    """
    # Without PyTorch the library warns on import that it has no models, which are not needed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers  # noqa: PLC0415 - reads the variables above when it is imported

    try:
        content = None
        if not (folder / tokenizer_json.FILE).is_file():
            content = tokenizer_json.read(folder)
        if content is not None:
            inner = _from_content(content, folder, transformers.PreTrainedTokenizerFast)
        else:
            inner = transformers.AutoTokenizer.from_pretrained(
                str(folder),
                trust_remote_code=config.trust_remote_code,
                local_files_only=True,
            )
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        cause = str(error).strip().splitlines()[:1]
        raise ConfigError(
            f"The tokenizer of {config.path} cannot be loaded: {' '.join(cause)}"
        ) from None
    _complete_template(inner, folder)
    return inner


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, {} without the file or if it is no object.

    Raises:
        ConfigError: when the file cannot be read or is not JSON.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read {file}: {error}.") from None
    return value if isinstance(value, dict) else {}


def _from_content(content: str, folder: Path, tokenizer_class: Any) -> Any:
    """Return a tokenizer made of the text of a tokenizer.json that is in no file."""
    settings = read_json(folder / "tokenizer_config.json")
    roles = {} if (folder / tokenizer_json.TIKTOKEN_FILE).is_file() else dict(_TEKKEN_ROLES)
    for role in _SPECIAL_ROLES:
        token = settings.get(role)
        if token is not None:
            roles[role] = token["content"] if isinstance(token, dict) else token
    inner = tokenizer_class(
        tokenizer_object=Backend.from_str(content), clean_up_tokenization_spaces=False, **roles
    )
    inner.chat_template = _chat_template(folder, settings)
    return inner


def _chat_template(folder: Path, settings: dict[str, Any]) -> Any:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if template is None:
        template = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        # Several templates by name, as in older files.
        return {entry["name"]: entry["template"] for entry in template}
    return template


def _complete_template(inner: Any, folder: Path) -> None:
    """Add the part that a model leaves out: its template, or tools as TypeScript."""
    kinds = (
        read_json(folder / "tokenizer_config.json").get("chat_template_type"),
        read_json(folder / "config.json").get("model_type"),
    )
    own = next((_TEMPLATES[kind] for kind in kinds if kind in _TEMPLATES), None)
    if own is not None and inner.chat_template is None:
        inner.chat_template = (_TEMPLATES_FOLDER / own).read_text(encoding="utf-8")
    if typescript_tools.ARGUMENT not in str(inner.chat_template):
        return
    apply = inner.apply_chat_template

    def apply_with_declarations(
        messages: Any, tools: list[dict[str, Any]] | None = None, **arguments: Any
    ) -> Any:
        text = declare_tools(tools) if tools else None
        if text is not None:
            arguments[typescript_tools.ARGUMENT] = text
        return apply(messages, tools=tools, **arguments)

    inner.apply_chat_template = apply_with_declarations
