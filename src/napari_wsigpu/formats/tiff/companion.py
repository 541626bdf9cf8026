"""OME-XML in a companion file (`.companion.ome`) next to the TIFFs whose planes it describes."""

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

START = re.compile(
    rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]{0,200}\?>\s*)?(<!--.{0,2000}?-->\s*)*<(\w{1,20}:)?OME[\s>]",
    re.DOTALL,
)
# An image with one of these names is not the slide itself.
ASSOCIATED = re.compile(r"label|macro|overview|thumbnail", re.IGNORECASE)
LONGEST_CHARACTER = 4  # bytes in UTF-8


def probe(head: bytes) -> bool:
    """Whether a file that starts with these bytes is OME-XML."""
    return START.match(head) is not None


def of_file(file: TiffFile, root: Element | None) -> str | None:
    """Return the OME-XML of the companion file that an OME-TIFF's own XML (BinaryOnly) names.

    Returns
    -------
    str or None
        As returned by `xml_for_file`; None if the file's XML names no companion, or the companion
        is missing, can't be read or does not name this file.
    """
    binary = markup.child(root, "BinaryOnly")
    if root is None or binary is None or not file.filehandle.is_file:
        return None
    path = _same_folder(Path(file.filehandle.path), binary.get("MetadataFile"))
    try:
        return None if path is None else xml_for_file(_read(path), file.filename, root.get("UUID"))
    except (SlideError, OSError, TiffFileError, ValueError):
        return None


def of_renamed(file: TiffFile, root: Element | None) -> str | None:
    """Return the OME-XML of a file that was renamed, with the UUID that the file had.

    Bio-Formats, too, takes a missing file for this one if the XML names no other file.

    Returns
    -------
    str or None
        As returned by `xml_for_file`; None if the file's XML has a UUID, describes several images
        or does not name exactly one file, or if the file that it names exists.
    """
    if root is None or root.get("UUID") is not None or not file.filehandle.is_file:
        return None
    named = {(uuid.text, uuid.get("FileName")) for uuid in _uuids(root)}
    if len(named) != 1 or len(list(markup.children(root, "Image"))) != 1:
        return None
    [(uuid, name)] = named
    former = _same_folder(Path(file.filehandle.path), name)
    if former is None or former.exists():
        return None
    try:
        return xml_for_file(file.ome_metadata or "", file.filename, uuid)
    except ValueError:
        return None


def xml_for_file(xml: str, name: str, uuid: str | None = None) -> str | None:
    """Return OME-XML as if it were stored in one of the files that it names.

    Parameters
    ----------
    xml : str
        The text of the companion file.
    name, uuid : str
        Name and UUID of the file; the text must contain one of them.

    Returns
    -------
    str or None
        The text with the file's UUID as its own; None if it does not name the file.

    Raises
    ------
    ValueError
        If `markup.root` refuses the text, or it is nested too deeply.
    """
    root = markup.root(xml)
    if markup.is_deep(root):  # ElementTree serializes by recursion
        raise ValueError("its XML is nested deeper than OME-XML is")
    planes = [data for data in root.iter() if markup.name(data) == "TiffData"]
    named = {element.text or "": element.get("FileName", "") for element in _uuids(root)}
    own = next((key for key, each in named.items() if each.lower() == name.lower()), uuid) or ""
    # tifffile would look for a plane without a file in whichever file is opened.
    placed = all(markup.child(data, "UUID") is not None for data in planes)
    if not own or own not in named or not placed or markup.child(root, "BinaryOnly") is not None:
        return None
    copy = ElementTree.Element(root.tag, {**root.attrib, "UUID": own})
    copy.extend(root)
    return ElementTree.tostring(copy, encoding="unicode")


def main_file(path: Path) -> tuple[Path, str]:
    """Return a TIFF of the largest image that a companion file describes, and the XML for it.

    Raises
    ------
    CorruptSlideError
        If the XML is damaged, or none of the files that it names is in its folder.
    SlideError
        If it can't be read, or is too long.
    """
    try:
        xml = _read(path)
        images = sorted(markup.children(markup.root(xml), "Image"), key=_rank, reverse=True)
        uuids = (uuid for image in images for uuid in _uuids(image))
        named = (_same_folder(path, uuid.get("FileName")) for uuid in uuids)
        file = next((each for each in named if each is not None and each.is_file()), None)
        found = None if file is None else xml_for_file(xml, file.name)
    except OSError as error:
        raise file_error(str(path), error) from error
    except ValueError as error:
        raise CorruptSlideError(
            f"The OME-XML of '{path}' can't be read ({error}); get a fresh copy of the file."
        ) from error
    if file is not None and found is not None:
        return file, found
    raise CorruptSlideError(
        f"'{path}' describes planes in other files, none of which are in its folder; copy all of "
        "them to one folder."
    )


def _read(path: Path) -> str:
    """Return the OME-XML of a file: its whole content, or a TIFF's description."""
    if not path.is_file():  # opening a pipe would block
        raise FileNotFoundError(2, "No such file", str(path))
    with path.open("rb") as stream:
        if not stream.read(max(map(len, TIFF_MAGIC))).startswith(TIFF_MAGIC):
            stream.seek(0)
            data = stream.read(LONGEST_CHARACTER * limits.xml_bytes + 1)
            if len(data) > LONGEST_CHARACTER * limits.xml_bytes:
                raise UnsupportedSlideError(
                    f"The OME-XML of '{path}' is longer than in any slide: "
                    f"{limits.advice('header_bytes')}."
                )
            return data.decode("utf-8-sig", "replace")
    with TiffFile(path) as file:
        claims.check(file, str(path))
        return str(file.pages.first.description)


def _same_folder(path: Path, name: str | None) -> Path | None:
    """Return the path of a file in the folder of another; None if `name` includes a folder."""
    return path.with_name(name) if name and Path(name).name == name else None


def _uuids(element: Element) -> Iterator[Element]:
    return (found for found in element.iter() if markup.name(found) == "UUID")


def _rank(image: Element) -> tuple[bool, int]:
    """Return a sort key that is largest for the image that is the slide."""
    pixels = markup.child(image, "Pixels")
    try:
        area = 0 if pixels is None else int(pixels.get("SizeX", 0)) * int(pixels.get("SizeY", 0))
    except ValueError:
        area = 0
    return not ASSOCIATED.search(image.get("Name", "")), area
