"""Philips' description of a slide: XML of nested ``DataObject`` and ``Attribute`` elements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from defusedxml import DefusedXmlException, ElementTree

from napari_wsigpu.formats.fields import Metadata, positive_number

PICTURE, SPACING = "PIM_DP_IMAGE_DATA", "DICOM_PIXEL_SPACING"
LONGEST_TEXT, LONGEST_PICTURE, LONGEST_NAME = 1 << 20, 64 << 20, 256
LARGEST_SPACING = 1e9
LONGEST_XML, BLOCK = 128 << 20, 1 << 20
MOST_ELEMENTS, DEEPEST = 200_000, 64


class Description(NamedTuple):
    """The contents of the XML.

    Attributes
    ----------
    attributes : dict of str
        Text by name; a list of dicts for an attribute that holds objects. Each pixel spacing also
        has an entry ``..._mm`` with its numbers, [row, column] in millimeters.
    pictures : list of (dict, str)
        The attributes of each object that has a picture, and the picture in base64.
    left_out : tuple of str
        Names of attributes that are too long to keep.
    """

    attributes: Metadata
    pictures: list[tuple[Metadata, str]]
    left_out: tuple[str, ...]


def parse(xml: str) -> Description:
    """Read the XML of a slide.

    Raises
    ------
    ValueError
        If it is not the XML of a Philips slide; the message states the reason.
    """
    if len(xml) > LONGEST_XML:
        raise ValueError("it is too long")
    collector = _Collector()
    parser = ElementTree.XMLParser(target=collector)
    try:
        for start in range(0, len(xml), BLOCK):  # feeding the whole text would encode a second copy
            parser.feed(xml[start : start + BLOCK])
        parser.close()
    except DefusedXmlException as error:
        raise ValueError("it declares entities") from error
    except ElementTree.ParseError as error:
        raise ValueError(str(error)) from error
    return Description(collector.root, collector.pictures, tuple(dict.fromkeys(collector.left_out)))


def spacing(value: object) -> list[float] | None:
    """Read a pixel spacing as [row, column] in millimeters; None if it is implausible."""
    words = value.replace('"', " ").split() if isinstance(value, str) else ()
    numbers = [positive_number(word) for word in words]
    found = [number for number in numbers if number is not None and number <= LARGEST_SPACING]
    return found if len(found) == len(words) == 2 else None


@dataclass
class _Attribute:
    name: str | None
    parts: list[str] = field(default_factory=list)
    length: int = 0
    objects: list[Metadata] | None = None

    @property
    def limit(self) -> int:
        return LONGEST_PICTURE if self.name == PICTURE else LONGEST_TEXT


class _Collector:
    """Parser target that builds the result as it reads, so that it never holds overlong text."""

    def __init__(self) -> None:
        self.root: Metadata = {}
        self.pictures: list[tuple[Metadata, str]] = []
        self.left_out: list[str] = []
        # The open elements, outermost first; None for elements that are ignored.
        self._open: list[Metadata | _Attribute | None] = []
        self._elements = 0

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._elements += 1
        if self._elements > MOST_ELEMENTS or len(self._open) == DEEPEST:
            raise ValueError("it has too many elements or nests them too deeply")
        if not self._open:
            if tag != "DataObject" or attributes.get("ObjectType") != "DPUfsImport":
                raise ValueError("its root is not DPUfsImport")
            self._open.append(self.root)
            return
        outer = self._open[-1]
        inner: Metadata | _Attribute | None = None
        if isinstance(outer, _Attribute):
            if outer.objects is None:
                outer.objects, outer.parts = [], []
            if tag == "Array":
                inner = outer
            elif tag == "DataObject":
                inner = {}
                outer.objects.append(inner)
        elif outer is not None and tag == "Attribute":
            inner = _Attribute(attributes.get("Name"))
        self._open.append(inner)

    def data(self, text: str) -> None:
        attribute = self._open[-1]
        if isinstance(attribute, _Attribute) and attribute.objects is None:
            attribute.length += len(text)
            if attribute.length <= attribute.limit:
                attribute.parts.append(text)
            else:
                attribute.parts.clear()

    def end(self, tag: str) -> None:
        inner = self._open.pop()
        outer = self._open[-1] if self._open else None
        if isinstance(inner, _Attribute) and isinstance(outer, dict) and inner.name is not None:
            self._keep(inner, inner.name, outer)

    def _keep(self, attribute: _Attribute, name: str, owner: Metadata) -> None:
        if attribute.length > attribute.limit or len(name) > LONGEST_NAME:
            self.left_out.append(name[:LONGEST_NAME])
        elif attribute.objects is not None:
            owner[name] = attribute.objects
        elif name == PICTURE:
            self.pictures.append((owner, "".join(attribute.parts)))
        else:
            owner[name] = "".join(attribute.parts)
            numbers = spacing(owner[name]) if name == SPACING else None
            if numbers is not None:
                owner.setdefault(f"{SPACING}_mm", numbers)
