"""Kernels of ours that are compiled once per machine. Owns the files in which MLX finds them.

MLX compiles such a kernel anew in each process, in seconds, and does not keep the result. But
before it compiles one it looks into the folder where it keeps the kernels of its own. So a rank
compiles a kernel before MLX starts it for the first time, in a fraction of the time, and puts it
there. If this fails, MLX finds nothing and compiles the kernel itself.
"""

import functools
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from services.rank_worker.device.cuda.kept_kernels.compiler import (
    Compiler,
    DoesNotCompileError,
    open_compiler,
)
from services.rank_worker.device.cuda.kept_kernels.mlx_text import (
    INCLUDES_VERSION,
    Definition,
    KernelText,
    Template,
    write_text,
)
from services.rank_worker.device.cuda.variables import KERNELS_VARIABLE
from shared.log import Log
from shared.os import private_files

_log = Log("rank_worker.kernels")

_NAME_MAX = 245
"""Most characters of a file name; MLX splits longer ones into folders."""
_dtype = operator.attrgetter("dtype")


def kept_cuda_kernel(name: str, input_names: Sequence[str], **definition: Any) -> Any:
    """Return a kernel as `mx.fast.cuda_kernel` does, compiled for this start and later ones.

    Nothing is compiled yet.

    Args:
        name: of the kernel.
        input_names: of the arrays that it reads.
        definition: further arguments of `mx.fast.cuda_kernel`; `output_names` and `source` are
            required.
    """
    make: Any = mx.fast.cuda_kernel
    folder = _own_folder()
    if folder is None:
        return make(name=name, input_names=input_names, **definition)
    definition["header"] = f"// {INCLUDES_VERSION}\n{definition.get('header', '')}"
    outputs, source = definition["output_names"], definition["source"]
    text = Definition(name, input_names, outputs, source, definition["header"])
    return KeptKernel(make(name=name, input_names=input_names, **definition), text, folder)


class KernelFolder:
    """The folder of MLX's compiled kernels. Several processes may use it at once."""

    def __init__(self, path: Path, compiler: Compiler) -> None:
        """Prepare.

        Args:
            path: where MLX looks for kernels; need not exist.
            compiler: compiles them.
        """
        self._path = path
        self._compiler = compiler
        self._is_usable = True

    def add(self, text: KernelText) -> None:
        """Compile a kernel into the folder, unless it has it.

        A fault is logged; MLX then compiles the kernel itself.
        """
        if not self._is_usable:
            return
        try:
            self._add(text)
        except DoesNotCompileError as error:
            _log.info("kernel_does_not_compile", kernel=text.name, detail=str(error))
        except OSError as error:
            # It would not be found, or written, the next time either.
            self._is_usable = False
            _log.info("kernels_left_to_mlx", detail=str(error))

    def _add(self, text: KernelText) -> None:
        code_file = code_path(self._path, text.module)
        names_file = code_file.with_suffix(".txt")
        if code_file.exists() and names_file.exists():
            return
        code, symbol = self._compiler.compile(text.text_with_own_includes, text.function)
        code_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # MLX looks for the code, and reads the names when it has found it.
        private_files.replace(names_file, f"{text.function}\t{symbol}\n".encode())
        private_files.replace(code_file, code)
        _log.info("kernel_compiled", kernel=text.name)


class KeptKernel:
    """A kernel as `mx.fast.cuda_kernel` returns it; in the folder before MLX looks for it."""

    def __init__(self, kernel: Any, definition: Definition, folder: KernelFolder) -> None:
        """Wrap a kernel.

        Args:
            kernel: the result of `mx.fast.cuda_kernel`.
            definition: of the kernel.
            folder: where MLX will look.
        """
        self._kernel = kernel
        self._definition = definition
        self._folder = folder
        self._added: set[tuple[Any, ...]] = set()
        """Constants and types for which it was added."""

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_dtypes: Sequence[mx.Dtype],
        template: Template = (),
        **others: Any,
    ) -> Any:
        """Start the kernel.

        Args:
            inputs: arrays that it reads.
            output_dtypes: of those that it writes.
            template: its constants.
            others: arguments that its text does not depend on.

        Returns:
            The arrays that it writes.
        """
        kind = (*template, *map(_dtype, inputs), *output_dtypes)
        if kind not in self._added:
            self._added.add(kind)
            self._folder.add(write_text(self._definition, inputs, output_dtypes, template))
        return self._kernel(inputs=inputs, output_dtypes=output_dtypes, template=template, **others)


def code_path(folder: Path, module: str) -> Path:
    """Return the file in which MLX looks for a compiled kernel.

    Args:
        folder: of all kernels.
        module: what MLX calls the kernel; a long name is divided into folders and a file.
    """
    starts = range(0, len(module), _NAME_MAX)
    *folders, last = (module[start : start + _NAME_MAX] for start in starts)
    return folder.joinpath(*folders, f"{last}.ptx")


def open_folder(environment: Mapping[str, str], facts: Mapping[str, Any]) -> KernelFolder:
    """Return the folder in which MLX looks for kernels.

    Args:
        environment: variables of this process.
        facts: what MLX tells of its device.

    Raises:
        OSError: no folder is set, MLX does not tell the GPU's compute capability, or it has loaded
            no compiler that is known here.
    """
    path = environment.get(KERNELS_VARIABLE)
    if not path:
        raise OSError(f"{KERNELS_VARIABLE} is not set")
    names = ("compute_capability_major", "compute_capability_minor")
    if not all(name in facts for name in names):
        raise OSError("MLX does not tell the device's compute capability")
    major, minor = (int(facts[name]) for name in names)
    package = Path(mx.__file__).parent
    return KernelFolder(Path(path), open_compiler((major, minor), package, environment))


@functools.cache
def _own_folder() -> KernelFolder | None:
    """Return the folder of this process; None if MLX has to compile all kernels."""
    try:
        return open_folder(os.environ, mx.device_info())
    except OSError as error:
        _log.info("kernels_left_to_mlx", detail=str(error))
        return None
