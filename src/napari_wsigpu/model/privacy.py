"""Separate a slide's technical metadata from data that may identify a patient.

`technical.SECTIONS` lists the fields of each vendor that may be shown. All other values are hidden,
even if other fields or messages repeat them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from pathlib import PureWindowsPath
from typing import TYPE_CHECKING, Any, NamedTuple

from napari_wsigpu.model.technical import SECTIONS, Kind, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Fields = Mapping[str, object]

MASK = "[hidden]"
PRIVATE_IMAGES = frozenset({"label", "macro"})

# Shorter strings and numbers occur elsewhere by chance. Strings of up to `WHOLE_WORD` characters
# are hidden only where they are whole words.
SHORTEST_REPEAT, SHORTEST_NUMBER, WHOLE_WORD = 3, 6, 3
LONGEST_TEXT = 4096
# Total length of the hidden values to search for; if they are longer, all strings are masked.
MOST_SEARCHED = 1 << 15

# Common dyes. "Alexa" and "Opal" are also given names, so they need a number.
DYE = re.compile(
    r"(brightfield|dapi|dsred|ecfp|egfp|eosin|eyfp|fitc|gcamp|ha?ematoxylin|hoechst|lysotracker"
    r"|mcherry|mitotracker|mneongreen|phalloidin|rhodamine|sytox|tamra|tdtomato|texas ?red|tritc)"
    r"([ -]?\d{1,5})?"
    r"|(af|alexa( ?fluor)?|atto|bodipy|cf|cy|draq|dylight|opal)[ -]?\d{1,5}",
    re.IGNORECASE,
)
# Common words in messages about slides, which identify nobody.
COMMON = frozenset({
    "and", "area", "associated", "channel", "channels", "data", "default", "file", "for", "image",
    "images", "label", "labels", "level", "levels", "macro", "name", "none", "not", "off", "one",
    "other", "part", "pixel", "pixels", "plane", "planes", "raw", "red", "region", "rgb", "row",
    "scan", "set", "slide", "test", "the", "thumbnail", "tile", "tiles", "two", "unknown",
    "untitled", "yes",
})  # fmt: skip
PATH = re.compile(r"\\|\.[A-Za-z]\w*$")
# XML or JSON documents, which repeat the whole metadata; dates; absolute paths.
TELLING = re.compile(
    r"^\s*(<[!?A-Za-z]|\{)"
    r"|(?<!\d)(\d{4}[-:/]\d\d?[-:/]\d\d?|\d\d?/\d\d?/\d\d(\d\d)?)(?!\d)"
    r"|(?<![\d.])\d\d?\.\d\d?\.(19|20)\d\d(?![\d.])"
    r"|(?<!\w)[A-Za-z]:\\|\\\\\w|/(home|Users)/|file:/"
)
BRACKETS = re.compile(r"[\[\]()\"]")
QUANTITY = (
    r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[-+]?[0-9]+)?"
    r"( ?([munµμ]?m|[mµμ]?s|px|pixels?|dpi|bits?|bytes|[kM]?Hz|m?W|[kM]B|°?C|%))?"
)
# Numbers with or without units, and Boolean words.
PLAIN = re.compile(
    rf"{QUANTITY}(( ?[,;x\u00d7/] ?| ){QUANTITY})*+( ?[xX])?|(?i:true|false|yes|no|on|off)"
)
SEPARATORS = re.compile(r"[/\\]")
# Quotes that open or close a quoted name, as opposed to apostrophes.
OPENING, CLOSING = re.compile(r"(?:^|(?<=[\s(]))['\"]"), re.compile(r"['\"](?=[\s.,;:)!?]|$)")


class Screen:
    """Hides whatever may identify a patient in a slide's metadata and messages.

    Parameters
    ----------
    metadata : Mapping
        `Slide.metadata`.
    path : str
        The slide's path. Messages may contain it, because their readers know it anyway.

    Attributes
    ----------
    metadata : dict
        The metadata with `MASK` instead of the value of each field that is not known to be
        technical, and instead of the name of each unknown field. Technical fields are masked where
        they repeat a hidden value, unless that is a common dye or a word like "image"; where they
        hold a date, a path or a document (XML, JSON); and where they exceed 4096 characters. If
        there are too many hidden values to search for, all strings are masked. None and empty
        values stay.
    """

    def __init__(self, metadata: Mapping[str, object], path: str = "") -> None:
        private: set[str] = set()
        shown = _known("", metadata, private)
        self._repeats = _Repeats(private)
        self._own = [f"'{name}'" for name in (path, SEPARATORS.split(path)[-1]) if name]
        self.metadata: dict[str, Any] = self._cleared(shown)

    def text(self, text: str) -> str:
        """Mask a name, such as a channel's, by the rules for technical fields of `metadata`.

        Users may have typed a patient's name in any field that accepts free text.
        """
        shown: str = self._cleared(_Technical(text))
        return shown

    def sentence(self, text: str) -> str:
        """Mask quotations from the file and names of other files in a message of this package."""
        for name in self._own:
            if name in text:
                return name.join(map(self.sentence, text.split(name)))
        opening = OPENING.search(text)
        closing = deque(CLOSING.finditer(text), maxlen=1)
        if opening and closing and opening.end() <= closing[0].start():
            text = f"{text[: opening.end()]}{MASK}{text[closing[0].start() :]}"
        return self._repeats.hidden(text)

    def sentences(self, texts: Iterable[str]) -> list[str]:
        """Apply `sentence` to several messages."""
        return [self.sentence(text) for text in texts]

    def _cleared(self, value: object) -> Any:
        """Copy nested metadata and mask its strings where necessary."""
        if isinstance(value, dict):
            return {key: self._cleared(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._cleared(item) for item in value]
        if not isinstance(value, _Technical):
            return value
        if len(value) > LONGEST_TEXT or TELLING.search(value):
            return MASK
        return self._repeats.hidden(str(value))


def masked(metadata: Mapping[str, object]) -> dict[str, Any]:
    """Return a slide's metadata without anything that may identify a patient; see `Screen`."""
    return Screen(metadata).metadata


class _Technical(str):
    """A string that may be shown unless it repeats a private value."""

    __slots__ = ()


def _known(section: str, fields: Fields, private: set[str], parent: str = "") -> dict[str, object]:
    """Copy the fields that may be shown, and add the strings in all others to `private`."""
    found: dict[str, object] = {}
    for key, value in fields.items():
        if not section and not parent and isinstance(value, Mapping):
            kind = Kind.GROUP if key in SECTIONS else None
        else:
            kind = kind_of(section, parent, key)
        if kind is None:
            private.update(_texts(value))
            found[MASK] = MASK
        elif kind is Kind.PRIVATE:
            private.update(_texts(value))
            found[key] = _hidden(value)
        elif section or parent or not isinstance(value, Mapping):
            found[key] = _value(section, kind, key, value, private)
        else:
            found[key] = _known(key, value, private)
    return found


def _value(section: str, kind: Kind, key: str, value: object, private: set[str]) -> object:
    """Copy the value of a known field, or mask it if it does not match the field's kind."""
    if isinstance(value, Mapping):
        return _known(section, value, private, key)
    if isinstance(value, list | tuple):
        return [_value(section, kind, key, item, private) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if kind is Kind.TEXT and isinstance(value, str):
        return _Technical(value)
    if kind is not Kind.GROUP and _is_plain(value):
        return value
    private.update(_texts(value))
    return _hidden(value)


def _hidden(value: object) -> object:
    """Return `MASK`, or the value itself if it is empty and thus reveals nothing."""
    return value if value is None or value in ("", [], {}) else MASK


def _texts(value: object) -> Iterable[str]:
    """Yield the strings to search for, in case other fields repeat a private value."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
        return
    text = "" if value is None or isinstance(value, bool) else str(value).strip()
    if len(text) > LONGEST_TEXT or text.casefold() in COMMON or DYE.fullmatch(text):
        return
    shortest = SHORTEST_NUMBER if _is_plain(text) else SHORTEST_REPEAT
    path = PureWindowsPath(text if PATH.search(text) else "")  # splits at both kinds of slashes
    yield from (part for part in (text, path.name, path.stem) if len(part) >= shortest)


def _is_plain(value: object) -> bool:
    """Whether a value is empty, yes or no, or only numbers with optional units."""
    text = str(value)
    if len(text) > LONGEST_TEXT:
        return False
    return not text or PLAIN.fullmatch(" ".join(BRACKETS.sub(" ", text).split())) is not None


class _Node(NamedTuple):
    """A prefix of private values: a state of the Aho-Corasick automaton.

    Attributes
    ----------
    following : dict
        Nodes of the prefixes that are one letter longer, by that letter.
    shorter : list of _Node
        Node of the longest proper suffix that is also a prefix; empty for the root.
    length : list of int
        Length of the longest private value that ends here, or 0.
    """

    following: dict[str, _Node]
    shorter: list[_Node]
    length: list[int]


class _Repeats:
    """Finds private values in a string, in time proportional to its length."""

    def __init__(self, private: Iterable[str]) -> None:
        values = {" ".join(_folded(value)[0].split()) for value in private}
        self._all = sum(map(len, values)) > MOST_SEARCHED
        self._root = _Node({}, [], [0])
        for value in () if self._all else values:
            node = self._root
            for letter in value:
                node = node.following.setdefault(letter, _Node({}, [], [0]))
            node.length[0] = len(value)
        # Breadth first: the node of a suffix is nearer to the root, so it is complete already.
        waiting = deque((self._root,))
        while waiting:
            node = waiting.popleft()
            for letter, child in node.following.items():
                shorter = self._after(node.shorter[0], letter) if node.shorter else self._root
                child.shorter.append(shorter)
                child.length[0] = child.length[0] or shorter.length[0]
                waiting.append(child)

    def hidden(self, text: str) -> str:
        """Replace all private values in `text` by `MASK`."""
        if self._all:
            return MASK
        folded, positions = _folded(text)
        found: list[tuple[int, int]] = []
        node = self._root
        for index, letter in enumerate(folded):
            node = self._after(node, letter)
            first, end = index + 1 - node.length[0], index + 1
            if node.length[0] and not _is_within(folded, first, end):
                start, stop = positions[first], positions[index] + 1
                while found and start <= found[-1][1]:
                    start = min(start, found.pop()[0])
                found.append((start, stop))
        for start, stop in reversed(found):
            text = f"{text[:start]}{MASK}{text[stop:]}"
        return text

    def _after(self, node: _Node, letter: str) -> _Node:
        """Return the next state of the automaton."""
        while letter not in node.following:
            if not node.shorter:
                return node
            node = node.shorter[0]
        return node.following[letter]


def _is_within(text: str, start: int, end: int) -> bool:
    """Whether a short match is only a part of a word."""
    around = text[start - 1 : start] if start else "", text[end : end + 1]
    return end - start <= WHOLE_WORD and any(map(str.isalnum, around))


def _folded(text: str) -> tuple[str, Sequence[int]]:
    """Return `text` case-folded, with white space collapsed, and each character's old position."""
    letters: list[str] = []
    positions: list[int] = []
    for position, letter in enumerate(text):
        if not letter.isspace():
            small = letter.casefold()
        elif letters and letters[-1] == " ":
            continue
        else:
            small = " "
        letters += small
        positions += [position] * len(small)
    return "".join(letters), positions
