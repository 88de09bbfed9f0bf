"""Rows of token ids from conversations, made by several processes in a fixed order."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tools.demo_model.conversations.chat import END_OF_TEXT, segments
from tools.demo_model.conversations.facts import STORY
from tools.demo_model.conversations.mixture import train_chat
from tools.demo_model.conversations.words import TextSource
from tools.demo_model.tokenizer import MARKERS, SPECIAL_TOKENS, VOCABULARY, load_tokenizer

SHORT_ROW = 512
LONG_ROW = 8192
# Bit 15 of an entry marks a token that the training predicts; the rest is its id.
LEARNED = np.uint16(1 << 15)

Rows = NDArray[np.uint16]


@dataclass(frozen=True)
class ShardShape:
    """Number of rows of each length in one shard, a portion of the training data."""

    short_rows: int
    """Rows of SHORT_ROW tokens."""
    long_rows: int
    """Rows of LONG_ROW tokens."""


def _end_id(tokenizer: Tokenizer) -> int:
    """Return the id of the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    if end is None:
        raise ValueError(f"the tokenizer has no {END_OF_TEXT}")
    return int(end)


def _marked(ids: list[int], is_learned: bool) -> list[int]:
    return [token | int(LEARNED) for token in ids] if is_learned else ids


def _repeated_tokens(source: TextSource, room: int) -> list[int]:
    """Return random tokens twice in a row: they teach copying from any token to any token."""
    plain = VOCABULARY - len(SPECIAL_TOKENS) - len(MARKERS)
    length = source.integer(2, room // 2 - 1)
    if source.chance(0.3):  # few different tokens, so that one token does not give the position
        length = min(length, 200)
        some = [source.integer(0, plain - 1) for _ in range(source.integer(3, 30))]
        ids = [source.rng.choice(some) for _ in range(length)]
    else:
        ids = [source.integer(0, plain - 1) for _ in range(length)]
    # The first tokens of the repetition cannot be predicted: they only start it.
    return ids + ids[:3] + _marked(ids[3:], True)


def _story(source: TextSource, tokenizer: Tokenizer) -> list[int]:
    """Return the long text about Lockstep, from a random sentence on."""
    text = " ".join(STORY[source.integer(0, len(STORY) - 1) :])
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return ids[:4] + _marked(ids[4:], True)


def _encode_documents(
    source: TextSource, tokenizer: Tokenizer, is_long: bool, count: int
) -> list[list[int]]:
    """Return `count` documents as marked token ids, each with the end-of-text token at its end."""
    end = _end_id(tokenizer)
    room = LONG_ROW if is_long else SHORT_ROW
    documents: list[list[int]] = []
    pieces = []
    owners = []
    for number in range(count):
        documents.append([])
        if source.chance(0.06):
            documents[-1] += _repeated_tokens(source, room)
        elif source.chance(0.03):
            documents[-1] += [*_story(source, tokenizer), end | int(LEARNED)]
        else:
            for piece in segments(train_chat(source, is_long)):
                pieces.append(piece)
                owners.append(number)
    texts = [piece.text for piece in pieces]
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    for piece, owner, encoding in zip(pieces, owners, encoded, strict=True):
        documents[owner] += _marked(encoding.ids, piece.is_learned)
    return [[*document, end] for document in documents]


def _pack_rows(documents: list[list[int]], row: int, end: int) -> list[list[int]]:
    """Fill rows first-fit with whole documents; leave out documents longer than a row."""
    rows: list[list[int]] = []
    unfilled: list[list[int]] = []
    for document in documents:
        if len(document) > row:
            continue
        place = next((line for line in unfilled if len(line) + len(document) <= row), None)
        if place is None:
            place = []
            rows.append(place)
            unfilled.append(place)
        place += document
        unfilled = [line for line in unfilled if len(line) < row - 12][-12:]
    return [line + [end] * (row - len(line)) for line in rows]


def make_rows(source: TextSource, tokenizer: Tokenizer, is_long: bool, count: int) -> Rows:
    """Return rows of the training data, each filled with whole conversations.

    Args:
        source: random numbers and texts.
        tokenizer: the tokenizer.
        is_long: whether rows have LONG_ROW instead of SHORT_ROW tokens.
        count: number of rows.

    Returns:
        Token ids, uint16 of shape (count, tokens per row); bit 15 marks a learned token.
    """
    row = LONG_ROW if is_long else SHORT_ROW
    end = _end_id(tokenizer)
    rows: list[list[int]] = []
    while len(rows) < count:
        documents = _encode_documents(source, tokenizer, is_long, max(8, 5 * count))
        rows += _pack_rows(documents, row, end)
    return np.array(rows[:count], dtype=np.uint16)


def make_shard(
    tokenizer: Tokenizer, seed: int, number: int, shape: ShardShape
) -> tuple[Rows, Rows]:
    """Return one shard of the training data; equal arguments give equal rows.

    Args:
        tokenizer: the tokenizer.
        seed: seed of the run.
        number: index of the shard, from 0.
        shape: number of its rows.

    Returns:
        (short rows, long rows), as `make_rows` returns them.
    """
    source = TextSource(f"{seed}/{number}")
    short = make_rows(source, tokenizer, False, shape.short_rows)
    return short, make_rows(source, tokenizer, True, shape.long_rows)


def _make_shards(
    folder: str,
    seed: int,
    first: int,
    stride: int,
    shape: ShardShape,
    queue: multiprocessing.Queue[tuple[Rows, Rows]],
) -> None:
    """Make the shards first, first + stride, ... without end; the process ends with its parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_tokenizer(Path(folder))
    number = first
    while True:
        queue.put(make_shard(tokenizer, seed, number, shape))
        number += stride


def shards(folder: Path, seed: int, workers: int, shape: ShardShape) -> Iterator[tuple[Rows, Rows]]:
    """Yield the shards of the training data in order, without end.

    Args:
        folder: folder of the tokenizer.
        seed: seed of the run.
        workers: number of processes that make the shards; 0: this process makes them.
        shape: number of rows of each shard.

    Yields:
        (short rows, long rows) of one shard, as `make_rows` returns them.
    """
    if workers == 0:
        tokenizer = load_tokenizer(folder)
        number = 0
        while True:
            yield make_shard(tokenizer, seed, number, shape)
            number += 1
    context = multiprocessing.get_context("spawn")
    queues = [context.Queue(maxsize=8) for _ in range(workers)]
    for first, queue in enumerate(queues):
        arguments = (str(folder), seed, first, workers, shape, queue)
        context.Process(target=_make_shards, args=arguments, daemon=True).start()
    while True:
        for queue in queues:
            yield queue.get()
