"""Recognize unsupported file types, by their extension or first bytes, for a helpful error."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from napari_wsigpu.model.errors import NotASlideError, SlideError, UnsupportedSlideError

if TYPE_CHECKING:
    from collections.abc import Sequence

BY_VENDOR = "export it as TIFF or DICOM with its vendor's software"
BY_BIO_FORMATS = "convert it to OME-TIFF, for example with Bio-Formats"
UNPACK = "unpack it and open its contents"


class Foreign(NamedTuple):
    """A file type that is not supported.

    Attributes
    ----------
    name : str
        Its name, with an article.
    advice : str
        What the user can do instead.
    signatures : sequence of (int, bytes)
        Bytes at an offset, any of which identifies the type.
    endings : tuple of str
        File name extensions that identify the type.
    is_slide : bool
        Whether the format holds slides or microscope images.
    """

    name: str
    advice: str
    signatures: Sequence[tuple[int, bytes]] = ()
    endings: tuple[str, ...] = ()
    is_slide: bool = True


# Extensions that several vendors use are left out. The extension takes precedence over the first
# bytes.
FOREIGN = (
    Foreign("a KFBio slide (KFB)", BY_VENDOR, endings=(".kfb", ".kfbf")),
    Foreign("a Sqray slide (SDPC)", BY_VENDOR, ((0, b"SQ\0\0"),), (".sdpc", ".dyqx")),
    Foreign("a UNIC slide (TMAP)", BY_VENDOR, ((0, b"TMAP"),), (".tmap",)),
    Foreign("a Motic slide (MDS)", BY_VENDOR, endings=(".mds", ".mdsx")),
    Foreign("an InteMedic slide (TRON)", BY_VENDOR, endings=(".tron",)),
    Foreign("a Zhuan Zhi slide (ZYP)", BY_VENDOR, endings=(".zyp",)),
    Foreign("tiles of an Olympus slide (ETS)", "open its .vsi file", ((0, b"SIS\0"),)),
    Foreign("Leica LAS X images (LIF)", BY_BIO_FORMATS, ((0, b"\x70\0\0\0"),), (".lif",)),
    Foreign("Nikon images (ND2)", BY_BIO_FORMATS, ((0, b"\xda\xce\xbe\x0a"),), (".nd2",)),
    Foreign("Imaris images (IMS)", BY_BIO_FORMATS, endings=(".ims",)),
    Foreign("Olympus images (OIR)", BY_BIO_FORMATS, ((0, b"OLYMPUSRAWFORMAT"),), (".oir",)),
    Foreign(
        "images in an OLE file (OIB, ZVI)",
        BY_BIO_FORMATS,
        ((0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"),),
    ),
    Foreign("images in HDF5", BY_BIO_FORMATS, ((0, b"\x89HDF\r\n\x1a\n"),), (".h5", ".hdf5")),
    Foreign("an MRC volume", BY_BIO_FORMATS, ((208, b"MAP "),)),
    Foreign("NRRD images", BY_BIO_FORMATS, ((0, b"NRRD0"),)),
    *(
        Foreign(name, "convert it to TIFF", signatures, is_slide=False)
        for name, *signatures in (
            ("a WebP image", (8, b"WEBP")),
            ("a JPEG XL image", (0, b"\0\0\0\x0cJXL "), (0, b"\xff\x0a")),
            ("a GIF image", (0, b"GIF8")),
            ("a Photoshop image", (0, b"8BPS")),
        )
    ),
    Foreign("a ZIP archive", UNPACK, ((0, b"PK\3\4"), (0, b"PK\5\6")), is_slide=False),
    Foreign("a gzip archive", UNPACK, ((0, b"\x1f\x8b"),), is_slide=False),
    Foreign("a 7z archive", UNPACK, ((0, b"7z\xbc\xaf\x27\x1c"),), is_slide=False),
    Foreign("a RAR archive", UNPACK, ((0, b"Rar!\x1a\7"),), is_slide=False),
    Foreign("a tar archive", UNPACK, ((257, b"ustar"),), is_slide=False),
    Foreign("a PDF document", "choose a slide file", ((0, b"%PDF-"),), is_slide=False),
    Foreign(
        "a web page",
        "download the file itself, after logging in if the site requires it",
        ((0, b"<!DOCTYPE html"), (0, b"<!doctype html"), (0, b"<html")),
        is_slide=False,
    ),
)


def has_ending(name: str) -> bool:
    """Whether a file name has the extension of an unsupported type."""
    return any(name.lower().endswith(each.endings) for each in FOREIGN)


def refusal(name: str, head: bytes) -> SlideError | None:
    """Return an error that names the type of an unsupported file; None if it is unknown.

    Parameters
    ----------
    name : str
        Its path.
    head : bytes
        Its first bytes.
    """
    lower = name.lower()
    by_head = (each for each in FOREIGN if any(_is_at(head, *item) for item in each.signatures))
    found = next((each for each in FOREIGN if lower.endswith(each.endings)), None)
    found = found or next(by_head, None)
    if found is None:
        return None
    kind = UnsupportedSlideError if found.is_slide else NotASlideError
    return kind(f"'{name}' is {found.name}, which is not supported; {found.advice}.")


def _is_at(head: bytes, offset: int, magic: bytes) -> bool:
    return head[offset : offset + len(magic)] == magic
