"""Times of grammars on one rank, without a model: tokenizer, compilation, masks.

A process of its own, which prints one JSON object.

    python -m services.commands.bench.serving.mask_times MODEL_FOLDER ROWS STEPS
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from services.commands.bench.measuring.numbers import percentile
from shared.messages import Grammar

END_ID = 0
"""Ends completions; the grammar below never accepts, so it is never allowed."""

_RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "color": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9_999},
        "is_new": {"type": "boolean"},
        "date": {"type": "string", "pattern": "^20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]$"},
    },
    "required": ["name", "color", "count", "is_new", "date"],
    "additionalProperties": False,
}


def schema(number: int) -> dict[str, Any]:
    """Return a JSON schema of a list too long to end, unlike that of any other number.

    Its parts are bounded, so that any model passes through all of them again and again.

    Args:
        number: distinguishes schemas, so that each is compiled.
    """
    properties = {**_RECORD["properties"], f"field_{number}": {"type": "null"}}
    record = {**_RECORD, "properties": properties, "required": list(properties)}
    return {"type": "array", "items": record, "minItems": 10_000}


def measure(folder: Path, rows: int, steps: int) -> dict[str, float]:
    """Read a tokenizer, compile one grammar per row, and fill the masks of many steps.

    Each row takes a random token that its mask allows.

    Args:
        folder: the model's folder.
        rows: number of sequences.
        steps: number of masks of each.

    Returns:
        tokenizer_s; compile_ms_p50 and compile_ms_most of one grammar; fill_ms_p50 and fill_ms_p99
        of the masks of all rows; tokens: size of the vocabulary.
    """
    from services.rank_worker.sampling.grammar.compiler import GrammarCompiler
    from services.rank_worker.sampling.grammar.masks import MaskedSequence, MaskFiller

    began_s = time.perf_counter()
    compiler = GrammarCompiler(folder)
    compiler.wait_until_ready()
    tokenizer_s = time.perf_counter() - began_s
    matchers, compile_ms = [], []
    for number in range(rows):
        text = json.dumps({"grammars": [{"json_schema": schema(number)}]})
        began_s = time.perf_counter()
        matchers.append(compiler.matcher(Grammar(text=text, end_ids=[END_ID]), []))
        matchers[-1].ready.result()
        compile_ms.append((time.perf_counter() - began_s) * 1e3)
    tokens = matchers[0].grammar.mask_tokens
    filler = MaskFiller(tokens)
    sequences = [MaskedSequence(number, one, []) for number, one in enumerate(matchers)]
    random = np.random.default_rng(1)
    fill_ms = []
    for _ in range(steps):
        began_s = time.perf_counter()
        masks = filler.fill(sequences)
        fill_ms.append((time.perf_counter() - began_s) * 1e3)
        if masks.failures:
            raise RuntimeError(masks.failures[0].detail)
        for matcher, bits in zip(matchers, masks.bits, strict=True):
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            matcher.take([int(random.choice(allowed))])
    return {
        "tokenizer_s": tokenizer_s,
        "compile_ms_p50": percentile(compile_ms, 0.5),
        "compile_ms_most": max(compile_ms),
        "fill_ms_p50": percentile(fill_ms, 0.5),
        "fill_ms_p99": percentile(fill_ms, 0.99),
        "tokens": tokens,
    }


if __name__ == "__main__":
    result = measure(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.write(json.dumps(result) + "\n")
