"""Block hashes: equal in every process, different for every difference that matters."""

import itertools
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.cache.index.hashes import (
    Chain,
    block_hash,
    checkpoint_hash,
    namespace_of,
    root_hash,
)
from shared.messages.token_ids import pack

NAMESPACE = namespace_of("model", ["layout", "layout"], 16)


def hash_chain(tokens: list[int], salt: str = "", namespace: str = NAMESPACE) -> Chain:
    """Return the hash chain of all whole blocks of 16 tokens."""
    chain = Chain(root_hash(namespace, salt), 16, tokens)
    chain.extend()
    return chain


def test_block_hashes_are_equal_in_processes_with_other_hash_seeds() -> None:
    """Another process with another hash seed computes the same hashes."""
    code = (
        "from services.scheduler.cache.index.hashes import *;"
        "c = Chain(root_hash(namespace_of('model', ['layout', 'layout'], 16), 'salt'), 16,"
        " list(range(40)));"
        "c.extend(); print(c.hashes[1].hex(), checkpoint_hash(c.hashes[1]).hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=True,
            text=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    }
    here = hash_chain(list(range(40)), "salt").hashes[1]
    assert seen == {f"{here.hex()} {checkpoint_hash(here).hex()}\n"}


def test_block_hashes_equal_frozen_values() -> None:
    """Block hashes equal frozen values: other hashes would make stored blocks unreadable."""
    assert NAMESPACE == "a53c765d1a8845aeb75026af8e4f105d16e3709069d88ebec31a263a433f0d0a"
    assert hash_chain([7] * 16).hashes[0].hex()[:16] == "3bedd446aca37661"


def test_block_namespace_differs_when_model_layout_or_block_size_differs() -> None:
    """Another model, layout, split, number of ranks or block size gives another namespace."""
    namespaces = [
        NAMESPACE,
        namespace_of("other", ["layout", "layout"], 16),
        namespace_of("model", ["layout", "other"], 16),
        namespace_of("model", ["other", "layout"], 16),
        namespace_of("model", ["layout"], 16),
        namespace_of("model", ["layoutlayout", ""], 16),
        namespace_of("model", ["layout", "layout"], 32),
    ]
    assert len(set(namespaces)) == len(namespaces)
    assert all(len(one) == 64 and int(one, 16) for one in namespaces)


def test_different_cache_salts_have_no_block_hash_in_common() -> None:
    """Two tenants have no block hash in common, for salts with any characters."""
    salts = ["", "a", "b", "ab", "a\0b", "/../x", "\ud800", "x" * 256]
    names = [set(hash_chain(list(range(64)), salt).hashes) for salt in salts]
    assert all(not (one & other) for one, other in itertools.combinations(names, 2))


def test_checkpoint_hash_differs_from_every_block_hash() -> None:
    """No block has the hash of a checkpoint or of a block of another length."""
    parent = root_hash(NAMESPACE, "")
    names = {block_hash(parent, pack([0] * length)) for length in range(1, 40)}
    assert len(names | {checkpoint_hash(name) for name in names}) == 2 * len(names)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=80),
    st.lists(st.integers(0, 3), min_size=1, max_size=80),
)
def test_block_hashes_of_sequences_agree_exactly_before_first_differing_token(
    one: list[int], other: list[int]
) -> None:
    """Two sequences share a block's hash if and only if they share all tokens up to its end."""
    for number, (first, second) in enumerate(
        zip(hash_chain(one).hashes, hash_chain(other).hashes, strict=False)
    ):
        end = 16 * (number + 1)
        assert (first == second) == (one[:end] == other[:end])


def test_growing_sequence_hashes_only_new_blocks() -> None:
    """The hashes of earlier blocks are the same objects afterwards."""
    tokens = list(range(40))
    chain = Chain(root_hash(NAMESPACE, ""), 16, tokens)
    assert chain.extend() == 2
    before = list(chain.hashes)
    tokens.extend(range(40, 100))
    assert chain.extend() == 6
    assert all(one is other for one, other in zip(before, chain.hashes, strict=False))
    assert chain.hashes == hash_chain(tokens).hashes
