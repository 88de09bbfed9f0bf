"""The files of the demo model: layout, size, tokenizer and chat template."""

import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from tests.demo_model.demo_answers import DemoModel
from tests.support.effort import cases
from tools.demo_model.conversations.chat import CHAT_TEMPLATE, TURN_START, segments
from tools.demo_model.conversations.mixture import train_chat
from tools.demo_model.conversations.words import UNICODE_SAMPLES, TextSource
from tools.demo_model.tokenizer import load_tokenizer

MAX_BYTES = 12_000_000
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_demo_model_files_take_at_most_12_mb(folder: Path) -> None:
    """The repository contains the whole model."""
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= MAX_BYTES


def test_demo_model_folder_has_all_files_of_hugging_face_layout(folder: Path) -> None:
    """The folder has all files of the layout and a model card."""
    names = {path.name for path in folder.iterdir()}

    assert names >= {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_demo_model_can_be_split_over_two_and_four_ranks(folder: Path) -> None:
    """The heads and all widths are divisible by 4."""
    config = _read(folder / "config.json")

    assert config["model_type"] == "qwen3"
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (8, 4)
    for size in ("hidden_size", "intermediate_size", "vocab_size"):
        assert config[size] % 4 == 0
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 8192


def test_all_weights_of_demo_model_are_float32(folder: Path) -> None:
    """MLX is fast on a CPU with float32; the output weights are tied to the embedding."""
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        dtypes = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        assert file.metadata() == {"format": "pt"}
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118

    assert dtypes == {"F32"}


def test_demo_model_configs_and_tokenizer_name_the_same_end_token(
    folder: Path, demo: DemoModel
) -> None:
    """config, generation_config and tokenizer name the same end token, <|im_end|>."""
    tokenizer = load_tokenizer(folder)
    end_tokens = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]

    assert _read(folder / "config.json")["eos_token_id"] == end_tokens
    assert _read(folder / "generation_config.json")["eos_token_id"] == end_tokens
    assert demo.tokenizer.eos_token_id == end_tokens[0]
    assert demo.tokenizer.pad_token_id == end_tokens[1]
    assert demo.tokenizer.eos_token_ids == set(end_tokens)


def test_demo_vocabulary_has_exactly_one_token_per_embedding_row(folder: Path) -> None:
    """The markers of turns and tool calls are single tokens."""
    tokenizer = load_tokenizer(folder)

    assert tokenizer.get_vocab_size() == _read(folder / "config.json")["vocab_size"]
    for marker in ("<|im_start|>", "<tool_call>", "</tool_call>", "<tool_response>"):
        assert len(tokenizer.encode(marker).ids) == 1


@settings(max_examples=cases(60, 300))
@given(text=st.text())
def test_demo_tokenizer_decodes_any_encoded_text_unchanged(text: str) -> None:
    """Any Unicode text is decoded unchanged from its tokens."""
    tokenizer = _tokenizer()

    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def _tokenizer() -> Tokenizer:
    return load_tokenizer(Path(__file__).resolve().parents[2] / "models" / "demo")


def test_mlx_lm_streaming_detokenizer_gives_whole_text_of_demo_tokens(demo: DemoModel) -> None:
    """The incremental detokenizer of mlx_lm also joins characters that are split over tokens."""
    for text in (*UNICODE_SAMPLES, "Lockstep is a serving system.\n\n  def f(x):\treturn 1"):
        detokenizer = demo.tokenizer.detokenizer
        for token in demo.tokenizer.encode(text):
            detokenizer.add_token(token)
        detokenizer.finalize()

        assert detokenizer.text == text


def test_demo_chat_template_renders_every_role_and_tool_call(demo: DemoModel) -> None:
    """System, user, assistant with tool calls, and tool messages are rendered."""
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "What is the weather in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    text = demo.tokenizer.apply_chat_template(
        messages, tools=[TOOL], add_generation_prompt=True, tokenize=False
    )

    assert text.startswith("<|im_start|>system\nBe kind.\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text
    assert (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>' in text
    )
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert demo.tokenizer.has_tool_calling


def test_demo_chat_template_renders_json_text_arguments_like_objects(demo: DemoModel) -> None:
    """Arguments of a tool call as JSON text give the same prompt as an object."""
    rendered = [
        demo.tokenizer.apply_chat_template(
            [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": a}}]},
            ],
            tokenize=False,
        )
        for a in ({"x": 1}, '{"x": 1}')
    ]

    assert rendered[0] == rendered[1]


def test_demo_training_data_and_chat_template_give_equal_token_ids_of_conversation(
    folder: Path, demo: DemoModel
) -> None:
    """The training data renders a conversation to the same token ids as the chat template."""
    assert (folder / "chat_template.jinja").read_text(encoding="utf-8") == CHAT_TEMPLATE
    source = TextSource("rendering")
    for number in range(60):
        chat = train_chat(source, is_long=number % 20 == 0)
        pieces = [piece.text for piece in segments(chat)]
        ids = [
            token
            for piece in pieces
            for token in demo.tokenizer.encode(piece, add_special_tokens=False)
        ]

        assert "".join(pieces).startswith(TURN_START)
        assert ids == demo.tokenizer.apply_chat_template(chat.messages, tools=chat.tools or None)


def test_held_out_words_do_not_occur_in_demo_training_data() -> None:
    """The two splits use different words, so accuracy is measured on words that are not in the
    training data."""
    train, held_out = TextSource(0, "train"), TextSource(0, "held_out")
    pool = [f"word{number}" for number in range(400)]

    assert not {train.pick(pool) for _ in range(900)} & {held_out.pick(pool) for _ in range(900)}
