"""Docstrings of struct fields, read from the source, and their defaults."""

import ast
import inspect
from typing import Any

import msgspec


def field_default(field: msgspec.structs.FieldInfo) -> Any:
    """Return the default of a struct's field, made anew if a function makes it."""
    is_made = field.default_factory is not msgspec.NODEFAULT
    return field.default_factory() if is_made else field.default


def field_texts(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Read the docstrings of a struct's own fields from its source; those of bases are left out.

    Returns:
        Name of the field -> its docstring as one line; fields without docstring are absent.
    """
    (node,) = ast.parse(inspect.getsource(struct)).body
    assert isinstance(node, ast.ClassDef)
    texts = {}
    for item, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(item, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(item.target, ast.Name)
            assert isinstance(below.value, ast.Constant)
            texts[item.target.id] = " ".join(str(below.value.value).split())
    return texts
