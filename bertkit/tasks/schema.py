"""JSON schemas (2020-12) of inputs and results, from which the description of a served model is made."""

from collections.abc import Collection, Mapping
from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
NUMBER_SCHEMA: Schema = {"type": "number"}
INDEX: Schema = {"type": "integer", "minimum": 0}
PROBABILITY: Schema = {"type": "number", "minimum": 0, "maximum": 1}


def make_input(properties: Mapping[str, Schema], sample: Mapping[str, Any]) -> Schema:
    """Return the schema of an input, which needs the keys of the sample; other keys are allowed and ignored."""
    return {"type": "object", "properties": dict(properties), "required": list(sample), "examples": [sample]}


def make_object(properties: Mapping[str, Schema], optional: Collection[str] = ()) -> Schema:
    """Return the schema of an object with exactly these properties."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": dict(properties),
        "required": required,
        "additionalProperties": False,
    }


def make_array(items: Schema) -> Schema:
    """Return the schema of an array."""
    return {"type": "array", "items": items}
