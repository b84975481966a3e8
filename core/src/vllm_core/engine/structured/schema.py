"""What a JSON schema may ask of structured output, and how it is asked of the compiler.

The compiler passes over keywords that a grammar cannot hold. Here they are refused by name, so that whatever comes out
satisfies the schema that went in. Names are those of JSON Schema, draft 2020-12.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import msgspec

from vllm_core.engine.structured import patterns
from vllm_core.errors import RequestError

MAX_DEPTH = 64

_NOTES = frozenset(
    ("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment", "$schema")
) | frozenset(("$id", "$defs", "definitions", "discriminator", "strict", "nullable", "propertyOrdering"))
"""Keywords that ask nothing of a value by themselves."""

_OF_TYPE: Mapping[str, frozenset[str]] = {
    "object": frozenset(
        ("properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
    )
    | {"minProperties", "maxProperties"},
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems")),
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "boolean": frozenset(),
    "null": frozenset(),
}
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Keywords beside which the compiler looks at no other."""

_FORMATS = frozenset(
    ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference", "uri-template")
) | frozenset(("uuid", "json-pointer", "relative-json-pointer"))

_PYTHON: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def read(value: Any) -> Any:
    """A schema given as text or as an object. Raises RequestError for text that is no JSON."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _refused("json", str(error), "a JSON schema") from None


def check(value: Any) -> None:
    """Raises RequestError for the first thing in a schema that a grammar cannot hold."""
    _check(value, "json", 0)


def _check(value: Any, at: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _refused(at, f"more than {MAX_DEPTH} levels", "a schema that is less deep")
    if isinstance(value, bool):
        return
    if not isinstance(value, dict):
        raise _refused(at, f"{value!r:.80}", "a schema: an object, true or false")
    sole = next((name for name in _ALONE if name in value), None)
    asked = [name for name in value if name not in _NOTES]
    if sole is not None:
        _check_alone(value, sole, asked, at)
    else:
        _check_typed(value, asked, at)
    for name, inner in _inside(value):
        _check(inner, f"{at}.{name}", depth + 1)


def prepared(value: Any) -> Any:
    """A schema that passed `check`, written so that every text of the compiled grammar is JSON.

    The compiler lets control characters into texts of a bounded length, and writes quotes of a pattern or of an email address
    as they are. Both become patterns without them.
    """
    if not isinstance(value, dict):
        return value
    changed = {name: _prepared_inside(name, inner) for name, inner in value.items()}
    if "pattern" in value:
        changed["pattern"] = patterns.escaped(value["pattern"])
    elif "minLength" in value or "maxLength" in value:
        least, most = changed.pop("minLength", 0), changed.pop("maxLength", "")
        changed["pattern"] = f"^{patterns.SAFE}{{{least},{most}}}$"
    elif value.get("format") == "email":
        del changed["format"]
        changed["pattern"] = patterns.EMAIL
    return changed


def _prepared_inside(name: str, inner: Any) -> Any:
    if name in ("properties", "patternProperties", "$defs", "definitions") and isinstance(inner, dict):
        return {key: prepared(one) for key, one in inner.items()}
    if name in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(inner, list):
        return [prepared(one) for one in inner]
    if name in ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames"):
        return prepared(inner)
    return inner


def _inside(value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas in a schema."""
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        inner = value.get(name)
        if isinstance(inner, dict):
            yield from ((f"{name}.{key[:64]}", one) for key, one in inner.items())
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        inner = value.get(name)
        if isinstance(inner, list):
            yield from ((f"{name}[{index}]", one) for index, one in enumerate(inner))
    for name in ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames"):
        if name in value:
            inner = value[name]
            # A name is a text whether or not the schema says so.
            yield name, {"type": "string", **inner} if name == "propertyNames" and isinstance(inner, dict) else inner


def _check_alone(value: Mapping[str, Any], sole: str, asked: list[str], at: str) -> None:
    allowed = {sole, "type"} if sole in ("enum", "const") else {sole}
    beside = next((name for name in asked if name not in allowed), None)
    if beside is not None:
        raise _refused(f"{at}.{beside}", f"{beside} beside {sole}", f"{sole} without other keywords")
    if sole in ("enum", "const"):
        _check_values(value, value["enum"] if sole == "enum" else [value["const"]], at)
    if sole == "allOf" and isinstance(value["allOf"], list) and len(value["allOf"]) != 1:
        raise _refused(f"{at}.allOf", f"{len(value['allOf'])} schemas", "one schema that says all of it")
    if sole == "oneOf" and isinstance(value["oneOf"], list):
        for left, right in combinations(value["oneOf"], 2):
            if not _exclusive(left, right):
                raise _refused(f"{at}.oneOf", "schemas that may hold together", "anyOf, or other types or constants in each")


def _check_values(value: Mapping[str, Any], values: Any, at: str) -> None:
    types = value.get("type")
    if types is None or not isinstance(values, list):
        return
    names = types if isinstance(types, list) else [types]
    for one in values:
        if not any(type(one) in _PYTHON.get(str(name), ()) for name in names):
            raise _refused(f"{at}.enum", f"{one!r:.80}", f"a value of type {types!r:.80}")


def _check_typed(value: Mapping[str, Any], asked: list[str], at: str) -> None:
    types = value.get("type")
    names = _types(value)
    if "properties" in value and types is None:
        names = ["object"]
    allowed = frozenset[str]().union(*(_OF_TYPE.get(name, frozenset()) for name in names))
    for name in asked:
        if name != "type" and name not in allowed:
            everywhere = any(name in one for one in _OF_TYPE.values())
            found = f"{name} without its type" if everywhere else f"{name}, which no grammar can hold"
            raise _refused(f"{at}.{name[:64]}", found, "a type, and keywords of that type")
    _check_string(value, at)
    required = value.get("required")
    if isinstance(required, list):
        known = value.get("properties") or {}
        missing = next((name for name in required if name not in known), None)
        if missing is not None:
            raise _refused(f"{at}.required", f"{missing!r:.80}", "names that properties describe")


def _check_string(value: Mapping[str, Any], at: str) -> None:
    extent = next((name for name in ("minLength", "maxLength", "format") if name in value), None)
    if not isinstance(value.get("pattern", ""), str):
        raise _refused(f"{at}.pattern", f"{value['pattern']!r:.80}", "a regular expression")
    if "pattern" in value and not patterns.can_be_escaped(value["pattern"]):
        raise _refused(f"{at}.pattern", "a control character, quote or backslash by its number", "the character itself")
    least, most = value.get("minLength", 0), value.get("maxLength", 1 << 62)
    if not (isinstance(least, int) and isinstance(most, int) and 0 <= least <= most):
        raise _refused(f"{at}.{extent}", f"minLength {least!r:.40}, maxLength {most!r:.40}", "integers, the smaller one first")
    if "pattern" in value and extent is not None:
        raise _refused(f"{at}.{extent}", f"{extent} beside pattern", "a pattern that bounds the length itself: ^[a-z]{1,8}$")
    if "format" in value and value["format"] not in _FORMATS:
        raise _refused(f"{at}.format", f"{value['format']!r:.80}", f"one of: {', '.join(sorted(_FORMATS))}")
    if "format" in value and ("minLength" in value or "maxLength" in value):
        raise _refused(f"{at}.format", "format beside a length", "one of them")


def _types(value: Any) -> list[str]:
    types = value.get("type") if isinstance(value, dict) else None
    return [str(name) for name in types] if isinstance(types, list) else [] if types is None else [str(types)]


def _exclusive(left: Any, right: Any) -> bool:
    """Whether no value satisfies both, as far as types and constants tell."""
    kinds: list[set[str]] = [set(_types(one)) for one in (left, right)]
    if any("number" in one for one in kinds):
        for one in kinds:
            one.discard("integer")
            one.add("number")
    if all(kinds) and not kinds[0] & kinds[1]:
        return True
    fixed = [_constants(one) for one in (left, right)]
    return any(not fixed[0][name] & fixed[1][name] for name in fixed[0].keys() & fixed[1].keys())


def _constants(value: Any) -> dict[str, set[str]]:
    """Required properties that have but a few values, and the value itself under an empty name."""
    if not isinstance(value, dict):
        return {}
    found: dict[str, set[str]] = {}
    own = _values(value)
    if own is not None:
        found[""] = own
    properties = value.get("properties")
    if isinstance(properties, dict) and isinstance(value.get("required"), list):
        for name in value["required"]:
            values = _values(properties.get(name))
            if values is not None:
                found[str(name)] = values
    return found


def _values(value: Any) -> set[str] | None:
    """The values of a schema that lists them."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("enum"), list):
        return {repr(one) for one in value["enum"]}
    return {repr(value["const"])} if "const" in value else None


def _refused(at: str, found: str, expected: str) -> RequestError:
    return RequestError(
        "JSON schema asks what cannot be enforced", on=at, found=found, expected=expected, fix=f"change {at} in the schema"
    )
