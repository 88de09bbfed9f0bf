"""Hypothesis strategies derived from the message types, so that new fields are covered."""

from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as types

from shared import limits
from shared.messages import (
    LayerAssignments,
    RecordedHttpRequest,
    StepProfile,
    StepsMeasured,
    SubmitRequest,
    token_ids,
)
from shared.messages.telemetry.http_writes import WRITE_BYTES
from shared.messages.telemetry.step_profile import PARTS, SPAN_BYTES
from shared.messages.telemetry.step_times import STEP_BYTES

_INT_MAX = 2**63 - 1


def instances(struct: type[msgspec.Struct]) -> st.SearchStrategy[msgspec.Struct]:
    """Return a strategy of valid instances of a struct."""
    fields = msgspec.structs.fields(struct)
    required = {f.encode_name: _values(types.type_info(f.type)) for f in fields if f.required}
    optional = {f.encode_name: _values(types.type_info(f.type)) for f in fields if not f.required}
    if struct is SubmitRequest:
        required["prompt"] = _packed_ids(1)
        optional["generated"] = _packed_ids(0)
        optional["prediction"] = _packed_ids(0)
    if struct is StepsMeasured:
        required["times"] = st.integers(0, 3).map(lambda steps: bytes(steps * STEP_BYTES))
    if struct is LayerAssignments:
        return _layer_assignments()
    if struct is RecordedHttpRequest:
        optional["writes"] = st.integers(0, 3).map(lambda writes: bytes(writes * WRITE_BYTES))
    if struct is StepProfile:
        spans = st.lists(st.integers(0, len(PARTS) - 1), max_size=3)
        required["spans"] = spans.map(
            lambda parts: b"".join(bytes([part, *bytes(SPAN_BYTES - 1)]) for part in parts)
        )
    return st.fixed_dictionaries(required, optional=optional).map(lambda kwargs: struct(**kwargs))


def _values(kind: types.Type) -> st.SearchStrategy[Any]:
    match kind:
        case types.IntType():
            return st.integers(_low(kind, -_INT_MAX), _high(kind, _INT_MAX))
        case types.FloatType():
            return _floats(kind)
        case types.StrType():
            if kind.pattern is not None:
                return st.from_regex(kind.pattern).filter(
                    lambda text: len(text) <= (kind.max_length or 40)
                )
            return st.text(min_size=kind.min_length or 0, max_size=min(kind.max_length or 40, 40))
        case types.BytesType():
            return st.binary(min_size=kind.min_length or 0, max_size=min(kind.max_length or 40, 40))
        case types.BoolType():
            return st.booleans()
        case types.NoneType():
            return st.none()
        case types.LiteralType():
            return st.sampled_from(kind.values)
        case types.UnionType():
            return st.one_of([_values(member) for member in kind.types])
        case types.ListType():
            size = min(kind.max_length or 4, 4)
            return st.lists(_values(kind.item_type), min_size=kind.min_length or 0, max_size=size)
        case types.TupleType():
            return st.tuples(*(_values(item) for item in kind.item_types))
        case types.DictType():
            return st.dictionaries(_values(kind.key_type), _values(kind.value_type), max_size=3)
        case types.StructType():
            return instances(kind.cls)
    raise AssertionError(f"a message field has a type without a strategy: {kind}")


@st.composite
def _layer_assignments(draw: st.DrawFn) -> LayerAssignments:
    """Return a strategy of counts of experts that their layer has."""
    experts = draw(st.integers(1, 6))
    first = draw(st.integers(0, experts - 1))
    counts = draw(st.lists(st.integers(0, 2**40), max_size=experts - first))
    layer = draw(st.integers(0, limits.LAYERS_MAX - 1))
    return LayerAssignments(layer=layer, experts=experts, first=first, counts=counts)


def _packed_ids(count_min: int) -> st.SearchStrategy[bytes]:
    ids = st.integers(-(2**31), 2**31 - 1)
    return st.lists(ids, min_size=count_min, max_size=10).map(token_ids.pack)


def _floats(kind: types.FloatType) -> st.SearchStrategy[float]:
    low = kind.ge if kind.ge is not None else kind.gt
    high = kind.le if kind.le is not None else kind.lt
    return st.floats(
        low,
        high,
        exclude_min=kind.gt is not None,
        exclude_max=kind.lt is not None,
        allow_nan=False,
        allow_infinity=False,
    )


def _low(kind: types.IntType, otherwise: int) -> int:
    if kind.ge is not None:
        return kind.ge
    return kind.gt + 1 if kind.gt is not None else otherwise


def _high(kind: types.IntType, otherwise: int) -> int:
    if kind.le is not None:
        return kind.le
    return kind.lt - 1 if kind.lt is not None else otherwise
