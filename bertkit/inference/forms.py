"""Other forms of results, by their keys: columns of a table, and the values of transformers' pipelines.

Left out: the rows of a table, which training writes too (`bertkit.tasks.result.flatten_result`).
"""

from collections.abc import Sequence
from typing import Any

from bertkit.tasks.result import flatten_result
from bertkit.tasks.schema import Schema
from bertkit.tasks.task import Result

BLANKS = {"string": "", "number": 0.0, "integer": 0, "array": ()}  # type of JSON schema -> a value of it


def list_columns(schema: Schema) -> dict[str, type]:
    """Return the columns of a table of results with this schema: name -> type; empty if they form no table."""
    return {name: type(value) for name, value in flatten_result(make_blank(schema)).items()}


def make_blank(schema: Schema) -> Any:
    """Return a value that a JSON schema allows, with all keys of an object."""
    if "enum" in schema:
        return schema["enum"][0]
    if schema["type"] == "object":
        return {name: make_blank(kind) for name, kind in schema["properties"].items()}
    return BLANKS[schema["type"]]


def format_for_pipeline(result: Result, labels: Sequence[str]) -> Any:
    """Return a result in the form of transformers' `pipeline`, without the keys that the result lacks.

    Several labels (the likeliest first), several numbers, and the words of a mask are lists. The score of an answer is
    a sum of logits, not a probability; no answer is empty, from 0 to 0. Entities are as with an `aggregation_strategy`,
    and `word` is the text as it was given.
    """
    if "error" in result:
        return result
    if "label" in result:
        return {"label": result["label"], "score": result["probability"]}
    if "labels" in result:
        found = ({"label": label, "score": result["probabilities"][label]} for label in result["labels"])
        return sorted(found, key=lambda entry: -entry["score"])
    if "scores" in result:
        return [{"label": label, "score": value} for label, value in result["scores"].items()]
    if "score" in result:
        return {"label": labels[0], "score": result["score"]}
    if "answer" in result:
        best = result["best"]
        if "tau" in result and not result["answer"]:
            return {"answer": "", "score": result["null_score"], "start": 0, "end": 0}
        return {"answer": result["answer"], "score": best["score"], "start": best["start"], "end": best["end"]}
    if "masks" in result:
        masks = [
            [{"score": found["probability"], "token_str": found["word"]} for found in mask["words"]]
            for mask in result["masks"]
        ]
        return masks[0] if len(masks) == 1 else masks
    names = {"entity_group": "type", "score": "score", "word": "text", "start": "start", "end": "end"}
    return [{name: found[key] for name, key in names.items()} for found in result.get("entities", ())]
