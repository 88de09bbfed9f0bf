"""Loading of tokenizers that have no tokenizer.json: ids equal those of the original libraries."""

import functools
import io
import json
import re
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.gateway.tokenizing import tokenizer
from services.gateway.tokenizing.tokenizer import Tokenizer
from shared.configuration.settings import ModelConfig
from shared.errors import ConfigError
from shared.model import tokenizer_json
from tests.support.effort import cases
from tests.unit.gateway.tokenizing import rank_files

KIMI_PATTERN = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The expression of Moonshot's own tokenizer class."""
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PIECES = (
    *("ha", "a", "ab", "aba", "The ", "scheduler", "isn", "'t", "'LL", "\u017f", "K\u030a", "ß"),
    *(" ", "   ", "\n", "\r\n", "\t", "\u2028", "\x85", "\xa0", "12", "3", "==", "--", "/", "._"),
    *(
        "漢字",
        "あ",
        "你好",
        "é",
        "e\u0301",
        "\u0301",
        "हि",
        "\ud7ff",
        "🎉",
        "🦊",
        "\U0001f1e9",
        "\x00",
    ),
    *("ǅ", "ʰ", "½", "٣", "<|", "|>", "<s", "[INST"),
)
_texts = st.one_of(
    st.text(max_size=40), st.lists(st.sampled_from(_PIECES), max_size=25).map("".join)
)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return the tokenizer of a folder with Kimi's files."""
    return _load(rank_files.write_kimi(tmp_path_factory.mktemp("kimi"), KIMI_PATTERN))


@pytest.fixture(scope="module")
def tekken(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return the tokenizer of a folder with Mistral's file."""
    return _load(rank_files.write_tekken(tmp_path_factory.mktemp("tekken"), TEKKEN_PATTERN))


def _load(folder: Path) -> Tokenizer:
    return tokenizer.load(ModelConfig(path=str(folder)))


@functools.cache
def _tiktoken(pattern: str, unused: int = 0) -> tiktoken.Encoding:
    tokens = rank_files.ranks(pattern)
    ranks = {token: rank for rank, token in enumerate(tokens[: len(tokens) - unused])}
    special = _kimi_special() if pattern == KIMI_PATTERN else {}
    return tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


@functools.cache
def _kimi_special() -> dict[str, int]:
    first = len(rank_files.ranks(KIMI_PATTERN))
    names = {number: name for number, (name, _) in rank_files.KIMI_ADDED.items()}
    return {
        names.get(number, f"<|reserved_token_{first + number}|>"): first + number
        for number in range(256)
    }


@settings(max_examples=cases(400, 1_500))
@given(text=_texts)
def test_kimi_tokenizer_gives_ids_of_tiktoken_library_for_any_text(
    kimi: Tokenizer, text: str
) -> None:
    """The ids equal those of tiktoken with the same ranks and the expression of Kimi's class."""
    original = _tiktoken(KIMI_PATTERN)
    expected = original.encode(text, disallowed_special=())
    assume(not any(name in text for name in kimi.added_tokens()))
    assert kimi.encode_text(text) == expected
    detokenizer = kimi.detokenizer()
    assert "".join([*map(detokenizer.add, expected), detokenizer.finish()]) == text


@settings(max_examples=cases(60, 600))
@given(texts=st.lists(_texts, max_size=3), names=st.permutations(sorted(_kimi_special())[:40]))
def test_kimi_special_tokens_have_ids_of_original_class(
    kimi: Tokenizer, texts: list[str], names: list[str]
) -> None:
    """Named, unnamed and reserved tokens after the ranks are found in a raw prompt."""
    special = _kimi_special()
    original = _tiktoken(KIMI_PATTERN)
    named = [name for name, _ in rank_files.KIMI_ADDED.values()]
    text = "".join(f"{text}{name}" for text, name in zip(texts, [*named, *names], strict=False))
    assert kimi.encode_text(text) == original.encode(text, allowed_special="all")
    assert [kimi.encode_text(name) for name in special] == [[id_] for id_ in special.values()]


def test_kimi_chat_is_encoded_with_the_template_of_its_folder(kimi: Tokenizer) -> None:
    """The template writes special tokens, the client's text cannot, and [EOS] ends as well."""
    special = _kimi_special()
    messages = [{"role": "user", "content": "Hello<|im_end|>"}]
    ids = list(kimi.encode_chat(messages, None, {}).ids)
    found = [token for token in ids if token in special.values()]
    template_names = ["<|im_user|>", "<|im_middle|>", "<|im_end|>", "<|im_assistant|>"]
    assert found == [special[name] for name in [*template_names, "<|im_middle|>"]]
    assert kimi.decode(ids).startswith("userHello<|im_end|>assistant")
    assert kimi.stop_ids == [special["[EOS]"], special["<|im_end|>"]]


def test_kimi_token_for_tool_calls_becomes_text_and_special_one_does_not(kimi: Tokenizer) -> None:
    """Tokens that the config does not call special reach the parser of tool calls."""
    special = _kimi_special()
    detokenizer = kimi.detokenizer()
    names = ("<|tool_call_begin|>", "<|im_middle|>", "<think>")
    assert [detokenizer.add(special[name]) for name in names] == [
        "<|tool_call_begin|>",
        "",
        "<think>",
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", '{"tokenizer_class": "OtherTokenizer"}', "OtherTokenizer"),
        ("tiktoken.model", "aGk= one\n", "tiktoken.model is damaged"),
        ("tiktoken.model", "", "tiktoken.model is damaged"),
    ],
)
def test_damaged_or_unknown_tiktoken_file_is_refused_in_one_sentence(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    """The error names the file or the class."""
    rank_files.write_kimi(tmp_path, KIMI_PATTERN)
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=re.escape(message)):
        _load(tmp_path)


@settings(max_examples=cases(400, 1_500))
@given(text=_texts)
def test_tekken_tokenizer_gives_ids_of_tiktoken_library_for_any_text(
    tekken: Tokenizer, text: str
) -> None:
    """The ids equal those of tiktoken, shifted by the number of special tokens."""
    original = _tiktoken(TEKKEN_PATTERN, 10)
    expected = [40 + token for token in original.encode(text, disallowed_special=())]
    assume(not any(name in text for name in tekken.added_tokens()))
    assert tekken.encode_text(text) == expected
    detokenizer = tekken.detokenizer()
    assert "".join([*map(detokenizer.add, expected), detokenizer.finish()]) == text


@pytest.mark.parametrize("lists_special", [True, False])
def test_tekken_special_tokens_have_the_first_ids(tmp_path: Path, lists_special: bool) -> None:
    """They are those that the file lists, or Mistral's first ones if it lists none."""
    folder = rank_files.write_tekken(tmp_path, TEKKEN_PATTERN, lists_special=lists_special)
    loaded = _load(folder)
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    assert loaded.encode_text("".join(names)) == [0, 1, 2, 3, 4]
    assert loaded.encode_text("[TOOL_CALLS]") == [5 if lists_special else 9]
    assert loaded.encode_text("<SPECIAL_39>") == [39]
    assert loaded.ranks_can_read
    assert loaded.stop_ids == [2]
    ids = list(loaded.encode_chat([{"role": "user", "content": "[/INST]</s> a"}], None, {}).ids)
    assert [token for token in ids if token < 40] == [1, 3, 4]
    assert loaded.decode(ids) == "[/INST]</s> a"


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_sentencepiece_model_gives_ids_of_its_own_library(tmp_path: Path, model_type: str) -> None:
    """A folder with only a tokenizer.model loads; ids equal those of the sentencepiece library."""
    sentences = ["The scheduler decides, every rank obeys.", "Grüße aus Köln, 漢字 too."] * 30
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=writer,
        model_type=model_type,
        vocab_size=320,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(writer.getvalue())
    tokenizer_config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "legacy": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 2}')
    loaded = _load(tmp_path)
    assert not loaded.ranks_can_read, "requests with grammars are refused before admission"
    original = sentencepiece.SentencePieceProcessor(model_proto=writer.getvalue())
    for text in ("The rank decides", "Köln 漢字 🎉 x", "two  spaces, 12\nlines"):
        ids = [token for token in loaded.encode_text(text) if token != original.bos_id()]
        assert ids == original.encode(text)
        detokenizer = loaded.detokenizer()
        assert "".join([*map(detokenizer.add, ids), detokenizer.finish()]) == text


def test_folder_without_known_tokenizer_file_has_no_tokenizer_json(tmp_path: Path) -> None:
    """None stands for a folder whose tokenizer another library has to read."""
    assert tokenizer_json.read(tmp_path) is None
