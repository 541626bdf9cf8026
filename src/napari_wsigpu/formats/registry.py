"""The supported formats, in the order in which they are probed.

A new format needs a module with the functions of `TiffModule` or `PathModule`, and a line here.
napari's manifest, which can't import anything, repeats `patterns`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from pathlib import Path

    from tifffile import TiffFile

    from napari_wsigpu.model.layout import SlideFile, SlideLayout


class PathModule(Protocol):
    """A module that describes slides that are not TIFF, from a path.

    If its layouts have several `planes`, `parse` also takes the plane to describe as `at`, a
    mapping of "z" and "t" to indices. The same is true of a `TiffModule`.
    """

    def probe(self, path: Path, head: bytes) -> bool:
        """Whether a path is such a slide; `head` is the start of a file, empty for a folder."""

    def parse(self, path: Path) -> SlideLayout:
        """Describe the slide.

        Raises
        ------
        SlideError
            If it can't be read or shown.
        """


class TiffModule(Protocol):
    """A module that describes one vendor's TIFF files."""

    def probe(self, file: TiffFile) -> bool:
        """Whether the vendor's software wrote the file, judging by its content."""

    def parse(self, file: TiffFile, source: SlideFile) -> SlideLayout:
        """Describe the slide.

        Parameters
        ----------
        file : TiffFile
            The open file.
        source : SlideFile
            Its path, size and modification time.

        Raises
        ------
        CorruptSlideError, NotASlideError, UnsupportedSlideError
            If the structure is damaged, or can't be shown as a slide.
        """


Module = TypeVar("Module")


class Format(NamedTuple, Generic[Module]):
    """A format, and its file names.

    Attributes
    ----------
    name : str
        Name of the module that describes its slides, without ``napari_wsigpu.formats.``.
    endings : tuple of str
        File name extensions that only slides have.
    shared : tuple of str
        File name extensions that other files have too: a TIFF may also be an ordinary image.
    names : tuple of str
        Names of files that represent the folder of a slide.
    like_tiff : bool
        Whether its files may start like a TIFF file.
    """

    name: str
    endings: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    like_tiff: bool = False

    @property
    def module(self) -> Module:
        """The module; imported when a file may be in this format, since all of them take 0.3 s."""
        return cast("Module", import_module(f"napari_wsigpu.formats.{self.name}"))


PATH_FORMATS: tuple[Format[PathModule], ...] = (
    Format("zarr.ome_zarr", (".ozx", ".ome.zarr.zip"), names=("zarr.json", ".zattrs", ".zgroup")),
    Format("mirax.mirax", (".mrxs",), names=("?lidedat.ini",)),
    Format("czi.czi", (".czi",)),
    Format("dicom.dicom", shared=(".dcm", ".dicom"), like_tiff=True),
    Format("vsi.vsi", (".vsi",), like_tiff=True),
    Format("library", (".vms", ".vmu", ".svslide", ".isyntax")),
    # napari itself reads JPEG and PNG.
    Format("image_file", shared=(".jp2",)),
)
TIFF_FORMATS: tuple[Format[TiffModule], ...] = (
    Format("tiff.aperio", (".svs", ".afi")),
    Format("tiff.philips"),
    Format("tiff.leica", (".scn",)),
    Format("tiff.trestle"),
    Format("tiff.ventana", (".bif",)),
    Format("tiff.argos", shared=(".avs",)),
    Format("tiff.hamamatsu", (".ndpi", ".ndpis")),
    Format("tiff.huron"),
    Format("tiff.perkinelmer", (".qptiff",)),
    Format("wsigpu"),
    Format("tiff.ome", (".companion.ome",), (".ome.tif", ".ome.tiff", ".ome.btf")),
    Format("tiff.tiff", shared=(".tif", ".tiff", ".btf")),
)
FORMATS: tuple[Format[PathModule] | Format[TiffModule], ...] = (*PATH_FORMATS, *TIFF_FORMATS)
SLIDE_ENDINGS = tuple(ending for item in FORMATS for ending in item.endings)


# DICOM files named by their UID, and files of DICOM media such as DICOMDIR: eight characters
# without lowercase letters (PS3.10, section 8.2). npe2 converts patterns, but not names, to
# lowercase, so a pattern must not contain uppercase letters ("?lidedat.ini").
DICOM_PATTERNS = {"[12].[0-9]*.[0-9]*.[0-9]*[0-9]", "[!a-z.]" * 8}


def patterns() -> set[str]:
    """Return glob patterns of slide file names, with suffixes in lower and in upper case."""
    found = DICOM_PATTERNS.union(f"*{name}" for item in FORMATS for name in item.names)
    for item in FORMATS:
        for ending in (*item.endings, *item.shared):
            found |= {f"*{ending}", f"*{ending.upper()}"}
    return found
