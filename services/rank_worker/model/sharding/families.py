"""What mlx-lm's source says about a model type: can it be sharded, pipelined, has it experts?

Read, not imported: importing a model imports MLX, and this must be answered on machines and in
processes that have no device. Where the source is not to be had nothing is claimed; the model that
is built has the last word (`apply.apply_split`).
"""

import ast
import dataclasses
import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_EXPERTS = {"SwitchGLU", "SwitchMLP"}
"""mlx-lm's layers of routed experts."""
_TOOLS = {"base", "cache", "pipeline", "switch_layers"}
"""Modules beside the models that are none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """What the models of one type can do."""

    shards: bool
    """Its model has a `shard` method."""
    pipelines: bool
    """Its layers can be divided between ranks."""
    has_experts: bool
    """Its source has layers of routed experts; whether a model has, its config says."""


def family(config: dict[str, Any]) -> Family | None:
    """Return what is known of a model's type; None: its source is elsewhere, or not understood."""
    if config.get("model_file"):
        return None
    name = str(config.get("model_type"))
    folder = _models_folder()
    if folder is None or not _NAME.fullmatch(name):
        return None
    name = _renamed(folder).get(name, name)
    return _read(folder, name)


@functools.cache
def _models_folder() -> Path | None:
    # Finding a top-level package does not import it.
    found = importlib.util.find_spec("mlx_lm")
    places = found.submodule_search_locations if found is not None else None
    folder = Path(places[0]) / "models" if places else None
    return folder if folder is not None and folder.is_dir() else None


@functools.cache
def _renamed(folder: Path) -> dict[str, str]:
    """Return the types that mlx-lm loads with the code of another."""
    for node in _tree(folder.parent / "utils.py").body:
        if isinstance(node, ast.Assign) and _targets(node) == ["MODEL_REMAPPING"]:
            names: dict[str, str] = ast.literal_eval(node.value)
            return names
    return {}


@functools.cache
def _read(folder: Path, name: str) -> Family | None:
    if not (folder / f"{name}.py").is_file():
        return None
    models = [_tree(folder / f"{one}.py") for one in _built_on(folder, name, parts=False)]
    classes = [node for tree in models for node in tree.body if isinstance(node, ast.ClassDef)]
    return Family(
        shards=_shards(folder, name, "Model"),
        pipelines=any(_has(one, "pipeline") or "PipelineMixin" in _bases(one) for one in classes),
        has_experts=any(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in _EXPERTS
            for one in _built_on(folder, name, parts=True)
            for node in ast.walk(_tree(folder / f"{one}.py"))
        ),
    )


def _built_on(folder: Path, name: str, *, parts: bool) -> list[str]:
    """Return a module and those whose models it takes; with `parts`, or anything else."""
    found, waiting = [name], [name]
    while waiting:
        for module, imported, _ in _imports(_tree(folder / f"{waiting.pop()}.py")):
            wanted = parts or imported == "" or imported.endswith(("Model", "LM"))
            if wanted and module not in (*found, *_TOOLS) and (folder / f"{module}.py").is_file():
                found.append(module)
                waiting.append(module)
    return found


def _shards(folder: Path, name: str, model: str) -> bool:
    """Tell whether a class or one that it inherits from has a `shard` method."""
    tree = _tree(folder / f"{name}.py")
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if model in classes:
        bases = _bases(classes[model])
        return _has(classes[model], "shard") or any(_shards(folder, name, one) for one in bases)
    for module, imported, alias in _imports(tree):
        if alias == model and imported and (folder / f"{module}.py").is_file():
            return _shards(folder, module, imported)
    return False


def _imports(tree: ast.Module) -> list[tuple[str, str, str]]:
    """Return (module, name in it, name here) of what comes from mlx-lm's other models.

    For a whole module the name in it is "".
    """
    found = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            for one in node.names:
                alias = one.asname or one.name
                found.append(
                    (node.module, one.name, alias) if node.module else (one.name, "", alias)
                )
    return found


def _has(node: ast.ClassDef, method: str) -> bool:
    return any(isinstance(one, ast.FunctionDef) and one.name == method for one in node.body)


def _bases(node: ast.ClassDef) -> list[str]:
    return [one.id for one in node.bases if isinstance(one, ast.Name)]


def _targets(node: ast.Assign) -> list[str]:
    return [one.id for one in node.targets if isinstance(one, ast.Name)]


@functools.cache
def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])
