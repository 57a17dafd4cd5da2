"""JSON as the Go SDK writes it, so that a record has the same size for searchers in both languages."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

# Go escapes these, so that JSON can stand within HTML and JavaScript.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
_SURROGATES = re.compile("[\ud800-\udfff]+")


def dumps(value: Any) -> str:
    """A value as JSON without white space. Raises ValueError if JSON has no such value."""
    if value is None:
        return "null"
    if value is True or value is False:
        return "true" if value else "false"
    if isinstance(value, str):
        return string(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return number(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key(k)}:{dumps(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(dumps, value)) + "]"
    raise ValueError(f"{value!r:.80} is a {type(value).__name__}, which JSON does not have")


def key(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the key {value!r:.80} of a JSON object is no string")
    return string(value)


def string(value: str) -> str:
    """A string. A half of a surrogate pair, which UTF-8 does not have, becomes U+FFFD."""
    return json.dumps(well_formed(value, "\ufffd"), ensure_ascii=False).translate(_ESCAPES)


def well_formed(value: str, instead: str) -> str:
    """The string with something else instead of each run of surrogates."""
    return _SURROGATES.sub(instead, value)


def number(value: float) -> str:
    """The shortest decimal that is the same double; with an exponent below 1e-6 and from 1e21 on."""
    if not math.isfinite(value):
        raise ValueError(f"JSON has no number {value}")
    if value == 0:
        return "-0" if math.copysign(1, value) < 0 else "0"
    digits, _, exponent = repr(abs(value)).partition("e")
    whole, _, fraction = digits.partition(".")
    point = len(whole) + int(exponent or 0)
    digits = whole + fraction
    point -= len(digits) - len(digits.lstrip("0"))
    digits = digits.strip("0")
    sign = "-" if value < 0 else ""
    if not 1e-6 <= abs(value) < 1e21:
        rest = f".{digits[1:]}" if len(digits) > 1 else ""
        return f"{sign}{digits[0]}{rest}e{'-' if point < 1 else '+'}{abs(point - 1):02}".replace("e-0", "e-")
    if point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    if point >= len(digits):
        return sign + digits + "0" * (point - len(digits))
    return f"{sign}{digits[:point]}.{digits[point:]}"
