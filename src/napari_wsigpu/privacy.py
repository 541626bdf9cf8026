"""What of a slide can name a patient, and its metadata with that hidden.

Whether a field is private is decided by the words of its key, whoever wrote the file: a key that
nobody has seen before is private too if it speaks of a name, a date or a path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import PureWindowsPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Leaf = Callable[[Any, bool], Any]

MASK = "[hidden]"
PRIVATE_IMAGES = frozenset({"label", "macro"})

KEPT = frozenset({"vendor", "scanner", "objective", "mpp"})
SHORTEST_REPEAT = 4
LONGEST_TEXT = 4096
MOST_REPEATED = 1 << 15

# Parts of a key's letters, for keys whose words can't be told apart ("PATIENTNAME").
STEMS = (
    "accession", "acquisitiondate", "barcode", "birth", "caseid", "comment", "creationdate",
    "datetime", "diagnos", "experimenter", "filename", "filepath", "hospital", "hostcomputer",
    "hostname", "imagedata", "imageid", "instanceuid", "institution", "ofreferenceuid", "operator",
    "pathologist", "patient", "physician", "sampleid", "scandate", "slideid", "specimen",
    "studydate", "username",
)  # fmt: skip
WORDS = frozenset({
    "address", "age", "annotation", "annotations", "artist", "author", "by", "case", "cases",
    "clinic", "clinical", "computer", "copyright", "created", "creation", "creator", "customer",
    "date", "dates", "department", "directory", "dob", "doctor", "dsr", "email", "ethnic",
    "facility", "folder", "gender", "history", "host", "institute", "investigator", "lab",
    "laboratory", "modified", "mrn", "note", "notes", "organisation", "organization", "owner",
    "person", "phone", "project", "race", "remark", "remarks", "reviewer", "server", "sex", "ssn",
    "staff", "station", "study", "submitter", "surname", "technician", "technologist", "timestamp",
    "updated", "uri", "url", "user", "users", "workstation",
})  # fmt: skip
# Private unless they are said of a part of the microscope or of the pixels ("ChannelName").
DOUBTFUL = frozenset({
    "caption", "description", "file", "files", "guid", "header", "identifier", "label", "labels",
    "message", "name", "names", "path", "paths", "reference", "subject", "summary", "text", "time",
    "title", "uid", "uuid",
})  # fmt: skip
TECHNICAL = frozenset({
    "aperture", "axes", "axis", "binning", "bit", "camera", "channel", "channels", "class",
    "coding", "color", "colour", "compression", "count", "delay", "delta", "detector", "device",
    "dye", "elapsed", "exposure", "filter", "fluor", "fluorophore", "format", "frame", "gain",
    "illumination", "implementation", "increment", "instrument", "integration", "interval", "lamp",
    "length", "lens", "light", "manufacturer", "manufacturers", "method", "microscope", "model",
    "objective", "offset", "optical", "photometric", "pixel", "pixels", "product", "resolution",
    "responsivity", "scale", "scanner", "sensor", "signal", "size", "software", "spectral", "stain",
    "syntax", "transfer", "type", "unit", "units", "vendor", "version", "wavelength", "white", "z",
})  # fmt: skip
IDENTIFIERS = frozenset({
    "code", "id", "ids", "identification", "key", "no", "nr", "number",
})  # fmt: skip
SUBJECTS = frozenset({
    "batch", "block", "cassette", "container", "job", "order", "request", "requisition", "sample",
    "slide", "tissue",
})  # fmt: skip
LABELS, CONTENTS = ("name", "key", "k"), ("value", "v", "content", "text", "#text")

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
PATH = re.compile(r"\\|\.[A-Za-z]\w*$")
# A document (XML, JSON), which repeats all a file says; a date; a path to a folder.
TELLING = re.compile(
    r"^\s*(<[!?A-Za-z]|\{)"
    r"|(?<!\d)(\d{4}[-:/]\d\d?[-:/]\d\d?|\d\d?/\d\d?/\d\d(\d\d)?)(?!\d)"
    r"|(?<!\w)[A-Za-z]:\\|\\\\\w|/(home|Users)/|file:/"
)


def is_private(names: Sequence[str]) -> bool:
    """Whether a field can name a patient, or who examined it, where and when.

    Parameters
    ----------
    names : sequence of str
        The keys that lead to the field, outermost first. A field below a private key is private.
    """
    return any(_speaks_of_people(key, parent) for parent, key in pairwise(("", *names)))


def masked(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a slide's metadata with `MASK` in place of all that is private.

    Hidden are the values of private keys (`is_private`), also where they are repeated within
    another text; whatever its key, a text that holds a date or a path, or is a document (XML,
    JSON) or longer than 4096 characters; and, where private values are so many that they can't
    be looked for, every other text.

    Parameters
    ----------
    metadata : Mapping
        `Slide.metadata`. Its vendor, scanner, objective and pixel size are kept as they are.

    Returns
    -------
    dict
        Of the same keys and lengths; what is None or an empty text stays so.
    """
    private: set[str] = set()
    _rebuild(metadata, "", False, lambda value, secret: private.update(_texts(value, secret)))
    repeats = _Repeats(private)

    def leaf(value: Any, secret: bool) -> Any:
        if value is None or value == "":
            return value
        return MASK if secret else repeats.hidden(value)

    hidden: dict[str, Any] = _rebuild(metadata, "", False, leaf)
    return hidden | {key: metadata[key] for key in KEPT & metadata.keys()}


class _Repeats:
    """Private values, to be found again in other values."""

    def __init__(self, private: Iterable[str]) -> None:
        self._values = {value.casefold() for value in private}
        self._all = sum(map(len, self._values)) > MOST_REPEATED
        longest_first = [] if self._all else sorted(private, key=len, reverse=True)
        # White space may have been written otherwise.
        patterns = [r"\s+".join(map(re.escape, value.split())) for value in longest_first]
        self._pattern = re.compile("|".join(patterns) or r"(?!)", re.IGNORECASE)

    def hidden(self, value: Any) -> Any:
        if not isinstance(value, str):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            return MASK if number and str(value) in self._values else value
        if self._all or len(value) > LONGEST_TEXT or TELLING.search(value):
            return MASK
        return self._pattern.sub(MASK, value)


def _rebuild(value: Any, parent: str, secret: bool, leaf: Leaf) -> Any:
    """Copy nested metadata, each leaf replaced by what `leaf` returns of it."""
    if isinstance(value, Mapping):
        labels = {key: key for key in value} | _labels(value)
        return {
            key: _rebuild(item, key, secret or _speaks_of_people(labels[key], parent), leaf)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_rebuild(item, parent, secret, leaf) for item in value]
    return leaf(value, secret)


def _labels(mapping: Mapping[str, Any]) -> dict[str, str]:
    """Return what the keys of a pair like ``{"Name": label, "Value": value}`` stand for."""
    keys = {key.lower(): key for key in mapping}
    label = next((keys[name] for name in LABELS if name in keys), None)
    content = next((keys[name] for name in CONTENTS if name in keys), None)
    if label is None or content is None or not isinstance(mapping[label], str):
        return {}
    return {label: "", content: mapping[label]}


def _texts(value: Any, secret: bool) -> Iterable[str]:
    """Return the texts by which a private value may be repeated elsewhere."""
    if not secret or value is None or isinstance(value, bool):
        return ()
    text = str(value).strip()
    if len(text) > LONGEST_TEXT:
        return ()
    path = PureWindowsPath(text if PATH.search(text) else "")  # knows both kinds of slashes
    return {part for part in (text, path.name, path.stem) if len(part) >= SHORTEST_REPEAT}


def _speaks_of_people(key: str, parent: str) -> bool:
    letters = re.sub(r"[^a-z]", "", key.lower())
    if any(stem in letters for stem in STEMS):
        return True
    words = _words(key)
    if not words:
        return not key.isascii()
    if words & WORDS:
        return True
    context = words if words - DOUBTFUL - IDENTIFIERS else words | _words(parent)
    return bool(
        (words & DOUBTFUL and not context & TECHNICAL)
        or (words & IDENTIFIERS and context & SUBJECTS)
    )


def _words(key: str) -> frozenset[str]:
    return frozenset(word.lower() for word in WORD.findall(key))
