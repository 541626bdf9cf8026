"""The formats that are read, in the order in which they are asked whose a slide is.

A format takes a module with what `TiffModule` or `PathModule` says, and a line here. napari's
manifest, which can import nothing, repeats `patterns`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from napari_wsigpu.formats import library, wsigpu
from napari_wsigpu.formats.czi import czi
from napari_wsigpu.formats.dicom import dicom
from napari_wsigpu.formats.mirax import mirax
from napari_wsigpu.formats.tiff import (
    aperio,
    argos,
    hamamatsu,
    huron,
    leica,
    ome,
    perkinelmer,
    philips,
    tiff,
    trestle,
    ventana,
)
from napari_wsigpu.formats.vsi import vsi
from napari_wsigpu.formats.zarr import ome_zarr

if TYPE_CHECKING:
    from pathlib import Path

    from tifffile import TiffFile

    from napari_wsigpu.model.layout import SlideFile, SlideLayout


class PathModule(Protocol):
    """A module that describes slides that are no TIFF, by a path.

    If its layouts have several `planes`, its `parse` takes the one to describe as `at`, a mapping
    of "z" and "t" to numbers; so does a `TiffModule`'s.
    """

    def probe(self, path: Path, head: bytes) -> bool:
        """Whether a path is one of them; a file begins with `head`, a folder has none."""

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
        """Whether the file is one of them, by its content."""

    def parse(self, file: TiffFile, source: SlideFile) -> SlideLayout:
        """Describe the slide.

        Parameters
        ----------
        file : TiffFile
            The open file.
        source : SlideFile
            Which file that is.

        Raises
        ------
        CorruptSlideError, NotASlideError, UnsupportedSlideError
            If the structure is damaged, or can't be shown as a slide.
        """


Module = TypeVar("Module")


class Format(NamedTuple, Generic[Module]):
    """A format, and how the names of its files end.

    Attributes
    ----------
    module : module
        What describes its slides.
    endings : tuple of str
        Those that only slides have.
    shared : tuple of str
        Those that other files have too: a TIFF may as well be a flat picture.
    names : tuple of str
        Names of files in its folder that stand for it.
    """

    module: Module
    endings: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


PATH_FORMATS: tuple[Format[PathModule], ...] = (
    Format(ome_zarr, names=("zarr.json", ".zattrs", ".zgroup")),
    Format(mirax, (".mrxs",), names=("Slidedat.ini",)),
    Format(czi, (".czi",)),
    Format(dicom, shared=(".dcm",)),
    Format(vsi, (".vsi",)),
    Format(library, (".vms", ".vmu", ".svslide", ".isyntax")),
)
TIFF_FORMATS: tuple[Format[TiffModule], ...] = (
    Format(aperio, (".svs",)),
    Format(philips),
    Format(leica, (".scn",)),
    Format(trestle),
    Format(ventana, (".bif",)),
    Format(argos, shared=(".avs",)),
    Format(hamamatsu, (".ndpi",)),
    Format(huron),
    Format(perkinelmer, (".qptiff",)),
    Format(wsigpu),
    Format(ome, (".companion.ome",), (".ome.tif", ".ome.tiff", ".ome.btf")),
    Format(tiff, shared=(".tif", ".tiff", ".btf")),
)
FORMATS: tuple[Format[PathModule] | Format[TiffModule], ...] = (*PATH_FORMATS, *TIFF_FORMATS)
# A set of Hamamatsu's is a list of slides, and none itself.
SLIDE_ENDINGS = frozenset({".ndpis"}).union(*(item.endings for item in FORMATS))


def patterns() -> set[str]:
    """Return what names of slides' files are like; endings in lower and in upper case."""
    found = {f"*{name}" for item in FORMATS for name in item.names}
    for item in FORMATS:
        for ending in (*item.endings, *item.shared):
            found |= {f"*{ending}", f"*{ending.upper()}"}
    return found
