"""What of a slide can name a patient, and its metadata with that hidden.

What is shown is decided by the words of a field's key, whoever wrote the file. A text is shown
only if all words of its key are known to be technical, as nobody can list what people write where
they are free to write. A number, a size or a yes or no is shown unless its key speaks of people,
dates or places.
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

KEPT = frozenset({"vendor", "objective", "mpp"})
OWN_WORDS = ("", "problems")  # a key that no file says, but this program
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
    "address", "admission", "age", "annotation", "annotations", "artist", "author", "by", "case",
    "cases", "clinic", "clinical", "computer", "consultant", "copyright", "created", "creation",
    "creator", "customer", "date", "dates", "department", "directory", "dob", "doctor", "dsr",
    "email", "encounter", "ethnic", "facility", "fallnummer", "folder", "fullname", "gender",
    "history", "host", "institute", "investigator", "lab", "laboratory", "modified", "mrn",
    "nachname", "nhs", "nom", "note", "notes", "organisation", "organization", "owner", "person",
    "phone", "pid", "project", "ptname", "race", "remark", "remarks", "reviewer", "serial",
    "server", "sex", "ssn", "staff", "station", "study", "submitter", "surname", "technician",
    "technologist", "timestamp", "updated", "uri", "url", "user", "users", "vorname", "ward",
    "workstation",
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
# Of other keys, these words tell that a text is technical as well.
KNOWN = TECHNICAL | {
    "ahex", "amplification", "arc", "balance", "band", "bits", "brightfield", "calibration",
    "cameras", "ccd", "contrast", "cube", "dichroic", "dimension", "display", "dyes", "emission",
    "endian", "excitation", "filtered", "filters", "fluorescence", "fluors", "focalplane", "focus",
    "gamma", "icc", "immersion", "intensity", "interface", "interleaved", "iris", "jpeg", "laser",
    "layers", "led", "lossy", "lut", "mag", "magnification", "make", "mhln", "mirror", "modality",
    "mpp", "objectives", "parmset", "pinhole", "pitch", "planar", "ploidy", "power", "predictor",
    "profile", "pshv", "ratio", "res", "rescale", "rgb", "scan", "scope", "sharpness", "sop",
    "spacing", "spacings", "speed", "stains", "stitching", "stripe", "tile", "tiles",
    "transmittance", "versions", "voltage", "volumetric", "wavelengths", "yrnp", "zoom",
}  # fmt: skip
IDENTIFIERS = frozenset({
    "code", "id", "ids", "identification", "key", "no", "nr", "number",
})  # fmt: skip
# Say nothing of themselves: of a field of such a name, the key above it must be technical.
NEUTRAL = DOUBTFUL | IDENTIFIERS | {
    "acquisition", "app", "area", "background", "big", "bottom", "build", "c", "center", "centre",
    "character", "class", "conversion", "correction", "data", "depth", "derived", "designator",
    "detection", "dicom", "distance", "dp", "effective", "first", "height", "high", "horizontal",
    "image", "imaged", "images", "in", "indicator", "information", "interpretation", "last", "left",
    "line", "low", "management", "maximum", "meaning", "media", "medium", "method", "minimum",
    "mode", "nominal", "numerical", "order", "orientation", "original", "out", "per", "physical",
    "piim", "pim", "position", "presentation", "properties", "property", "quality", "range", "ref",
    "representation", "right", "sampling", "scheme", "sequence", "set", "settings", "significant",
    "slide", "source", "space", "specific", "storage", "system", "t", "top", "total", "transfer",
    "ufs", "unit", "units", "value", "values", "vertical", "width", "working", "x", "y", "z",
}  # fmt: skip
SUBJECTS = frozenset({
    "batch", "block", "cassette", "container", "job", "order", "request", "requisition", "sample",
    "slide", "tissue",
})  # fmt: skip
LABELS, CONTENTS = ("name", "key", "k"), ("value", "v", "content", "text", "#text")

# Usual dyes of channels: no person's name, unlike "Alexa" or "Opal" without a number.
DYE = re.compile(
    r"(brightfield|dapi|dsred|ecfp|egfp|eosin|eyfp|fitc|gcamp|ha?ematoxylin|hoechst|lysotracker"
    r"|mcherry|mitotracker|mneongreen|phalloidin|rhodamine|sytox|tamra|tdtomato|texas ?red|tritc)"
    r"([ -]?\d{1,5})?"
    r"|(af|alexa( ?fluor)?|atto|bodipy|cf|cy|draq|dylight|opal)[ -]?\d{1,5}",
    re.IGNORECASE,
)
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
PATH = re.compile(r"\\|\.[A-Za-z]\w*$")
# A document (XML, JSON), which repeats all a file says; a date; a path to a folder.
TELLING = re.compile(
    r"^\s*(<[!?A-Za-z]|\{)"
    r"|(?<!\d)(\d{4}[-:/]\d\d?[-:/]\d\d?|\d\d?/\d\d?/\d\d(\d\d)?)(?!\d)"
    r"|(?<![\d.])\d\d?\.\d\d?\.(19|20)\d\d(?![\d.])"
    r"|(?<!\w)[A-Za-z]:\\|\\\\\w|/(home|Users)/|file:/"
)
DATE = re.compile(r"(?<![\d.])(19|20)\d\d(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])(\d{4}(\d\d)?)?(?!\d)")
BRACKETS = re.compile(r"[\[\]()\"]")
QUANTITY = (
    r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[-+]?[0-9]+)?"
    r"( ?([munµμ]?m|[mµμ]?s|px|pixels?|dpi|bits?|bytes|[kM]?Hz|m?W|[kM]B|°?C|%))?"
)
# Numbers, with or without units, and what can be ticked.
PLAIN = re.compile(
    rf"{QUANTITY}(( ?[,;x\u00d7/] ?| ){QUANTITY})*+( ?[xX])?|(?i:true|false|yes|no|on|off)"
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

    Hidden are the values of private keys (`is_private`), and of keys that aren't known to be
    technical all texts and numbers like 20200131, which can be a date. Hidden are also, whatever
    their keys: what repeats a hidden value other than a usual dye's name, and a text that holds a
    date or a path, or is a document (XML, JSON) or longer than 4096 characters; and, where hidden
    values are so many that they can't be looked for, every other text.

    Parameters
    ----------
    metadata : Mapping
        `Slide.metadata`. Its vendor, objective and pixel size are kept as they are.

    Returns
    -------
    dict
        Of the same keys and lengths; what is None or an empty text stays so.
    """
    private: set[str] = set()
    _rebuild(
        metadata, "", False, False, lambda value, secret: private.update(_texts(value, secret))
    )
    repeats = _Repeats(private)

    def leaf(value: Any, secret: bool) -> Any:
        if value is None or value == "":
            return value
        return MASK if secret else repeats.hidden(value)

    hidden: dict[str, Any] = _rebuild(metadata, "", False, False, leaf)
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


def _rebuild(value: Any, parent: str, secret: bool, technical: bool, leaf: Leaf) -> Any:
    """Copy nested metadata, each leaf replaced by what `leaf` returns of it, and of its privacy."""
    if isinstance(value, Mapping):
        labels = {key: key for key in value} | _labels(value)
        return {
            key: _rebuild(
                item,
                key,
                secret or _speaks_of_people(labels[key], parent),
                _is_technical(labels[key], parent),
                leaf,
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_rebuild(item, parent, secret, technical, leaf) for item in value]
    return leaf(value, secret or not (technical or _is_plain(value)))


def _labels(mapping: Mapping[str, Any]) -> dict[str, str]:
    """Return what the keys of a pair like ``{"Name": label, "Value": value}`` stand for."""
    keys = {key.lower(): key for key in mapping}
    label = next((keys[name] for name in LABELS if name in keys), None)
    content = next((keys[name] for name in CONTENTS if name in keys), None)
    if label is None or content is None or not isinstance(mapping[label], str):
        return {}
    return dict.fromkeys((label, content), mapping[label])


def _texts(value: Any, secret: bool) -> Iterable[str]:
    """Return the texts by which a private value may be repeated elsewhere."""
    if not secret or value is None or isinstance(value, bool):
        return ()
    text = str(value).strip()
    if len(text) > LONGEST_TEXT or DYE.fullmatch(text):
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


def _is_technical(key: str, parent: str) -> bool:
    if (parent, key) == OWN_WORDS:
        return True
    words = _words(key) - NEUTRAL
    if not key.isascii() or not words <= KNOWN:
        return False
    return bool(words) or (parent != "" and _is_technical(parent, ""))


def _is_plain(value: Any) -> bool:
    """Whether a value is no text: a number, some numbers, a size, a yes or no; but no date."""
    text = str(value)
    if value is None or isinstance(value, bool) or not text.strip():
        return True
    if len(text) > LONGEST_TEXT or DATE.search(text):
        return False
    return PLAIN.fullmatch(" ".join(BRACKETS.sub(" ", text).split())) is not None


def _words(key: str) -> frozenset[str]:
    return frozenset(word.lower() for word in WORD.findall(key))
