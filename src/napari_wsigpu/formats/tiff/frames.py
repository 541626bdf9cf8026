"""Pages for the planes of a series, including planes that have no directory."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from napari_wsigpu.model.errors import UnsupportedSlideError
from napari_wsigpu.model.tags import PHOTOMETRIC, PLANARCONFIG

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tifffile import TiffFrame, TiffPage, TiffPageSeries


def pages_of(
    series: TiffPageSeries, count: int, numbers: Sequence[int]
) -> list[TiffPage | TiffFrame | None]:
    """Return the pages with these numbers of a series that declares `count` pages.

    Two kinds of stacks have fewer directories than planes. ImageJ's stacks of more than 4 GiB have
    only one, and the other planes follow the first one's pixels. Other writers store planes as
    separate samples of a page. The pages returned for such planes are modified copies.

    Raises
    ------
    UnsupportedSlideError
        If the file holds a different number of pages than it declares.
    """
    if len(series.pages) == count:
        return [series.pages[number] for number in numbers]
    first = series.keyframe
    samples = first.samplesperpixel
    separate = first.planarconfig == PLANARCONFIG.SEPARATE and "S" not in series.axes
    if separate and len(series.pages) * samples == count:
        indices = [divmod(number, samples) for number in numbers]
        wholes = [(series.pages[index], sample) for index, sample in indices]
        return [
            None if whole is None else _sample(whole.aspage(), sample, samples)
            for whole, sample in wholes
        ]
    if len(series.pages) == 1 and first.is_contiguous and series.dataoffset is not None:
        held = (first.parent.filehandle.size - series.dataoffset) // first.nbytes
        if held >= count:
            return [_contiguous_page(first, number) for number in numbers]
    if first.imagedepth != 1:
        raise volume_error(first)
    pages = "1 page" if len(series.pages) == 1 else f"{len(series.pages)} pages"
    raise UnsupportedSlideError(
        f"'{first.parent.filename}' holds {pages}, but its axes declare {count}; save it as "
        "OME-TIFF."
    )


def volume_error(page: TiffPage) -> UnsupportedSlideError:
    """Return the error for a page that holds several planes, as SGI's tag ImageDepth states."""
    return UnsupportedSlideError(
        f"'{page.parent.filename}' holds a volume of {page.imagedepth} planes in one image "
        "(ImageDepth), which is not supported; save each plane as a separate image."
    )


def _contiguous_page(first: TiffPage, number: int) -> TiffPage:
    """Return a page for plane `number`, which follows the first plane without a directory."""
    page = copy.copy(first)
    page.dataoffsets = tuple(offset + number * first.nbytes for offset in first.dataoffsets)
    return page


def _sample(whole: TiffPage, number: int, samples: int) -> TiffPage:
    """Return a page of gray pixels for one sample of a page with separate planes."""
    page = copy.copy(whole)
    length = len(whole.dataoffsets) // samples
    page.dataoffsets = whole.dataoffsets[number * length : (number + 1) * length]
    page.databytecounts = whole.databytecounts[number * length : (number + 1) * length]
    page.samplesperpixel, page.planarconfig = 1, PLANARCONFIG.CONTIG
    page.photometric, page.extrasamples = PHOTOMETRIC.MINISBLACK, ()
    return page
