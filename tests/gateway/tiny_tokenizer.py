"""Byte-level BPE tokenizer with a ChatML template, trained on a few sentences."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from shared.messages import SubmitRequest, token_ids

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{%- if tools %}"
    "{{- '<|im_start|>system\\nCall <tool_call>: ' + (tools | tojson) + '<|im_end|>' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' and message.content == 'refuse me' %}"
    "{{- raise_exception('the template refuses this') }}"
    "{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    "{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)
_TEXT = [
    "The scheduler decides, every rank obeys. Tensors by collectives, orders by messages.",
    "Hello, how are you? I am fine, thank you. One two three four five six seven.",
    "def main() -> int:\n    return 0\n",
    "Grüße aus Köln, 漢字 and 🎉 are text too.",
] * 20


def train() -> Tokenizer:
    """Return the tokenizer, the same each time."""
    return train_byte_level(_TEXT, vocab_size=500, added=["<think>", "</think>"])


def train_byte_level(text: list[str], vocab_size: int, added: list[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer with the special tokens of ChatML.

    Args:
        text: training sentences.
        vocab_size: token ids without `added`.
        added: added tokens that are not special.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.add_tokens([AddedToken(token) for token in added])
    return tokenizer


def write_model_folder(folder: Path) -> Path:
    """Write the model files that a gateway reads, and return the folder."""
    tokenizer = train()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    size = tokenizer.get_vocab_size() + 10
    stop = tokenizer.token_to_id("<|endoftext|>")
    (folder / "config.json").write_text(json.dumps({"vocab_size": size, "eos_token_id": stop}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop]}))
    return folder


TOKENIZER = train()


def completion_tokens(text: str) -> list[int]:
    """Return the tokens of a completion with this text, up to its end."""
    return [*TOKENIZER.encode(text).ids, SPECIAL.index("<|im_end|>")]


def prompt_text(request: SubmitRequest) -> str:
    """Return the text of a request's prompt."""
    ids = token_ids.unpack(request.prompt).tolist()
    return TOKENIZER.decode(ids, skip_special_tokens=False)
