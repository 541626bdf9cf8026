"""XML that files hold: parsed without trust, and turned into nested dicts."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from defusedxml import DefusedXmlException, ElementTree

from napari_wsigpu.model.limits import limits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from xml.etree.ElementTree import Element

DEEPEST = 32
LONGEST_KEPT = 2 << 20


def root(xml: str | None) -> Element:
    """Parse XML. Who gets it must not change it: the next one may get the same.

    Raises
    ------
    ValueError
        If it is no valid XML, attacks its reader, or is longer than any honest one.
    """
    if not xml or is_too_long(xml):
        raise ValueError("its XML is missing or too long")
    try:
        return _parsed_again(xml) if len(xml) <= LONGEST_KEPT else _parsed(xml)
    except ElementTree.ParseError as error:
        raise ValueError(f"its XML can't be read ({error})") from error
    except DefusedXmlException as error:
        raise ValueError("its XML declares entities, which no scanner does") from error


def _parsed(xml: str) -> Element:
    found: Element = ElementTree.fromstring(xml)
    return found


# Planes of a stack are described one by one, each by the same text.
_parsed_again = lru_cache(maxsize=2)(_parsed)


def is_too_long(xml: str) -> bool:
    """Whether XML has more characters or elements than the limits say."""
    elements = xml.count("<") - xml.count("</")
    return len(xml) > limits.xml_bytes or elements > limits.xml_elements


def parse(xml: str | None) -> Element | None:
    """Return the root; None where `root` refuses the text."""
    try:
        return root(xml)
    except ValueError:
        return None


def is_deep(element: Element) -> bool:
    """Whether elements lie deeper within one than `nested` looks."""
    layer = [element]
    for _ in range(DEEPEST):
        layer = [part for each in layer for part in each]
    return bool(layer)


def name(element: Element) -> str:
    """Return an element's name without its namespace."""
    return element.tag.rpartition("}")[2]


def children(element: Element | None, wanted: str) -> Iterator[Element]:
    """Yield the children of that name."""
    return (child for child in (() if element is None else element) if name(child) == wanted)


def child(element: Element | None, wanted: str) -> Element | None:
    """Return the first child of that name, or None."""
    return next(children(element, wanted), None)


def text(element: Element | None, wanted: str) -> str | None:
    """Return the text of the first child of that name; None where there is none."""
    found = child(element, wanted)
    return None if found is None else (found.text or "").strip() or None


def nested(element: Element, depth: int = DEEPEST) -> Any:
    """Return an element as JSON would have it.

    Returns
    -------
    dict or str
        Attributes and children by name, a list where several have one name, and the element's
        own text as ``"text"``; the text alone where there is nothing else. What lies deeper than
        `depth` is left out.
    """
    own = (element.text or "").strip()
    if not element.attrib and not len(element):
        return own
    found: dict[str, list[Any]] = {
        key.rpartition("}")[2]: [value] for key, value in element.attrib.items()
    }
    if depth:
        for part in element:
            found.setdefault(name(part), []).append(nested(part, depth - 1))
    if own:
        found.setdefault("text", []).append(own)
    return {key: values[0] if len(values) == 1 else values for key, values in found.items()}
