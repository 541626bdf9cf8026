"""Parse untrusted XML, and convert it to nested dicts."""

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
    """Parse XML. Callers share the result and must not change it.

    Raises
    ------
    ValueError
        If the text is missing, is not valid XML, declares entities or exceeds the limits.
    """
    if not xml or is_too_long(xml):
        raise ValueError("its XML is missing or too long")
    try:
        return _parsed_cached(xml) if len(xml) <= LONGEST_KEPT else _parsed(xml)
    except ElementTree.ParseError as error:
        raise ValueError(f"its XML can't be read ({error})") from error
    except DefusedXmlException as error:
        raise ValueError("its XML declares entities, which no scanner writes") from error


def _parsed(xml: str) -> Element:
    found: Element = ElementTree.fromstring(xml)
    return found


# Cached, because each plane of a stack is described separately from the same XML.
_parsed_cached = lru_cache(maxsize=2)(_parsed)


def is_too_long(xml: str) -> bool:
    """Whether XML has more characters or elements than the limits allow."""
    elements = xml.count("<") - xml.count("</")
    return len(xml) > limits.xml_bytes or elements > limits.xml_elements


def parse(xml: str | None) -> Element | None:
    """Return the root element; None if `root` refuses the text."""
    try:
        return root(xml)
    except ValueError:
        return None


def is_deep(element: Element) -> bool:
    """Whether elements are nested deeper than `DEEPEST`."""
    layer = [element]
    for _ in range(DEEPEST):
        layer = [part for each in layer for part in each]
    return bool(layer)


def name(element: Element) -> str:
    """Return an element's name without its namespace."""
    return element.tag.rpartition("}")[2]


def children(element: Element | None, tag: str) -> Iterator[Element]:
    """Return an iterator over the children with the name `tag`, in any namespace."""
    return (child for child in (() if element is None else element) if name(child) == tag)


def child(element: Element | None, tag: str) -> Element | None:
    """Return the first child with the name `tag`; None if there is none."""
    return next(children(element, tag), None)


def text(element: Element | None, tag: str) -> str | None:
    """Return the text of the first child with the name `tag`; None if it is missing or empty."""
    found = child(element, tag)
    return None if found is None else (found.text or "").strip() or None


def nested(element: Element, depth: int = DEEPEST) -> Any:
    """Convert an element to JSON-like values.

    Returns
    -------
    dict or str
        Attributes and children by name, as a list if a name occurs more than once, and the
        element's own text as ``"text"``. An element with nothing but text becomes that text.
        Children deeper than `depth` are left out.
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
