"""Removes a prefix from the exported names of a shared library, in an in-memory copy. No MLX.

`scipy-openblas32` exports `scipy_cblas_sgemm`, but MLX needs `cblas_sgemm`. A name in an ELF file
is an offset into a string table, so removing a prefix increases the offset. Only the hash table
over the names (section `.gnu.hash`) must be rebuilt.
"""

import struct
from collections.abc import Iterator

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_TYPE_DYNAMIC_SYMBOLS = 11
_TYPE_GNU_HASH = 0x6FFFFFF6
_WORD_BITS = 64


class UnsupportedLibraryError(ValueError):
    """Raised when bytes are not a 64-bit little-endian ELF library with a GNU hash table."""


def remove_prefix(library: bytes, prefix: bytes) -> bytes:
    """Return a copy of a shared library with `prefix` removed from its exported names.

    Args:
        library: content of the library's file.
        prefix: beginning of the names to change; other names stay.

    Raises:
        UnsupportedLibraryError: when the library is not a 64-bit little-endian ELF file.
    """
    image = bytearray(library)
    try:
        sections = list(_sections(image))
        symbols = next(part for part in sections if part[1] == _TYPE_DYNAMIC_SYMBOLS)
        table = next(part for part in sections if part[1] == _TYPE_GNU_HASH)
        names_at = sections[symbols[6]][4]
        hashes = []
        for at in range(symbols[4], symbols[4] + symbols[5], _SYMBOL.size):
            name_at = names_at + struct.unpack_from("<I", image, at)[0]
            name = bytes(image[name_at : image.index(0, name_at)])
            if name.startswith(prefix):
                name = name[len(prefix) :]
                struct.pack_into("<I", image, at, name_at - names_at + len(prefix))
            hashes.append(_hash(name))
        _write_hash_table(image, table[4], table[5], hashes)
    except (struct.error, StopIteration, IndexError, ValueError) as error:
        raise UnsupportedLibraryError(str(error)) from None
    return bytes(image)


def _sections(image: bytearray) -> Iterator[tuple[int, ...]]:
    """Yield each section: name, type, flags, address, offset, size, link, info, and so on."""
    if image[:6] != b"\x7fELF\x02\x01":
        raise UnsupportedLibraryError("not a 64-bit little-endian ELF file")
    start = struct.unpack_from("<Q", image, 40)[0]
    size, count = struct.unpack_from("<HH", image, 58)
    for index in range(count):
        yield _SECTION.unpack_from(image, start + index * size)


def _write_hash_table(image: bytearray, at: int, size: int, hashes: list[int]) -> None:
    """Replace the hash table by one with a single bucket.

    With several buckets the symbols would have to be sorted again and all relocations changed. The
    Bloom filter still rejects almost all lookups of missing names.
    """
    _, first, filter_words, shift = struct.unpack_from("<IIII", image, at)
    words = [0] * filter_words
    for value in hashes[first:]:
        words[value // _WORD_BITS % filter_words] |= (
            1 << value % _WORD_BITS | 1 << (value >> shift) % _WORD_BITS
        )
    chain = [value & ~1 for value in hashes[first:]]
    chain[-1] |= 1
    table = struct.pack(
        f"<IIII{filter_words}QI{len(chain)}I", 1, first, filter_words, shift, *words, first, *chain
    )
    if len(table) > size:
        raise UnsupportedLibraryError("the hash table has no room")
    image[at : at + size] = table.ljust(size, b"\0")


def _hash(name: bytes) -> int:
    value = 5381
    for letter in name:
        value = value * 33 + letter & 0xFFFFFFFF
    return value
