"""Capabilities of model families, read from mlx-lm's source: sharding, pipelining, experts.

The source is parsed, not imported: importing a model imports MLX, and this also runs on machines
without a device. Without the source nothing is claimed; building the model decides (`apply_split`).
"""

import ast
import dataclasses
import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

_MODEL_TYPE = re.compile(r"[A-Za-z0-9_.\-]+")
_EXPERT_LAYERS = {"SwitchGLU", "SwitchMLP"}
"""mlx-lm's layers of routed experts."""
_HELPER_MODULES = {"base", "cache", "pipeline", "switch_layers"}
"""Modules of `mlx_lm.models` that define no model."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFamily:
    """The ways in which mlx-lm can split models of one type."""

    shards: bool
    """mlx-lm can split the matrices: the model class has a `shard` method."""
    pipelines: bool
    """mlx-lm can give each rank some of the layers."""
    has_experts: bool
    """The source has layers of routed experts; the config says whether a model uses them."""


def model_family(config: dict[str, Any]) -> ModelFamily | None:
    """Return how mlx-lm can split a model's type; None when its source is missing or unknown.

    Args:
        config: the model's config.json.
    """
    if config.get("model_file"):
        return None
    name = str(config.get("model_type"))
    folder = _models_folder()
    if folder is None or not _MODEL_TYPE.fullmatch(name):
        return None
    name = _renamed_types(folder).get(name, name)
    return _parse_family(folder, name)


@functools.cache
def _models_folder() -> Path | None:
    # Finding a top-level package does not import it.
    spec = importlib.util.find_spec("mlx_lm")
    places = spec.submodule_search_locations if spec is not None else None
    folder = Path(places[0]) / "models" if places else None
    return folder if folder is not None and folder.is_dir() else None


@functools.cache
def _renamed_types(folder: Path) -> dict[str, str]:
    """Return model types that mlx-lm loads with the code of another type."""
    for node in _parse(folder.parent / "utils.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_REMAPPING":
            names: dict[str, str] = ast.literal_eval(node.value)
            return names
    return {}


@functools.cache
def _parse_family(folder: Path, name: str) -> ModelFamily | None:
    if not (folder / f"{name}.py").is_file():
        return None
    modules = _dependencies(folder, name, all_imports=False)
    classes = [
        node
        for module in modules
        for node in _parse(folder / f"{module}.py").body
        if isinstance(node, ast.ClassDef)
    ]
    return ModelFamily(
        shards=_has_shard(folder, name, "Model"),
        pipelines=any(
            _has_method(one, "pipeline") or "PipelineMixin" in _base_names(one) for one in classes
        ),
        has_experts=any(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in _EXPERT_LAYERS
            for module in _dependencies(folder, name, all_imports=True)
            for node in ast.walk(_parse(folder / f"{module}.py"))
        ),
    )


def _dependencies(folder: Path, name: str, *, all_imports: bool) -> list[str]:
    """Return a module and the modules it imports models from, or with `all_imports` anything."""
    found, pending = [name], [name]
    while pending:
        for module, imported, _ in _imports(_parse(folder / f"{pending.pop()}.py")):
            is_wanted = all_imports or imported == "" or imported.endswith(("Model", "LM"))
            is_new = module not in (*found, *_HELPER_MODULES)
            if is_wanted and is_new and (folder / f"{module}.py").is_file():
                found.append(module)
                pending.append(module)
    return found


def _has_shard(folder: Path, name: str, model: str) -> bool:
    """Tell whether a class or one of its base classes has a `shard` method."""
    tree = _parse(folder / f"{name}.py")
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if model in classes:
        bases = _base_names(classes[model])
        return _has_method(classes[model], "shard") or any(
            _has_shard(folder, name, one) for one in bases
        )
    for module, imported, alias in _imports(tree):
        if alias == model and imported and (folder / f"{module}.py").is_file():
            return _has_shard(folder, module, imported)
    return False


def _imports(tree: ast.Module) -> list[tuple[str, str, str]]:
    """Return (module, imported name, local name) of the imports from mlx-lm's other models.

    The imported name is "" when a whole module is imported.
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


def _has_method(node: ast.ClassDef, method: str) -> bool:
    return any(isinstance(one, ast.FunctionDef) and one.name == method for one in node.body)


def _base_names(node: ast.ClassDef) -> list[str]:
    return [one.id for one in node.bases if isinstance(one, ast.Name)]


@functools.cache
def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])
