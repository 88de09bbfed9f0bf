"""The model's tokenizer. Owns its prompts, texts and stop ids; needs no weights and no MLX."""

import array
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jinja2

from services.gateway.http.errors import invalid
from services.gateway.output import families
from services.gateway.output.families import OutputFormat
from services.gateway.tokenizing import loading, vocabulary
from services.gateway.tokenizing.detokenizer import (
    ByteFallbackDetokenizer,
    ByteLevelDetokenizer,
    Detokenizer,
    WindowDetokenizer,
)
from services.gateway.tokenizing.encoder import Encoder
from services.gateway.tokenizing.infill import Infill
from services.gateway.tokenizing.prompt import (
    InstructionPrefixes,
    Messages,
    Prompt,
    find_cache_boundaries,
)
from services.gateway.tokenizing.replay.splicing import find_place
from services.gateway.tokenizing.replay.turns import Turn
from services.gateway.tokenizing.template_needs.needs import TemplateNeeds
from services.gateway.tokenizing.template_needs.probing import find_needs
from shared import limits
from shared.configuration.settings import ModelConfig
from shared.errors import ConfigError
from shared.model import tokenizer_json

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
TAIL_CHARS = 256
"""Last characters of a prompt that its completion's parser sees."""
SHRINKING_MAX = 4
"""Most characters that a normalizer turns into one; limits the characters of a prompt."""


class Tokenizer:
    """The model's tokenizer: encodes prompts, decodes completions, has the ids that end them.

    Encoding may run in several threads at once.
    """

    def __init__(
        self,
        inner: Any,
        config: dict[str, Any],
        generation: dict[str, Any],
        output_format: OutputFormat | None = None,
        *,
        ranks_can_read: bool = True,
    ) -> None:
        """Prepare the tokenizer.

        Args:
            inner: the tokenizer of the library `transformers`.
            config: content of the model's config.json.
            generation: content of its generation_config.json; {} without the file.
            output_format: formats of tool calls and reasoning; None: those of the chat template.
            ranks_can_read: the folder has a file from which ranks can read the tokenizer.

        Raises:
            ConfigError: when the model has no usable tokenizer.
        """
        backend = _backend(inner)
        self.ranks_can_read = ranks_can_read
        """Whether ranks can match grammars, for which they need the tokenizer."""
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
        self._stop_names = frozenset(map(self.decode_whole, ([token] for token in self.stop_ids)))
        self._bos: str | None = inner.bos_token
        self._instruction_prefixes = InstructionPrefixes()
        self.output_format = output_format or families.choose(
            _template_text(inner), config, {}, backend.get_vocab()
        )
        """Formats of the model's tool calls and reasoning."""
        self._vocabularies = {
            has_tools: vocabulary.with_special_texts(
                self._vocabulary, backend, self.output_format.special_texts(has_tools=has_tools)
            )
            for has_tools in (False, True)
        }
        """Vocabularies of completions in conversations, by whether the model may call tools."""
        self._needs = TemplateNeeds()
        if inner.chat_template is not None:
            self._needs = find_needs(self._try_render, self.output_format.tool_format)

    @functools.cached_property
    def infill(self) -> Infill | None:
        """The model's markers for filling in the middle of a text; None: it has none."""
        return Infill.find(self._backend)

    def digest(self) -> bytes:
        """Return a digest of the tokenizer; equal ids mean equal texts where it is equal."""
        return hashlib.blake2b(self._backend.to_str().encode(), digest_size=16).digest()

    @property
    def has_tool_calls(self) -> bool:
        """Whether the format of the model's tool calls is known."""
        return self.output_format.has_tool_calls

    def added_tokens(self, *, is_flagged: bool = False) -> dict[str, int]:
        """Return the ids of the tokens that were added to the vocabulary, by text.

        Args:
            is_flagged: only those that the tokenizer's file calls special, which text of clients
                cannot become.
        """
        added = self._backend.get_added_tokens_decoder()
        return {
            token.content: number
            for number, token in added.items()
            if token.special or not is_flagged
        }

    def has_special_token(self, value: Any) -> bool:
        """Return whether a text in nested lists and dicts has the text of a special token."""
        return self._encoder.has_special_token(value)

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
        turns: Sequence[Turn] = (),
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
            turns: turns of the conversation that the model wrote, whose own tokens are used.

        Raises:
            ApiError: 400 when the template refuses the messages, or the model has no template.
        """
        if self._inner.chat_template is None:
            raise invalid("The model has no chat template: use /v1/completions.", "model")
        if tools:
            arguments = {**self._needs.agent_arguments, **arguments}

        def render(fields: Any, *, opens_answer: bool = True) -> str:
            check()
            text = self._render(arguments, fields, opens_answer=opens_answer)
            check()
            return text

        conversation = self._encoder.encode_conversation(
            [messages, tools], render, turns, self._stop_names, self.output_format.simplify
        )
        ids = array.array("i", conversation.ids)
        place = find_place(conversation.text)
        if not 0 < block_tokens <= len(ids):
            return Prompt(ids, place=place, tail=conversation.text[-TAIL_CHARS:])
        return Prompt(
            ids,
            self._instruction_prefixes.count_tokens(
                conversation, messages, tools, arguments, render
            ),
            find_cache_boundaries(conversation, messages, tools, render),
            place,
            tail=conversation.text[-TAIL_CHARS:],
        )

    def _render(self, arguments: dict[str, Any], fields: Any, *, opens_answer: bool) -> str:
        messages, tools = fields
        try:
            return self._needs.render(
                messages,
                functools.partial(
                    self._inner.apply_chat_template,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=opens_answer,
                    **arguments,
                ),
            )
        except _TEMPLATE_ERRORS as error:
            cause = f"{type(error).__name__}: {error}"[:500]
            raise invalid(
                f"The model's chat template refuses these messages: {cause}", "messages"
            ) from None

    def _try_render(
        self, messages: Messages, tools: list[dict[str, Any]] | None, **arguments: Any
    ) -> str | None:
        try:
            text: str = self._inner.apply_chat_template(
                messages, tools=tools, tokenize=False, **arguments
            )
        except _TEMPLATE_ERRORS:
            return None
        return text

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a raw prompt.

        They begin with the beginning-of-sequence token that the tokenizer adds, unless the text has
        it.
        """
        begins = self._bos is not None and text.startswith(self._bos)
        return self._encoder.encode_raw(text, add_special_tokens=not begins)

    def encode_part(self, text: str) -> list[int]:
        """Return the token ids of a text inside a sequence.

        They have nothing that the tokenizer puts at the beginning of a text, such as a space.
        """
        line, ids = (
            self._encoder.encode_raw(one, add_special_tokens=False) for one in ("\n", f"\n{text}")
        )
        if ids[: len(line)] == line:
            return ids[len(line) :]
        # The line break is part of the first token, so the tokenizer adds nothing.
        return self._encoder.encode_raw(text, add_special_tokens=False)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of token ids without special tokens."""
        text: str = self._backend.decode(tokens, skip_special_tokens=True)
        return text

    def decode_whole(self, tokens: list[int]) -> str:
        """Return the text of token ids with special tokens written out."""
        return self._encoder.decode_whole(tokens)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token id's text; for a special token, its name encoded."""
        known = self._vocabulary.token_bytes
        data = known[token] if token < len(known) else b""
        if data and self._vocabulary.kind != "other":
            return data
        text: str = self._backend.decode([token], skip_special_tokens=False)
        return text.encode()

    def detokenizer(self, *, is_chat: bool = False, has_tools: bool = False) -> Detokenizer:
        """Return a new incremental decoder for one completion.

        Args:
            is_chat: write the special tokens out that the parser of the completion needs.
            has_tools: the model may call tools.
        """
        known = self._vocabularies[has_tools] if is_chat else self._vocabulary
        match known.kind:
            case "byte_level":
                return ByteLevelDetokenizer(known)
            case "byte_fallback":
                return ByteFallbackDetokenizer(known)
            case "other":
                return WindowDetokenizer(self.decode, known.written)


def load(config: ModelConfig, progress: Callable[[str], None] | None = None) -> Tokenizer:
    """Load the tokenizer of the configured model.

    Args:
        config: the settings, with the model's path or its id on the hub.
        progress: called with a line of text before a download; None: not called.

    Raises:
        ConfigError: when the tokenizer's files are missing or not valid.
        UnavailableError: when the hub does not answer.
    """
    folder = loading.find_folder(config, progress)
    inner = loading.load_inner(folder, config)
    content = loading.read_json(folder / "config.json")
    output_format = families.choose(
        _template_text(inner),
        content,
        loading.read_json(folder / "tokenizer_config.json"),
        inner.get_vocab(),
        config.tool_format,
        config.reasoning_format,
    )
    return Tokenizer(
        inner,
        content,
        loading.read_json(folder / "generation_config.json"),
        output_format,
        ranks_can_read=tokenizer_json.is_there(folder),
    )


def _template_text(inner: Any) -> str:
    """Return the text of a tokenizer's chat template, or of all if it has several; "" for none."""
    template = inner.chat_template
    if isinstance(template, dict):
        return "\n".join(map(str, template.values()))
    return template or ""


def _backend(inner: Any) -> Any:
    """Return the library's tokenizer that encodes. Raises ConfigError: it has no usable one."""
    backend = getattr(inner, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(
            "The model's tokenizer cannot be converted to a tokenizer.json: use a conversion of "
            "the model that has one."
        )
    if backend.get_vocab(with_added_tokens=False).keys() <= inner.get_added_vocab().keys():
        # The library makes an empty tokenizer for a folder with only a config.json.
        raise ConfigError("The model's folder has no tokenizer: tokenizer.json is missing.")
    return backend


def _stop_ids(*sources: Any) -> list[int]:
    """Return the sorted union of ids given as an int, a list or None."""
    found: set[int] = set()
    for ids in sources:
        items: Iterable[Any] = ids if isinstance(ids, list) else [ids]
        found.update(token for token in items if type(token) is int and token >= 0)
    return sorted(found)[: limits.STOP_IDS_MAX]
