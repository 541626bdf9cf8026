"""Lists of slides, one per fluorescence channel: Hamamatsu NDPIS and Aperio AFI."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.formats import markup
from napari_wsigpu.formats.fields import LONGEST_TEXT, pairs, positive_number
from napari_wsigpu.formats.tiff.siblings import BEYOND
from napari_wsigpu.model.errors import CorruptSlideError, UnsupportedSlideError
from napari_wsigpu.model.geometry import Rects
from napari_wsigpu.model.layout import Channel, LevelLayout, Scattered, SlideFile, computed_level

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from napari_wsigpu.model.layout import SlideLayout, TileGrid

NDPIS = b"[NanoZoomer Digital Pathology Image Set]"
AFI = re.compile(rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]{0,200}\?>\s*)?<ImageList[\s>]")
IMAGE = re.compile(r"Image(\d{1,4})")
LONGEST_LIST = 1 << 16
# Longest emission wavelengths in nanometers that the blue and the green sample record; Hamamatsu's
# software stores a channel in the sample of its color. Bio-Formats uses the same limits.
BLUE, GREEN = 490, 580
COLORS = {0: ("red", "#ff0000"), 1: ("green", "#00ff00"), 2: ("blue", "#0000ff")}


class _Member(NamedTuple):
    """A channel of the slide.

    Attributes
    ----------
    layout : SlideLayout
        The listed slide that holds it.
    start : int
        Offset of that slide in the bytes of all files.
    sample : int or None
        The sample of its pixels; None if they have only one.
    """

    layout: SlideLayout
    start: int
    sample: int | None


def probe(head: bytes) -> bool:
    """Whether a file that starts with these bytes is a list of slides."""
    return head.startswith(NDPIS) or AFI.match(head) is not None


def parse(
    source: SlideFile,
    head: bytes,
    describe: Callable[[Path, Mapping[str, int]], SlideLayout],
    at: Mapping[str, int],
) -> SlideLayout:
    """Describe a list of slides as one slide, whose channels are the images of the listed slides.

    Everything but the channels is taken from the first listed slide. A list of one slide is
    described as that slide. An RGB image shows only the sample that matches its emission
    wavelength or the transmittances of its filter; without them, it becomes three channels.

    Parameters
    ----------
    source : SlideFile
        The list.
    head : bytes
        Its content.
    describe : callable
        ``describe(path, at)`` describes a listed slide, which is a TIFF file.
    at : Mapping of str to int
        The focal plane "z"; by default, the plane that the first slide shows.

    Raises
    ------
    CorruptSlideError
        If the list is damaged, or one of its slides is not of the scanner's vendor.
    UnsupportedSlideError
        If it names files in other folders, or slides that differ in size or sample type.
    SlideError
        If one of the slides can't be read.
    """
    if len(head) >= LONGEST_LIST:
        raise UnsupportedSlideError(f"'{source.path}' is longer than any list of slides.")
    is_ndpis = head.startswith(NDPIS)
    paths = [_sibling(source.path, name) for name in (_ndpis if is_ndpis else _afi)(source, head)]
    if not paths or len({*paths}) < len(paths):
        raise CorruptSlideError(
            f"'{source.path}' lists no slides, or one of them twice; get a fresh copy of it."
        )
    layouts: list[SlideLayout] = []
    for path in paths:
        layout = describe(path, at)
        if layout.vendor != ("hamamatsu" if is_ndpis else "aperio"):
            raise CorruptSlideError(
                f"'{path}' is listed in '{source.path}' but is not a slide of the same vendor; "
                "get a fresh copy of both."
            )
        layouts.append(layout)
        if layout.planes.size_z > 1:
            at = {"z": layout.planes.z}
    return _combined(source, layouts, _names(layouts, paths))


def _ndpis(source: SlideFile, head: bytes) -> list[str]:
    fields = pairs(head.decode("utf-8-sig", "replace").splitlines())
    images = ((IMAGE.fullmatch(key), value) for key, value in fields.items())
    numbered = {int(found[1]): value for found, value in images if found}
    names = [numbered[number] for number in sorted(numbered)]
    if fields.get("NoImages") != str(len(names)):
        raise CorruptSlideError(
            f"'{source.path}' does not list as many slides as it claims; get a fresh copy of it."
        )
    return names


def _afi(source: SlideFile, head: bytes) -> list[str]:
    try:
        root = markup.root(head.decode("utf-8-sig", "replace"))
    except ValueError as error:
        raise CorruptSlideError(
            f"The list of slides '{source.path}' can't be read ({error}); get a fresh copy of it."
        ) from error
    return [markup.text(image, "Path") or "" for image in markup.children(root, "Image")]


def _sibling(path: str, name: str) -> Path:
    """Return the path of a listed slide, which must be in the list's folder."""
    # `PureWindowsPath` knows all separators, and drives.
    if not name or name in (".", "..") or "\0" in name or PureWindowsPath(name).name != name:
        raise UnsupportedSlideError(
            f"'{path}' has an entry that is empty or names another folder; copy all slides to its "
            "folder, and list them by file name only."
        )
    return Path(path).with_name(name)


def _names(layouts: Sequence[SlideLayout], paths: Sequence[Path]) -> list[str]:
    """Return the names in the slides, else the file names after a common prefix and "_"."""
    stated = [str(_field(layout, "Fluorescence") or "")[:LONGEST_TEXT] for layout in layouts]
    starts, _, ends = zip(*(path.stem.rpartition("_") for path in paths), strict=True)
    if all(stated):
        return stated
    # The prefix may name a patient, and so may file names with different prefixes.
    return [*ends] if starts[0] and len({*starts}) == 1 else []


def _field(layout: SlideLayout, name: str) -> object:
    return layout.metadata.get(layout.vendor, {}).get(name)


def _combined(
    source: SlideFile, layouts: Sequence[SlideLayout], names: Sequence[str]
) -> SlideLayout:
    first = layouts[0]
    files = (*(file for layout in layouts for file in layout.files), source)
    problems = [
        f"Slide {number}: {text}" if len(layouts) > 1 else text
        for number, layout in enumerate(layouts, 1)
        for text in layout.problems
    ]
    whole = replace(
        first,
        path=source.path,
        files=files,
    )
    if len(layouts) == 1:
        return whole
    members: list[_Member] = []
    channels: list[Channel] = []
    start = 0
    for number, layout in enumerate(layouts, 1):
        if not _agree(layout, first):
            raise UnsupportedSlideError(
                f"The slides that '{source.path}' lists differ in their sizes, levels, focal "
                f"planes or sample types (slide {number}); open them one by one."
            )
        name = names[number - 1] if names else f"channel {number - 1}"
        samples = _samples(layout)
        members += [_Member(layout, start, sample) for sample in samples]
        start += layout.file_size
        if len(samples) == 1:
            channels.append(Channel(name))
            continue
        problems.append(
            f"Slide {number} is stored in color without a wavelength, so its red, green and blue "
            "are three channels."
        )
        # On a bright background, the sum of several slides would be white.
        visible = number == 1 or layout.background == 0
        channels += [Channel(f"{name} {c}", shade, visible=visible) for c, shade in COLORS.values()]
    levels: list[LevelLayout] = []
    for index, level in enumerate(first.levels):
        if any(_is_averaged(layout.levels[index]) for layout in layouts) and levels:
            levels.append(computed_level(levels[-1], level.width, level.height))
            continue
        parts = [
            _tiles(_image(layout.levels[index], sample, start, layout.file_size), channel)
            for channel, (layout, start, sample) in enumerate(members)
        ]
        size = level.width, level.height
        levels.append(LevelLayout.mosaic(*size, parts, level.reduction, len(members)))
    return replace(
        whole,
        levels=tuple(levels),
        rgb=False,
        channels=tuple(channels),
        icc=None,
        problems=tuple(problems),
    )


def _agree(layout: SlideLayout, first: SlideLayout) -> bool:
    """Whether a slide can be a channel of the same slide as the first one."""
    sizes = [
        [(level.width, level.height, level.dtype) for level in each.levels]
        for each in (layout, first)
    ]
    plain = all(
        level.encoding.samples == level.channels and level.encoding.table is None
        for level in layout.levels
        if not level.computed
    )
    samples = layout.levels[0].channels
    one = samples == 1 or (layout.rgb and samples in (3, 4))
    return plain and one and sizes[0] == sizes[1] and layout.planes.size_z == first.planes.size_z


def _samples(layout: SlideLayout) -> tuple[int | None, ...]:
    """Return the sample of a slide's pixels that its emission wavelength selects.

    Without a wavelength, it is the only one that light reached, or else all three.
    """
    if layout.levels[0].channels == 1:
        return (None,)
    wavelength = positive_number(_field(layout, "Wavelength"))
    if wavelength is None:
        lit = tuple(sample for sample, letter in enumerate("RGB") if _is_lit(layout, letter))
        return lit if len(lit) == 1 else tuple(COLORS)
    return (2 if wavelength <= BLUE else 1 if wavelength <= GREEN else 0,)


def _is_lit(layout: SlideLayout, letter: str) -> bool:
    """Whether light reached the sample of a color: others have a transmittance of "-"."""
    # Some scanners start the names with ";".
    stated = [_field(layout, f"{mark}Transmittance{letter}") for mark in ("", ";")]
    return any(text not in (None, "-", "0", "0%") for text in stated)


def _is_averaged(level: LevelLayout) -> bool:
    """Whether tiles of a level are averaged from the finer level; mosaics don't support that."""
    return level.missing == "finer" and not level.grid.byte_counts.all()


def _image(level: LevelLayout, sample: int | None, start: int, size: int) -> LevelLayout:
    """Return a level of a listed slide, with offsets into all files, as a single channel."""
    grid = level.grid
    # A tile beyond its file's end must not be read from the next file.
    offsets = np.where(grid.offsets < size, grid.offsets + start, BEYOND)
    encoding = replace(level.encoding, kept_sample=sample)
    return replace(level, channels=1, encoding=encoding, grid=replace(grid, offsets=offsets))


def _tiles(image: LevelLayout, channel: int) -> Scattered:
    """Place the tiles of an image side by side in a channel."""
    grid: TileGrid = image.grid
    rows, columns = (each.ravel() for each in np.indices((grid.rows, grid.columns), np.int64))
    tops, lefts = rows * grid.tile_height, columns * grid.tile_width
    bottoms = np.minimum(tops + grid.tile_height, image.height)
    rights = np.minimum(lefts + grid.tile_width, image.width)
    corners = np.zeros_like(rows)
    rects = Rects(tops, lefts, bottoms, rights)
    return Scattered(image, rows, columns, corners, corners, rects, channel)
