"""Removal of symbol prefixes from an ELF library, tested on the OpenBLAS package."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from services.rank_worker.device import elf_symbols

PAGE_BYTES = 4_096


def test_elf_reader_refuses_non_elf_32_bit_and_truncated_files() -> None:
    """Files that are not ELF, 32-bit or truncated are refused."""
    for data in (b"", b"MZ" + b"\0" * 64, b"\x7fELF\x01\x01" + b"\0" * 64, b"\x7fELF\x02\x01"):
        with pytest.raises(elf_symbols.UnsupportedLibraryError):
            elf_symbols.remove_prefix(data, b"x_")


def test_library_without_section_table_is_refused() -> None:
    """A library without its section table is refused."""
    if sys.platform != "linux":
        return
    with pytest.raises(elf_symbols.UnsupportedLibraryError):
        elf_symbols.remove_prefix(_library().read_bytes()[: 1 << 20], b"scipy_")


def test_openblas_package_loads_with_working_functions_without_name_prefix() -> None:
    """The function is found without the prefix and multiplies; the prefixed name is not found."""
    if sys.platform != "linux":
        return
    code = """
import ctypes, sys
from services.rank_worker.device import blas
library = blas._load_package()
assert hasattr(library, "cblas_sgemm") and not hasattr(library, "scipy_cblas_sgemm")
row, column, out = (ctypes.c_float * 2)(2, 3), (ctypes.c_float * 2)(5, 7), (ctypes.c_float * 1)()
one, zero = ctypes.c_float(1), ctypes.c_float(0)
library.cblas_sgemm(101, 111, 111, 1, 1, 2, one, row, 2, column, 1, zero, out, 1)
sys.exit(0 if out[0] == 31 else 1)
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_renaming_library_symbols_changes_only_symbol_and_hash_tables() -> None:
    """The copy has the same size and code; only symbol and hash tables differ."""
    if sys.platform != "linux":
        return
    before = _library().read_bytes()
    after = elf_symbols.remove_prefix(before, b"scipy_")
    differing = [
        at
        for at in range(0, len(before), PAGE_BYTES)
        if before[at : at + PAGE_BYTES] != after[at : at + PAGE_BYTES]
    ]
    tables_end = max(
        part[4] + part[5]
        for part in elf_symbols._sections(bytearray(before))
        if part[1] in (elf_symbols._TYPE_DYNAMIC_SYMBOLS, elf_symbols._TYPE_GNU_HASH)
    )

    assert len(after) == len(before)
    assert differing
    assert max(differing) < tables_end


def _library() -> Path:
    spec = importlib.util.find_spec("scipy_openblas32")
    assert spec is not None
    assert spec.origin is not None
    return next((Path(spec.origin).parent / "lib").glob("libscipy_openblas*.so"))
