"""Read the tree of tags in an Olympus .vsi file, which describes the images in its .ets files."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

Value: TypeAlias = "int | float | str | tuple[int, ...] | tuple[float, ...] | None"

MAGIC = b"\x18\0IS"  # starts every block of tags; the first block follows the TIFF header
FIRST = 8
MOST_TAGS, DEEPEST = 1 << 18, 24
LONGEST_VALUE = 1 << 16
NUMBERS = {
    1: "b", 2: "B", 3: "h", 4: "H", 5: "i", 6: "I", 7: "q", 8: "Q", 9: "f", 10: "d", 14: "I",
    17: "q", 18: "d",
}  # fmt: skip
TEXTS = (13, 8192)
WHOLE_NUMBERS = {256, 257, 258, 259, 267, 274, 275, 276, 277, 8195, 8199, 8200}
REAL_NUMBERS = {11, 260, 261, 262, 263, 268, 279, 280}
COLORS = {269: (0, 1, 2), 270: (2, 1, 0)}


@dataclass
class Node:
    """A tag with its value or its children, and its index among tags of the same code."""

    tag: int
    number: int | None = None
    value: Value = None
    children: list[Node] = field(default_factory=list)

    def all(self, tag: int) -> Iterator[Node]:
        """Return an iterator over the children with this tag."""
        return (child for child in self.children if child.tag == tag)

    def first(self, *tags: int) -> Node | None:
        """Return the first descendant at a path of tags; None if there is none."""
        found: Node | None = self
        for tag in tags:
            found = None if found is None else next(found.all(tag), None)
        return found

    def value_of(self, *tags: int) -> Value:
        """Return the value of the descendant at a path of tags; None if there is none."""
        found = self.first(*tags)
        return None if found is None else found.value

    def anywhere(self, tag: int) -> Iterator[Node]:
        """Yield all descendants with this tag."""
        for child in self.children:
            if child.tag == tag:
                yield child
            yield from child.anywhere(tag)


def read_tags(data: bytes) -> Node:
    """Read the tree of tags; damaged parts are left out."""
    root = Node(0)
    _Reader(data).block(FIRST, root, DEEPEST)
    return root


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left = MOST_TAGS  # bounds the work, since blocks may refer to each other

    def block(self, start: int, parent: Node, depth: int) -> None:
        """Append the tags of the block at an offset to `parent`."""
        data = self._data
        if not depth or data[start : start + 4] != MAGIC or start + 24 > len(data):
            return
        offset, flags = struct.unpack_from("<qI", data, start + 8)
        at = start + offset
        for _ in range(flags & 0xFFFFFFF):
            self._left -= 1
            if self._left < 0 or not 0 <= at <= len(data) - 20:
                return
            kind, tag, following, size = struct.unpack_from("<IiiI", data, at)
            content, number = at + 16, None
            if kind >> 27 & 1:
                (number,) = struct.unpack_from("<i", data, content)
                content += 4
            node = Node(tag, number)
            parent.children.append(node)
            if kind >> 28 & 1:
                if kind & 0xFFFFFF in (0, 1, 2):
                    self.block(content, node, depth - 1)
            elif kind >> 30 & 1:
                node.value = size
            elif size <= LONGEST_VALUE:
                node.value = _value(kind & 0xFFFFFF, data[content : content + size])
            if following <= 0:
                return
            at = start + following


def _value(kind: int, data: bytes) -> Value:
    """Decode a number, a string or a tuple of numbers; None for an unknown type."""
    if kind in TEXTS:
        return data.decode("utf-16-le", "replace").partition("\0")[0]
    if kind in NUMBERS:
        size = struct.calcsize(NUMBERS[kind])
        return struct.unpack(f"<{NUMBERS[kind]}", data[:size])[0] if len(data) >= size else None
    if kind in WHOLE_NUMBERS:
        return struct.unpack(f"<{len(data) // 4}i", data[: len(data) // 4 * 4])
    if kind in REAL_NUMBERS:
        return struct.unpack(f"<{len(data) // 8}d", data[: len(data) // 8 * 8])
    if kind in COLORS and len(data) >= 3:
        return tuple(data[-3:][index] for index in COLORS[kind])  # the last color of a gradient
    return None
