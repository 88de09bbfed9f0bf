"""Small tokenizers of the three kinds that the gateway tells apart, trained in a moment."""

import functools

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

_TEXT = [
    "The scheduler decides, every rank obeys. Tensors by collectives, orders by messages.",
    "Hello, how are you? I am fine, thank you. One two three four five six seven.",
    "Grüße aus Köln, 漢字 and 🎉 are text too.   Spaces,\n\nlines.",
] * 20
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_SPACE = "\u2581"


@functools.cache
def byte_level() -> Tokenizer:
    """Byte-level BPE, as in GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=_SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    # Added tokens that are not special become text; one is outside of the alphabet.
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("漢 字")])
    return tokenizer


@functools.cache
def byte_fallback(*, strips: bool = True) -> Tokenizer:
    """Pieces with byte fallback, as in Llama 2, Mistral (which strip a first space) and Gemma."""
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
    """Pieces with a decoder that the gateway has no table for."""
    pieces = [_SPACE, *"abcdefghijklmnopqrstuvwxyz.,!?漢ü", f"{_SPACE}the", f"{_SPACE}a", "in"]
    vocabulary = [("<unk>", 0.0), *((piece, -1.0) for piece in pieces)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer
