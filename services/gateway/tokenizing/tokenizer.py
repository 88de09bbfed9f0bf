"""The model's tokenizer. Owns loading it and its stop ids; needs no weights and no MLX.

The files are in the model's folder or, for a Hugging Face id, are downloaded from the hub.
"""

import array
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jinja2

from services.gateway.http.errors import invalid
from services.gateway.tokenizing import tool_calls, vocabulary
from services.gateway.tokenizing.detokenizer import (
    ByteFallbackDetokenizer,
    ByteLevelDetokenizer,
    Detokenizer,
    WindowDetokenizer,
)
from services.gateway.tokenizing.encoder import Encoder
from services.gateway.tokenizing.prompt import InstructionPrefixes, Prompt, find_cache_boundaries
from shared import limits
from shared.configuration.settings import ModelConfig
from shared.errors import ConfigError
from shared.model import hub
from shared.model.location import local_folder

_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions that a chat template may raise when messages do not fit it."""

PROBE_CHARS_PER_TOKEN = 16
"""A text with more characters per token of the context is not encoded whole at first. Text has
about 4 characters per token."""
SHRINKING_MAX = 4
"""Most characters that a normalizer turns into one; limits the characters of a prompt."""


class Tokenizer:
    """The model's tokenizer: encodes prompts, decodes completions, has the ids that end them.

    Encoding may run in several threads at once.
    """

    def __init__(self, inner: Any, config: dict[str, Any], generation: dict[str, Any]) -> None:
        """Prepare the tokenizer.

        Args:
            inner: the tokenizer of the library `transformers`.
            config: content of the model's config.json.
            generation: content of its generation_config.json; {} without the file.

        Raises:
            ConfigError: when the model has no usable tokenizer.
        """
        backend = getattr(inner, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                "The model's tokenizer has no tokenizer.json and cannot be converted to one. "
                "Use a model with a tokenizer.json file."
            )
        if backend.get_vocab(with_added_tokens=False).keys() <= inner.get_added_vocab().keys():
            # The library makes an empty tokenizer for a folder with only a config.json.
            raise ConfigError("The model's folder has no tokenizer: tokenizer.json is missing.")
        self._inner = inner
        self._backend = backend
        self._encoder = Encoder(backend)
        self._vocabulary = vocabulary.read(backend)
        text_config = config.get("text_config") or {}
        own_size = len(self._vocabulary.token_bytes)
        self.vocab_size: int = config.get("vocab_size") or text_config.get("vocab_size") or own_size
        """Number of token ids that the model has."""
        self.stop_ids = _stop_ids(
            config.get("eos_token_id"),
            text_config.get("eos_token_id"),
            generation.get("eos_token_id"),
            inner.eos_token_id,
        )
        """Ids that end a completion."""
        self._bos: str | None = inner.bos_token
        self._instruction_prefixes = InstructionPrefixes()

    @property
    def has_tool_calls(self) -> bool:
        """Whether the chat template uses the `<tool_call>` format of tool calls."""
        return tool_calls.OPENING_TAG in str(self._inner.chat_template)

    def chars_max(self, tokens_max: int) -> int:
        """Return an upper bound of the characters in a text of `tokens_max` tokens."""
        return tokens_max * max(1, self._vocabulary.token_bytes_max) * SHRINKING_MAX

    def surely_exceeds(self, texts: Iterable[str], tokens_max: int) -> bool:
        """Return whether a long text has more than `tokens_max` tokens for sure.

        Only the first characters of a long text are encoded, so that no second is spent on a text
        which is then refused. A short text is not encoded: the answer is False.

        Args:
            texts: the text in pieces.
            tokens_max: number of tokens; 0: unknown, then the answer is False.
        """
        probe_chars = tokens_max * PROBE_CHARS_PER_TOKEN
        pieces: list[str] = []
        chars = 0
        for text in texts:
            pieces.append(text[: probe_chars - chars])
            chars += len(pieces[-1])
            if chars == probe_chars:
                break
        if not chars or chars < probe_chars:
            return False
        probe = self._encoder.encode_raw("".join(pieces), add_special_tokens=False)
        # Where the text is cut, a few tokens are others than in the whole text.
        return len(probe) > 2 * tokens_max

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        arguments: dict[str, Any],
        block_tokens: int = 0,
        check: Callable[[], None] = lambda: None,
    ) -> Prompt:
        """Render a conversation with the model's chat template and encode it to token ids.

        Args:
            messages: the conversation as dicts with `role` and `content`, as chat templates expect
                it.
            tools: the tools as dicts, as chat templates expect them; None: no tools.
            arguments: further arguments of the template, by name.
            block_tokens: size of a cache block; shorter prompts get no cache boundaries. 0 means
                that there is no cache.
            check: called between long steps; it may raise an exception to end the work.

        Raises:
            ApiError: 400 when the template refuses the messages, or the model has no template.
        """
        if self._inner.chat_template is None:
            raise invalid("The model has no chat template: use /v1/completions.", "model")

        def render(fields: Any, *, opens_answer: bool = True) -> str:
            check()
            text = self._render(arguments, fields, opens_answer=opens_answer)
            check()
            return text

        conversation = self._encoder.encode_conversation([messages, tools], render)
        ids = array.array("i", conversation.ids)
        if not 0 < block_tokens <= len(ids):
            return Prompt(ids)
        return Prompt(
            ids,
            self._instruction_prefixes.count_tokens(
                conversation, messages, tools, arguments, render
            ),
            find_cache_boundaries(conversation, messages, tools, render),
        )

    def _render(self, arguments: dict[str, Any], fields: Any, *, opens_answer: bool) -> str:
        messages, tools = fields
        try:
            text: str = self._inner.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=opens_answer,
                **arguments,
            )
        except _TEMPLATE_ERRORS as error:
            cause = f"{type(error).__name__}: {error}"[:500]
            raise invalid(
                f"The model's chat template refuses these messages: {cause}", "messages"
            ) from None
        return text

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a raw prompt.

        They begin with the beginning-of-sequence token that the tokenizer adds, unless the text has
        it.
        """
        begins = self._bos is not None and text.startswith(self._bos)
        return self._encoder.encode_raw(text, add_special_tokens=not begins)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of token ids without special tokens."""
        text: str = self._backend.decode(tokens, skip_special_tokens=True)
        return text

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token id's text; for a special token, its name encoded."""
        known = self._vocabulary.token_bytes
        data = known[token] if token < len(known) else b""
        if data and self._vocabulary.kind != "other":
            return data
        text: str = self._backend.decode([token], skip_special_tokens=False)
        return text.encode()

    def detokenizer(self) -> Detokenizer:
        """Return a new incremental decoder for one completion."""
        match self._vocabulary.kind:
            case "byte_level":
                return ByteLevelDetokenizer(self._vocabulary)
            case "byte_fallback":
                return ByteFallbackDetokenizer(self._vocabulary)
            case "other":
                return WindowDetokenizer(self.decode)


def load(config: ModelConfig, progress: Callable[[str], None] | None = None) -> Tokenizer:
    """Load the tokenizer of the configured model.

    Args:
        config: the settings, with the model's path or its id on the hub.
        progress: called with a line of text before a download; None: not called.

    Raises:
        ConfigError: when the tokenizer's files are missing or not valid.
        UnavailableError: when the hub does not answer.
    """
    folder = local_folder(config.path)
    if folder is None:
        if progress is not None:
            progress(f"fetching the tokenizer of {config.path}")
        folder = hub.fetch(config.path, _FILES)
    # Without PyTorch the library warns on import that it has no models, which are not needed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    try:
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
    return Tokenizer(inner, _json(folder / "config.json"), _json(folder / "generation_config.json"))


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read {file}: {error}.") from None
    return value if isinstance(value, dict) else {}


def _stop_ids(*sources: Any) -> list[int]:
    """Return the sorted union of ids given as an int, a list or None."""
    found: set[int] = set()
    for ids in sources:
        items: Iterable[Any] = ids if isinstance(ids, list) else [ids]
        found.update(token for token in items if type(token) is int and token >= 0)
    return sorted(found)[: limits.STOP_IDS_MAX]
