"""Values from text that may hold anything: each is checked, or refused by a ValueError."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from defusedxml import DefusedXmlException, ElementTree

if TYPE_CHECKING:
    from collections.abc import Iterable
    from xml.etree.ElementTree import Element

LONGEST_TEXT = 4096
LONGEST_NUMBER = 32
LARGEST_NUMBER = 1 << 53


def number(text: str | None) -> float:
    """Read a number with a decimal point or comma.

    Raises
    ------
    ValueError
        If it is missing, none, or so large that whole numbers are lost.
    """
    try:
        value = float((text or "")[:LONGEST_NUMBER].replace(",", "."))
    except ValueError:
        value = math.nan
    if not abs(value) <= LARGEST_NUMBER:
        raise ValueError("a number of it is missing or wrong")
    return value


def whole_number(text: str | None) -> int:
    """Read a whole number; errors as in `number`."""
    value = number(text)
    if not value.is_integer():
        raise ValueError("a number of it is not whole")
    return int(value)


def texts(pairs: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    """Return the values that are there, cut to a length that people can read."""
    return {name[:LONGEST_TEXT]: text[:LONGEST_TEXT] for name, text in pairs if text}


def xml_root(text: str) -> Element:
    """Parse XML.

    Raises
    ------
    ValueError
        If it is no valid XML, or attacks its reader.
    """
    try:
        root: Element = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"its XML can't be read ({error})") from error
    except DefusedXmlException as error:
        raise ValueError("its XML declares entities, which no scanner does") from error
    return root
