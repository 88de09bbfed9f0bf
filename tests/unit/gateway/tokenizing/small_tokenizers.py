"""Small tokenizers of the three kinds that the gateway distinguishes."""

import functools

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.gateway import tiny_tokenizer

_TEXT = [
    "The scheduler decides, every rank obeys. Tensors by collectives, orders by messages.",
    "Hello, how are you? I am fine, thank you. One two three four five six seven.",
    "Grüße aus Köln, 漢字 and 🎉 are text too.   Spaces,\n\nlines.",
] * 20
_SPACE = "\u2581"


@functools.cache
def byte_level() -> Tokenizer:
    """Return a byte-level BPE tokenizer, as in GPT-2, Llama 3 and Qwen."""
    # Added tokens that are not special are text; one has characters outside the alphabet.
    return tiny_tokenizer.train_byte_level(_TEXT, vocab_size=400, added=["<think>", "漢 字"])


@functools.cache
def byte_fallback(*, strips: bool = True) -> Tokenizer:
    """Return one with byte fallback, as in Llama 2 and Mistral (first space stripped) and Gemma."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for piece in [_SPACE, *"abcdefghijklmnopqrstuvwxyz.,!?漢ü<0x>", f"{_SPACE}the", "in", "<0xZZ>"]:
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [("i", "n")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    return tokenizer


@functools.cache
def metaspace() -> Tokenizer:
    """Return one with a decoder that the gateway has no table for."""
    pieces = [_SPACE, *"abcdefghijklmnopqrstuvwxyz.,!?漢ü", f"{_SPACE}the", f"{_SPACE}a", "in"]
    vocabulary = [("<unk>", 0.0), *((piece, -1.0) for piece in pieces)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer
