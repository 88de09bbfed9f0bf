"""Libraries of NVIDIA whose functions return 0 or an error code. Owns the checks of their calls."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def declare(
    library: ctypes.CDLL,
    functions: Mapping[str, Sequence[Any]],
    describe: Callable[[int], str],
) -> None:
    """Let functions of a library convert their arguments, and raise OSError when they fail.

    The error names the function, and has the library's own words for its code.

    Args:
        library: has the functions.
        functions: types of the arguments, by name of the function.
        describe: returns the library's words for an error code.

    Raises:
        OSError: the library lacks a function.
    """

    def check(code: int, function: Any, _arguments: Any) -> None:
        if not code:
            return
        try:
            words = describe(code)
        except AttributeError:  # the library has no words
            words = str(code)
        raise OSError(f"{function.__name__} failed ({words})")

    for name, types in functions.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise OSError(str(error)) from error
        function.argtypes = types
        function.errcheck = check
