"""Errors before a rank is ready: those of a model's own Python file are named as such."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from services.rank_worker.joining import join
from services.rank_worker.peers.failure import failure_cause, name_model_code_line
from shared.errors import ConfigError, LockstepError, PeerEnded, UnavailableError

Call = Callable[[Callable[[], object]], object]


@pytest.fixture
def import_as(tmp_path: Path) -> Callable[[str], Call]:
    """Return a function that imports a model's own Python file under a module name.

    The imported function calls its argument, as mlx-lm calls code of a model.
    """

    def load(name: str) -> Call:
        path = tmp_path / "model.py"
        path.write_text("def call(function):\n    return function()\n")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function: Call = module.call
        return function

    return load


def _fail(error: BaseException) -> Callable[[], object]:
    def fail() -> object:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "text"),
    [
        # A subclass of RuntimeError that MLX does not raise.
        (NotImplementedError("no caches yet\nmore"), "NotImplementedError: no caches yet"),
        (ValueError(), "ValueError: "),
        (FileNotFoundError(2, "no", "vocab.txt"), "FileNotFoundError: [Errno 2] no: 'vocab.txt'"),
        (SystemExit("needs another library"), "SystemExit: needs another library"),
    ],
)
def test_error_in_model_python_file_names_file_and_line(
    import_as: Callable[[str], Call], error: BaseException, text: str
) -> None:
    """An error in the Python file of a model becomes a ConfigError with file, line and cause."""
    with pytest.raises(ConfigError) as caught, name_model_code_line():
        import_as("custom_model")(_fail(error))

    assert (
        str(caught.value) == "The model's own Python file raises an error before the rank is ready "
        f"(model.py, line 2); correct the file or use another model: {text}"
    )


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[ring] Recv of 4096 bytes failed."),
        RuntimeError("[malloc] Unable to allocate 4096 bytes."),
        MemoryError(),
        OSError(28, "No space left on device"),
        UnavailableError("The hub does not answer."),
    ],
)
def test_lost_peer_or_memory_error_in_model_code_keeps_its_type(
    import_as: Callable[[str], Call], error: Exception
) -> None:
    """Lost peers, a full device and errors of Lockstep itself keep their type."""
    with pytest.raises(type(error)) as caught, name_model_code_line():
        import_as("custom_model")(_fail(error))

    assert caught.value is error


def test_error_outside_model_python_file_keeps_its_type(import_as: Callable[[str], Call]) -> None:
    """Errors of mlx-lm, or of Lockstep code that the model calls, keep their type."""
    with pytest.raises(ValueError, match="no part"), name_model_code_line():
        import_as("mlx_lm.models.llama")(_fail(ValueError("no part")))

    with pytest.raises(AttributeError) as caught, name_model_code_line():
        import_as("custom_model")(lambda: join.needs_data_port(None))  # type: ignore[arg-type]
    assert not isinstance(caught.value, LockstepError)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("[jaccl] Recv failed with errno=2", "peer"),
        ("[jaccl] Recv failed: peer closed the side channel (another rank failed)", "peer"),
        ("[jaccl] Send failed with errno=32", "peer"),
        ("[jaccl] Couldn't connect (error: 61)", "peer"),
        ("[ring] connection to a peer was lost", "peer"),
        ("[jaccl] Could not find device rdma_en9 (1 available)", "error"),
        ("[jaccl] Recv failed with error code 12", "error"),
        ("[jaccl] Couldn't bind socket (error: 48)", "error"),
        ("[jaccl] Changing queue pair to RTR failed with errno 16", "error"),
    ],
)
def test_errors_about_ended_peers_are_told_from_own_causes(text: str, cause: str) -> None:
    """What another rank did gets the cause `peer`; what this rank lacks is its own `error`."""
    assert failure_cause(RuntimeError(text)) == cause
    assert failure_cause(PeerEnded("Joining failed.")) == "peer"
