"""Writes the folder of a model that follows a script."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from services.gateway.tokenizing.loading import load_inner
from shared.configuration.settings import ModelConfig
from tests.clients.model import scripted_model
from tests.clients.model.families import Family
from tests.clients.model.script import Script, Step

CONTEXT_TOKENS_MAX = 262_144
"""Room for a client's tools, prompt and history, as in the models that agents run with."""


def write_model(folder: Path, family: Family, script: Script) -> Path:
    """Write config, tokenizer, chat template, weights and code of a model, and return the folder.

    Args:
        folder: an empty folder.
        family: whose tokenizer, template and format of calls the model has.
        script: its answers.
    """
    family.write_tokenizer(folder, script.cues)
    tokenizer = load_inner(folder, ModelConfig(path=str(folder)))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def token(word: str) -> int:
        (found,) = encode(word)
        return found

    texts = [family.answer(step) for step in [Step("", script.default), *script.steps]]
    answers = [encode(text) for text in texts]
    longest = max(map(len, answers)) + 1
    # A plan is one step ahead, so a token after the end is computed and dropped.
    table = np.array([ids + [ids[-1]] * (longest - len(ids)) for ids in answers], dtype=np.int32)
    # Added tokens may have gaps between them.
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    steps = np.zeros((2, vocab_size), dtype=np.int32)
    for number, step in enumerate(script.steps, 1):
        steps[0 if step.needs_tools else 1, token(step.cue)] = number
    places = scripted_model.BASE ** np.arange(scripted_model.HEADS)
    digits = np.arange(vocab_size)[:, None] // places % scripted_model.BASE
    tensors = {
        "model.embed_tokens.weight": digits.astype(np.float32),
        "model.steps": steps,
        "answers": table,
    }
    save_file(tensors, folder / "model.safetensors", {"format": "mlx"})
    stops = [token(stop) for stop in family.stops]
    config = {
        "model_type": family.model_type,
        "model_file": "model.py",
        "vocab_size": vocab_size,
        "hidden_size": scripted_model.HEADS,
        "num_hidden_layers": 1,
        "num_attention_heads": scripted_model.HEADS,
        "num_key_value_heads": scripted_model.HEADS,
        "head_dim": 1,
        "max_position_embeddings": CONTEXT_TOKENS_MAX,
        "eos_token_id": stops,
        "step_count": len(texts),
        "answer_tokens_max": longest,
        "openings": [encode(opening) for opening in family.openings],
        "message_start": token(family.message_start) if family.message_start else -1,
        "tools_token": token(family.tools_token),
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    shutil.copy(scripted_model.__file__, folder / "model.py")
    return folder
