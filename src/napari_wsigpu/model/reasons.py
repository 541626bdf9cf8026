"""What exceptions of parsers and codecs mean, in words instead of names from their code."""

from __future__ import annotations

import re
import struct

from napari_wsigpu.model.errors import shortened

MISSING = re.compile(r"Data[Ss]et' object has no attribute '(\w+)'$")
# Messages of Python's and NumPy's own ValueErrors.
VALUE = re.compile(
    "The truth value of|invalid literal for|could not convert string|setting an array"
)
BUILT_IN: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...] = (
    (struct.error, "a tag ends too early"),
    (ZeroDivisionError, "a size is 0"),
    (OverflowError, "a number is too large"),
    (RecursionError, "it is nested too deeply"),
    (LookupError, "a value is missing"),
    ((TypeError, AttributeError, AssertionError), "a value has an unexpected type"),
)
CODECS = (
    (
        re.compile(
            r"INSUFFICIENT_SPACE|OUTPUT_TOO_SMALL|Z_BUF_ERROR|Destination buffer is too small"
        ),
        "it decodes to too many bytes",
    ),
    (
        re.compile(r"^invalid out\.shape=.*, shape=(\([\d, ]+\))$"),
        r"its image has the shape \1",
    ),
    (re.compile("^buffer is smaller than requested size$"), "its image is too large"),
    (re.compile("input stream too small$"), "its data is truncated"),
    (re.compile(r"^\w+ returned '(.*)'$"), r"its data is damaged: \1"),
    (re.compile(r"^[\w ]+ (returned -?\w+|failed)$"), "its data is damaged"),
)


def parser_reason(error: Exception) -> str:
    """Return why a file is damaged, from the exception that its values caused in a parser.

    The names of built-in exceptions and their messages describe the parser's code, not the file.
    """
    missing = MISSING.search(str(error))
    if missing is not None:
        return f"{missing[1]} is missing"
    for kinds, meaning in BUILT_IN:
        if isinstance(error, kinds):
            return meaning
    first_line = str(error).partition("\n")[0].rstrip(".")
    if VALUE.match(first_line):
        return "a value has an unexpected type"
    return shortened(first_line) or "its structure is invalid"


def codec_reason(error: Exception) -> str:
    """Return why a tile can't be decoded, from the exception that a codec raised."""
    text = str(error)
    for pattern, meaning in CODECS:
        found = pattern.search(text)
        if found is not None:
            return found.expand(meaning)
    return shortened(text) or "its data is damaged"
