"""From `response_format` and `structured_outputs` of a request to what the engine enforces."""

from __future__ import annotations

from typing import Any

import msgspec

from vllm_core.sampling_params import StructuredOutputsParams
from vllm_core.serve.schema import refused, short


def read_structure(response_format: dict[str, Any] | None, given: dict[str, Any] | None) -> StructuredOutputsParams | None:
    """What the output must be, or None. Raises RequestError."""
    asked = None if response_format is None else _of_format(response_format)
    if given is None:
        return asked
    if asked is not None:
        raise refused("structured_outputs", "response_format too", "one of them", "leave response_format out")
    try:
        return msgspec.convert(given, StructuredOutputsParams)
    except msgspec.ValidationError as error:
        fields = ", ".join(StructuredOutputsParams.__struct_fields__)
        raise refused("structured_outputs", str(error), f"fields of: {fields}", "change structured_outputs") from None


def _of_format(value: dict[str, Any]) -> StructuredOutputsParams | None:
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=value)
    if kind != "json_schema":
        expected = "text, json_object, json_schema or structural_tag"
        raise refused("response_format.type", short(kind), expected, "send a type of this list")
    wrapped = value.get("json_schema")
    if not isinstance(wrapped, dict):
        raise refused("response_format.json_schema", short(wrapped), "an object with name and schema", "send json_schema")
    schema = wrapped.get("schema")
    if not isinstance(schema, dict):
        raise refused("response_format.json_schema.schema", short(schema), "a JSON schema", "send a schema")
    return StructuredOutputsParams(json=schema)
