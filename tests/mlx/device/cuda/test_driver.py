"""CUDA's driver: what our calls give it, and the words of its errors. A driver on the CPU."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

from services.rank_worker.device.cuda import driver
from services.rank_worker.device.cuda.driver import HANDLE_BYTES, Driver
from tests.mlx.device.cuda.driver_on_cpu import compile_driver

SIZE = 1_000


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compile the driver."""
    return str(compile_driver(tmp_path_factory.mktemp("driver")))


@pytest.fixture
def opened(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Return the driver, whose memory is files of this test."""
    monkeypatch.setenv("MEMORY_FOLDER", str(tmp_path))
    return Driver(library)


def test_memory_that_is_opened_by_its_handle_has_the_bytes_of_its_owner(opened: Driver) -> None:
    """At another address, beyond 32 bits as the first one is; cleared memory is zero."""
    address = opened.allocate(SIZE)
    handle = opened.handle_of(address)
    assert len(handle) == HANDLE_BYTES
    there = opened.open(handle)
    assert there != address > 2**32

    opened.write(address, b"\0\1\2")
    assert opened.read(there, 4) == b"\0\1\2\7"
    opened.clear(there, SIZE)
    assert opened.read(address, SIZE) == bytes(SIZE)


def test_page_locked_memory_can_be_written_until_it_is_freed(opened: Driver) -> None:
    """It belongs to this process."""
    address = opened.allocate_page_locked(SIZE)
    ctypes.memmove(address, b"x" * SIZE, SIZE)
    assert ctypes.string_at(address, SIZE) == b"x" * SIZE
    opened.free_page_locked(address)


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("cuMemsetD8_v2", lambda opened: opened.clear(opened.allocate(SIZE), SIZE)),
        ("cuMemHostAlloc", lambda opened: opened.allocate_page_locked(SIZE)),
    ],
)
def test_error_names_the_function_and_has_cudas_words_for_its_code(
    function: str, call: Callable[[Driver], object], opened: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator finds these words on the web."""
    monkeypatch.setenv("FAULT", function)
    with pytest.raises(
        OSError, match=rf"^{function} failed \(CUDA_ERROR_OUT_OF_MEMORY: out of memory\)$"
    ):
        call(opened)


def test_error_code_that_cuda_does_not_know_is_a_number(opened: Driver) -> None:
    """A driver may be newer than its words."""
    with pytest.raises(OSError, match=r"^cuIpcGetMemHandle failed \(1\)$"):
        opened.handle_of(opened.allocate(SIZE) + 1)


def test_driver_that_is_missing_or_lacks_a_function_is_one_kind_of_error(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the library or the function."""
    with pytest.raises(OSError, match="libnone"):
        Driver("libnone.so.1")
    monkeypatch.setitem(driver._FUNCTIONS, "cuNone", [])
    with pytest.raises(OSError, match="cuNone"):
        Driver(library)
