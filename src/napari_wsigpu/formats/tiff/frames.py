"""The planes of a series, where they are no pages of their own in the file."""

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
    """Return some of the pages of a series that is said to have `count`, by their numbers.

    Of some stacks only the first page has a directory, and the others lie behind it (ImageJ's of
    more than 4 GiB); in others, planes are stored as the samples of a page.

    Raises
    ------
    UnsupportedSlideError
        If the file holds another number of them.
    """
    if len(series.pages) == count:
        return [series.pages[number] for number in numbers]
    first = series.keyframe
    samples = first.samplesperpixel
    separate = first.planarconfig == PLANARCONFIG.SEPARATE and "S" not in series.axes
    if separate and len(series.pages) * samples == count:
        places = [divmod(number, samples) for number in numbers]
        wholes = [(series.pages[index], sample) for index, sample in places]
        return [
            None if whole is None else _sample(whole.aspage(), sample, samples)
            for whole, sample in wholes
        ]
    if len(series.pages) == 1 and first.is_contiguous and series.dataoffset is not None:
        held = (first.parent.filehandle.size - series.dataoffset) // first.nbytes
        if held >= count:
            return [_behind(first, number) for number in numbers]
    raise UnsupportedSlideError(
        f"'{first.parent.filename}' holds {len(series.pages)} pages where its axes speak of "
        f"{count}; save it as OME-TIFF."
    )


def _behind(first: TiffPage, number: int) -> TiffPage:
    """Return a page that lies behind the first one without a directory."""
    page = copy.copy(first)
    page.dataoffsets = tuple(offset + number * first.nbytes for offset in first.dataoffsets)
    return page


def _sample(whole: TiffPage, number: int, samples: int) -> TiffPage:
    """Return one sample of a page as a page."""
    page = copy.copy(whole)
    length = len(whole.dataoffsets) // samples
    page.dataoffsets = whole.dataoffsets[number * length : (number + 1) * length]
    page.databytecounts = whole.databytecounts[number * length : (number + 1) * length]
    page.samplesperpixel, page.planarconfig = 1, PLANARCONFIG.CONTIG
    page.photometric, page.extrasamples = PHOTOMETRIC.MINISBLACK, ()
    return page
