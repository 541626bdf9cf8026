"""OME-XML that lies in a file beside the TIFFs whose planes it describes (`.companion.ome`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree  # writes only; `markup` parses

from tifffile import TiffFile, TiffFileError

from napari_wsigpu.formats import markup
from napari_wsigpu.formats.tiff import claims
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    SlideError,
    UnsupportedSlideError,
    file_error,
)
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.tags import TIFF_MAGIC

if TYPE_CHECKING:
    from collections.abc import Iterator
    from xml.etree.ElementTree import Element

BEGIN = re.compile(
    rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]{0,200}\?>\s*)?(<!--.{0,2000}?-->\s*)*<(\w{1,20}:)?OME[\s>]",
    re.DOTALL,
)
# Of images with such names another one is the slide.
BESIDE = re.compile(r"label|macro|overview|thumbnail", re.IGNORECASE)
LONGEST_CHARACTER = 4  # bytes in UTF-8


def probe(head: bytes) -> bool:
    """Whether a file that begins so is OME-XML by itself."""
    return BEGIN.match(head) is not None


def of_file(file: TiffFile, root: Element | None) -> str | None:
    """Return the OME-XML that an OME-TIFF's own XML says to lie beside it.

    Returns
    -------
    str or None
        As `naming` gives it; None if the file's own says no such thing, or the other file is not
        there, can't be read or does not name this one.
    """
    binary = markup.child(root, "BinaryOnly")
    if root is None or binary is None or not file.filehandle.is_file:
        return None
    path = _beside(Path(file.filehandle.path), binary.get("MetadataFile"))
    try:
        return None if path is None else naming(_read(path), file.filename, root.get("UUID"))
    except (SlideError, OSError, TiffFileError, ValueError):
        return None


def naming(xml: str, name: str, uuid: str | None = None) -> str | None:
    """Return OME-XML as if it lay in one of the files that it names; None if it doesn't.

    Parameters
    ----------
    xml : str
        The text.
    name, uuid : str
        The file's, of which either may be in the text.

    Raises
    ------
    ValueError
        If the text is no XML that is parsed, or is nested too deep.
    """
    root = markup.root(xml)
    if markup.is_deep(root):  # to write it, ElementTree calls itself
        raise ValueError("its XML is nested deeper than OME-XML is")
    planes = [data for data in root.iter() if markup.name(data) == "TiffData"]
    named = {element.text or "": element.get("FileName", "") for element in _uuids(root)}
    own = next((key for key, each in named.items() if each.lower() == name.lower()), uuid) or ""
    # Planes of no named file would be those of whichever is opened.
    elsewhere = all(markup.child(data, "UUID") is not None for data in planes)
    if not own or own not in named or not elsewhere or markup.child(root, "BinaryOnly") is not None:
        return None
    copy = ElementTree.Element(root.tag, {**root.attrib, "UUID": own})
    copy.extend(root)
    return ElementTree.tostring(copy, encoding="unicode")


def main_file(path: Path) -> tuple[Path, str]:
    """Return a file of the largest image that OME-XML describes, and the XML as of `naming`.

    Raises
    ------
    CorruptSlideError
        If the XML is damaged, or no file that it names lies beside it.
    SlideError
        If it can't be read, or is too long.
    """
    try:
        xml = _read(path)
        images = sorted(markup.children(markup.root(xml), "Image"), key=_rank, reverse=True)
        named = (_beside(path, each.get("FileName")) for image in images for each in _uuids(image))
        file = next((each for each in named if each is not None and each.is_file()), None)
        found = None if file is None else naming(xml, file.name)
    except OSError as error:
        raise file_error(str(path), error) from error
    except ValueError as error:
        raise CorruptSlideError(
            f"The OME-XML of '{path}' can't be read ({error}); get a fresh copy of the file."
        ) from error
    if file is not None and found is not None:
        return file, found
    raise CorruptSlideError(
        f"'{path}' describes planes in other files, none of which lies beside it; copy all of them "
        "to one folder."
    )


def _read(path: Path) -> str:
    """Return the OME-XML in a file: the whole of it, or a TIFF's description."""
    if not path.is_file():  # to open a pipe would wait
        raise FileNotFoundError(2, "No such file", str(path))
    with path.open("rb") as stream:
        if not stream.read(max(map(len, TIFF_MAGIC))).startswith(TIFF_MAGIC):
            stream.seek(0)
            data = stream.read(LONGEST_CHARACTER * limits.xml_bytes + 1)
            if len(data) > LONGEST_CHARACTER * limits.xml_bytes:
                raise UnsupportedSlideError(
                    f"The OME-XML of '{path}' is longer than any slide's: "
                    f"{limits.advice('header_bytes')}."
                )
            return data.decode("utf-8-sig", "replace")
    with TiffFile(path) as file:
        claims.check(file, str(path))
        return str(file.pages.first.description)


def _beside(path: Path, name: str | None) -> Path | None:
    """Return the path of a file beside another one; None if it is named by a path."""
    return path.with_name(name) if name and Path(name).name == name else None


def _uuids(element: Element) -> Iterator[Element]:
    return (found for found in element.iter() if markup.name(found) == "UUID")


def _rank(image: Element) -> tuple[bool, int]:
    """Return what is larger of the image that is the slide."""
    pixels = markup.child(image, "Pixels")
    try:
        area = 0 if pixels is None else int(pixels.get("SizeX", 0)) * int(pixels.get("SizeY", 0))
    except ValueError:
        area = 0
    return not BESIDE.search(image.get("Name", "")), area
