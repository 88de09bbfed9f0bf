"""Generator of the field tables in docs/reference/protocol.md. Reads the message structs.

The text around the tables is written by hand. Run `make generated` after a change of a message;
a test compares the document with `render()`.
"""

import json
import re
from pathlib import Path

import msgspec
from msgspec import inspect as types

from shared import messages
from tools.field_texts import field_default, field_texts

FILE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "protocol.md"

_TABLE = re.compile(r"(<!-- fields of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_COMMON = {
    "request_id": "Identifies the request within its gateway.",
    "epoch": "Epoch of the message; 0: none.",
    "step_id": "Step of the message.",
    "rank": "The rank that sends the message or is addressed.",
    "sequence_id": "The scheduler's number of the sequence.",
    "world_size": "Number of ranks.",
    "backend": "Backend of collectives.",
    "detail": "A sentence for people.",
    "memory_bytes": "Active memory that MLX reports.",
    "prompt": "Token ids of the prompt.",
    "sampling": "Sampling parameters.",
    "request_ids": "Requests, one per entry.",
    "finish_reason": "Why it ended.",
    "prompt_tokens": "Length of the prompt.",
    "cause": "See above.",
    "draining": "New requests are refused.",
    "model": "The model's name in the API.",
    "model_fingerprint": 'Fingerprint of the loaded weights; "" before.',
    "ranks": "One entry per rank of the world, including missing ones.",
    "waiting": "Sequences without a slot.",
    "kv_tokens_used": "Tokens in the rows of running sequences.",
    "kv_tokens_max": "Capacity of all rows in tokens.",
    "host": "Name of the machine.",
    "pid": "Process id.",
    "device": "Kind and name of the device.",
    "mlx_version": "The rank's version of MLX.",
    "init_deadline_s": "Longest time until the world is joined.",
    "load_deadline_s": "Longest time until the shard is loaded.",
    "step_deadline_max_s": "Upper bound of every `StepPlan.deadline_s`.",
    "stage": "Current activity.",
    "loaded": "Completed share of the stage, 0 to 1.",
    "vocab_size": "Logits per position.",
    "blas": 'Matrix library of the CPU backend, "" elsewhere.',
    "moves": "Rows that move to another slot.",
    "admitted": "Sequences that enter the batch.",
    "prefill_chunks": "Prompt tokens to compute, in this order.",
    "cached": "Part of the prompt found in the cache.",
    "keep_checkpoints": "Saved states that become resident checkpoints.",
    "adopted": "Restores that become resident on all ranks with this plan.",
    "spill": "Resident blocks to write to the cache store.",
    "restore_id": "Number of the restore within the epoch.",
    "namespace": "Namespace of the blocks.",
    "items": "Blocks of a prefix, in order.",
    "count": "Number of leading items.",
    "bytes_read": "Bytes read and checked.",
    "read_ms": "Time from the order to the answer.",
    "bytes_written": "Bytes of the stored blocks.",
    "write_ms": "Time in writes.",
    "query_id": "Number of the query within the session.",
    "hashes": "Blocks and checkpoints.",
    "places": "Places in the order of the query's hashes.",
    "records": "Records of blocks and checkpoints.",
    "name": "A file in the namespace's folder for this rank.",
    "accepted": "The records can be located now.",
    "on": "The store accepts and locates blocks.",
    "directory": "Folder of the files.",
    "bytes_used": "Bytes of all its files.",
    "bytes_max": "Size above which the store evicts.",
    "namespaces": "Number of namespaces with records.",
    "page": "Counted from 0.",
    "folders": "One entry per rank and namespace.",
    "size_bytes": "Bytes of records.",
    "hash": "Hash of the block or checkpoint.",
    "position": "Length of the row when its state was saved.",
    "checkpoint": "Checkpoint at the end of these tokens, if rows need one.",
    "offset": "First byte of the record in its file.",
    "step_started": "Latest step that was started.",
    "step_finished": "Latest step whose receipt was sent.",
    "top_p": "Smallest set of tokens whose probabilities add up to it; 1 means off.",
    "min_p": "Least probability, as a share of the likeliest token's; 0 means off.",
    "state": "State of the rank; `missing`: no process has joined.",
    "slot": "Row of the sequence.",
    "start": "Position of the chunk's first token in the sequence.",
    "length": "Tokens in the chunk.",
    "owner": "Whose document it is, in hexadecimal digits.",
    "data": "Content of the document.",
    "documents_bytes": "Bytes of all documents, with the overhead of their files.",
}
_POWERS = {2**31 - 1: "2^31-1", 2**62: "2^62", 2**63 - 1: "2^63-1"}


def documented_structs(text: str) -> list[str]:
    """Return the names of the structs that have a table in the document."""
    return [match[2] for match in _TABLE.finditer(text)]


def render(text: str) -> str:
    """Return the document `text` with all its field tables written anew from the structs."""
    return _TABLE.sub(lambda match: match[1] + table(getattr(messages, match[2])) + match[3], text)


def table(struct: type[msgspec.Struct]) -> str:
    """Return a Markdown table of a struct's fields, with their types and docstrings."""
    fields = msgspec.structs.fields(struct)
    if not fields:
        return "No fields.\n"
    texts = field_texts(struct)
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field in fields:
        meaning = texts.get(field.name) or _COMMON.get(field.name, "")
        kind = type_text(types.type_info(field.type))
        value = "" if field.required else msgspec.to_builtins(field_default(field))
        default = "" if field.required else f"`{json.dumps(value)}`"
        lines.append(f"| `{field.encode_name}` | {kind} | {default} | {meaning} |")
    return "\n".join(lines).replace("|  |", "| |").replace("|  |", "| |") + "\n"


def type_text(kind: types.Type) -> str:
    """Return the type of a field, and the range of its values, in words."""
    match kind:
        case types.IntType():
            return f"int{_range(kind)}"
        case types.FloatType():
            return f"float{_range(kind)}"
        case types.StrType():
            form = f" like `{kind.pattern}`" if kind.pattern else ""
            return f"text{_length(kind, ' characters')}{form}"
        case types.BytesType():
            return f"bytes{_length(kind, '')}"
        case types.BoolType():
            return "bool"
        case types.NoneType():
            return "nil"
        case types.LiteralType():
            return ", ".join(f"`{value}`" for value in kind.values)
        case types.UnionType():
            return " or ".join(type_text(member) for member in kind.types)
        case types.ListType():
            return f"list{_length(kind, '')} of {type_text(kind.item_type)}"
        case types.TupleType():
            return f"({', '.join(type_text(item) for item in kind.item_types)})"
        case types.DictType():
            return f"map of {type_text(kind.key_type)} to {type_text(kind.value_type)}"
        case types.StructType():
            return f"[{kind.cls.__name__}](#{kind.cls.__name__.lower()})"
    raise AssertionError(f"a message has a field of a kind that this file does not know: {kind}")


def _range(kind: types.IntType | types.FloatType) -> str:
    if kind.gt is not None:
        low = f" above {_number(kind.gt)}"
    else:
        low = f" from {_number(kind.ge)}" if kind.ge is not None else ""
    if kind.lt is not None:
        return f"{low} below {_number(kind.lt)}"
    return f"{low} to {_number(kind.le)}" if kind.le is not None else low


def _number(value: float) -> str:
    if isinstance(value, int):
        return _POWERS.get(value, f"{value:,}")
    return f"{value:g}"


def _length(kind: types.StrType | types.BytesType | types.ListType, unit: str) -> str:
    low, high = kind.min_length, kind.max_length
    if low is not None and low == high:
        return f"[{low:,}{unit}]"
    if high is None:
        return f"[{low:,} or more]" if low else ""
    return f"[{low or 0:,} to {high:,}{unit}]"


if __name__ == "__main__":
    FILE.write_text(render(FILE.read_text(encoding="utf-8")), encoding="utf-8")
