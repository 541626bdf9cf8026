"""What of a slide may be shown to anybody, and what can name a patient.

`technical.SECTIONS` lists the fields of each vendor that are shown; all others are hidden, and so
is what repeats them elsewhere.
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

MASK = "[hidden]"
PRIVATE_IMAGES = frozenset({"label", "macro"})

# Shorter texts are repeated by chance, and the shortest of these within other words.
SHORTEST_REPEAT, SHORTEST_NUMBER, WHOLE_WORD = 3, 6, 3
LONGEST_TEXT = 4096
MOST_REPEATED = 1 << 15

# Usual dyes of channels: no person's name, unlike "Alexa" or "Opal" without a number.
DYE = re.compile(
    r"(brightfield|dapi|dsred|ecfp|egfp|eosin|eyfp|fitc|gcamp|ha?ematoxylin|hoechst|lysotracker"
    r"|mcherry|mitotracker|mneongreen|phalloidin|rhodamine|sytox|tamra|tdtomato|texas ?red|tritc)"
    r"([ -]?\d{1,5})?"
    r"|(af|alexa( ?fluor)?|atto|bodipy|cf|cy|draq|dylight|opal)[ -]?\d{1,5}",
    re.IGNORECASE,
)
# Words of files that name nobody, and that sentences about slides need.
COMMON = frozenset({
    "and", "area", "associated", "channel", "channels", "data", "default", "file", "for", "image",
    "images", "label", "labels", "level", "levels", "macro", "name", "none", "not", "off", "one",
    "other", "part", "pixel", "pixels", "plane", "planes", "raw", "red", "region", "rgb", "row",
    "scan", "set", "slide", "test", "the", "thumbnail", "tile", "tiles", "two", "unknown",
    "untitled", "yes",
})  # fmt: skip
PATH = re.compile(r"\\|\.[A-Za-z]\w*$")
# A document (XML, JSON), which repeats all a file says; a date; a path to a folder.
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
# Numbers, with or without units, and what can be ticked.
PLAIN = re.compile(
    rf"{QUANTITY}(( ?[,;x\u00d7/] ?| ){QUANTITY})*+( ?[xX])?|(?i:true|false|yes|no|on|off)"
)
FOLDERS = re.compile(r"[/\\]")
OPENING, CLOSING = re.compile(r"(?:^|(?<=[\s(]))['\"]"), re.compile(r"['\"](?=[\s.,;:)!?]|$)")


class Screen:
    """Shows of one slide what may be shown to anybody.

    Parameters
    ----------
    metadata : Mapping
        `Slide.metadata`.
    path : str
        The slide's own path, which sentences may name; its reader has it already.

    Attributes
    ----------
    metadata : dict
        The same with `MASK` in place of the values of all fields that aren't known to be technical,
        and of the names of those that aren't known at all. Hidden is also, whatever their names:
        what repeats a hidden value other than a usual dye's name or a word like "image", and a
        text that holds a date or a path, or is a document (XML, JSON) or longer than 4096
        characters; and, where hidden values are so many that they can't be looked for, every text.
        What is None or an empty text stays.
    """

    def __init__(self, metadata: Mapping[str, Any], path: str = "") -> None:
        private: set[str] = set()
        shown = _known("", metadata, private)
        self._repeats = _Repeats(private)
        self._own = [f"'{name}'" for name in (path, FOLDERS.split(path)[-1]) if name]
        self.metadata: dict[str, Any] = self._cleared(shown)

    def text(self, text: str) -> str:
        """Return a name that is shown, as that of a channel, as `metadata` shows a text.

        People type what they like where a name is asked for, also whose slide it is.
        """
        shown: str = self._cleared(_Technical(text))
        return shown

    def sentence(self, text: str) -> str:
        """Return a sentence of this program, without what it quotes of the file or its siblings."""
        for name in self._own:
            if name in text:
                return name.join(map(self.sentence, text.split(name)))
        opening = OPENING.search(text)
        closing = deque(CLOSING.finditer(text), maxlen=1)
        if opening and closing and opening.end() <= closing[0].start():
            text = f"{text[: opening.end()]}{MASK}{text[closing[0].start() :]}"
        return self._repeats.hidden(text)

    def sentences(self, texts: Iterable[str]) -> list[str]:
        """Return several as `sentence` does."""
        return [self.sentence(text) for text in texts]

    def _cleared(self, value: Any) -> Any:
        """Copy nested metadata, with what is hidden in its texts left out."""
        if isinstance(value, dict):
            return {key: self._cleared(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._cleared(item) for item in value]
        if not isinstance(value, _Technical):
            return value
        if len(value) > LONGEST_TEXT or TELLING.search(value):
            return MASK
        return self._repeats.hidden(str(value))


def masked(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a slide's metadata as `Screen` shows it."""
    return Screen(metadata).metadata


class _Technical(str):
    """A text that is shown unless it repeats what is private."""

    __slots__ = ()


def _known(section: str, fields: Mapping[str, Any], private: set[str], parent: str = "") -> Any:
    """Copy the fields that are known; collect the texts of all others."""
    found: dict[str, Any] = {}
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
        elif section or parent or kind is not Kind.GROUP:
            found[key] = _value(section, kind, key, value, private)
        else:
            found[key] = _known(key, value, private)
    return found


def _value(section: str, kind: Kind, key: str, value: Any, private: set[str]) -> Any:
    """Copy what a known field holds."""
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


def _hidden(value: Any) -> Any:
    """Return what stands for a private value; that there is none isn't private."""
    return value if value is None or value in ("", [], {}) else MASK


def _texts(value: Any) -> Iterable[str]:
    """Yield the texts by which a private value may be repeated elsewhere."""
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
    path = PureWindowsPath(text if PATH.search(text) else "")  # knows both kinds of slashes
    yield from (part for part in (text, path.name, path.stem) if len(part) >= shortest)


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, some numbers, a size, a yes or no, or empty."""
    text = str(value)
    if len(text) > LONGEST_TEXT:
        return False
    return not text or PLAIN.fullmatch(" ".join(BRACKETS.sub(" ", text).split())) is not None


class _Node(NamedTuple):
    """What follows some first letters of private values (Aho and Corasick's automaton).

    Attributes
    ----------
    following : dict
        The next letter, and the node of all of them.
    shorter : list of _Node
        The node of the longest end of these letters that private values begin with.
    length : list of int
        Of the longest private value that ends here; 0 for none.
    """

    following: dict[str, _Node]
    shorter: list[_Node]
    length: list[int]


class _Repeats:
    """Private values, to be found again in texts, in time that grows with the text alone."""

    def __init__(self, private: Iterable[str]) -> None:
        values = {" ".join(_folded(value)[0].split()) for value in private}
        self._all = sum(map(len, values)) > MOST_REPEATED
        self._root = _Node({}, [], [0])
        for value in () if self._all else values:
            node = self._root
            for letter in value:
                node = node.following.setdefault(letter, _Node({}, [], [0]))
            node.length[0] = len(value)
        waiting = deque((self._root,))
        while waiting:
            node = waiting.popleft()
            for letter, child in node.following.items():
                shorter = self._after(node.shorter[0], letter) if node.shorter else self._root
                child.shorter.append(shorter)
                child.length[0] = child.length[0] or shorter.length[0]
                waiting.append(child)

    def hidden(self, text: str) -> str:
        """Return a text with `MASK` for what it repeats."""
        if self._all:
            return MASK
        folded, places = _folded(text)
        found: list[tuple[int, int]] = []
        node = self._root
        for at, letter in enumerate(folded):
            node = self._after(node, letter)
            if node.length[0] and not _is_within(folded, at + 1 - node.length[0], at + 1):
                begin, end = places[at + 1 - node.length[0]], places[at] + 1
                while found and begin <= found[-1][1]:
                    begin = min(begin, found.pop()[0])
                found.append((begin, end))
        for begin, end in reversed(found):
            text = f"{text[:begin]}{MASK}{text[end:]}"
        return text

    def _after(self, node: _Node, letter: str) -> _Node:
        while letter not in node.following:
            if not node.shorter:
                return node
            node = node.shorter[0]
        return node.following[letter]


def _is_within(text: str, begin: int, end: int) -> bool:
    """Whether a short text is only a part of a word."""
    around = text[begin - 1 : begin] if begin else "", text[end : end + 1]
    return end - begin <= WHOLE_WORD and any(map(str.isalnum, around))


def _folded(text: str) -> tuple[str, Sequence[int]]:
    """Return a text in small letters, a space for all white space, and where each letter was."""
    letters: list[str] = []
    places: list[int] = []
    for place, letter in enumerate(text):
        if not letter.isspace():
            small = letter.casefold()
        elif letters and letters[-1] == " ":
            continue
        else:
            small = " "
        letters += small
        places += [place] * len(small)
    return "".join(letters), places
