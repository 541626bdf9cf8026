"""Facts about a slide as plain text, for the inspector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from napari_wsigpu.codecs.compressions import storage_name
from napari_wsigpu.formats.wsigpu import region_of
from napari_wsigpu.model.privacy import Screen
from napari_wsigpu.model.units import byte_size
from napari_wsigpu.slide.layout_text import NOT_GIVEN as NOT_GIVEN
from napari_wsigpu.slide.layout_text import TIMES as TIMES
from napari_wsigpu.slide.layout_text import dimensions, format_size, is_stored, mpp, unbroken
from napari_wsigpu.storage.remote.url import file_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.model.layout import LevelLayout, Planes
    from napari_wsigpu.slide.slide import Slide

MOST_CHANNELS = 6
# Vendors whose display name is not simply the capitalized identifier.
NAMES = {"dicom": "DICOM", "philips-isyntax": "Philips", "wsigpu": "napari-wsigpu"}
# Number of metadata fields above which masking them takes noticeable time.
MANY_FIELDS = 5000


class FileReport(NamedTuple):
    """The nested metadata of a file, its problems as sentences, and the names of its channels.

    `private` is true if private data is included.
    """

    metadata: dict[str, Any]
    problems: list[str]
    channels: Sequence[str] = ()
    private: bool = False


class LevelFacts(NamedTuple):
    """A row of the table of levels."""

    level: str
    size: str
    downsample: str
    tile: str
    bytes: str
    compression: str


def title(slide: Slide) -> str:
    """Return the slide's file name."""
    return file_name(slide.path)


def facts(slide: Slide) -> list[tuple[str, str]]:
    """Return (name, value) pairs of the most important properties.

    Names of the scanner and of channels are masked where they repeat private metadata. They are
    left out if there is so much metadata that masking would take a long time.
    """
    width, height = slide.dimensions
    layout = slide.layout
    found = [("Vendor", NAMES.get(slide.vendor, slide.vendor.capitalize()))]
    if slide.vendor == "generic-tiff":
        found = [("Format", "OME-TIFF" if "ome" in layout.metadata else "TIFF")]
    screen = None if has_many_fields(slide) else Screen(slide.metadata)
    if layout.scanner and screen is not None:
        found.append(("Scanner", screen.metadata["scanner"]))
    objective = NOT_GIVEN if slide.objective is None else f"{slide.objective:g}{TIMES}"
    found.append(("Objective", objective))
    found += [("MPP", mpp(layout)), ("Dimensions", dimensions(layout))]
    if slide.mpp is not None:
        found.append(("Extent", extent(width * slide.mpp[0], height * slide.mpp[1])))
    region = region_of(slide.metadata)
    if region is not None:
        x, y, across, down = region
        size, corner = f"{across:,} {TIMES} {down:,} px", f"at x {x:,}, y {y:,}"
        found.append(("Region", f"{unbroken(size)} {unbroken(corner)} in the source slide"))
    found.append(("Channels", _channels(slide, screen)))
    if slide.planes.names:
        found.append(("Planes", _planes(slide.planes)))
    if layout.unselectable_planes:
        found.append(("Further planes", f"{layout.unselectable_planes:,}, not shown"))
    return found


def _planes(planes: Planes) -> str:
    """Return the number of planes along each axis and their spacing."""
    steps = {"z": (planes.z_spacing, "µm"), "t": (planes.time_step, "s")}
    found = []
    for name, size in reversed(planes.sizes.items()):
        step, unit = steps[name]
        apart = "" if step is None else f", {unbroken(f'{step:.4g} {unit}')} apart"
        found.append(f"{size:,} along {name}{apart}")
    return "; ".join(found)


def masked_problems(slide: Slide) -> list[str]:
    """Return a file's problems without private data."""
    problems = slide.layout.problems
    return Screen(slide.metadata, slide.path).sentences(problems) if problems else []


def file_report(slide: Slide, *, private: bool) -> FileReport:
    """Return a file's metadata, channels and problems.

    Private data is masked unless `private` is true; masking is slow if `has_many_fields`.
    """
    channels, problems = [each.name for each in slide.channels], list(slide.layout.problems)
    if private:
        return FileReport(slide.metadata, problems, channels, private)
    screen = Screen(slide.metadata, slide.path)
    channels = [screen.text(name) for name in channels]
    return FileReport(screen.metadata, screen.sentences(problems), channels, private)


def has_many_fields(slide: Slide) -> bool:
    """Whether masking the metadata takes too long for the main thread."""
    count, waiting = 0, [slide.layout.metadata]
    while waiting and count <= MANY_FIELDS:
        value: Any = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        count += 1
    return count > MANY_FIELDS


def damage(slide: Slide) -> list[str]:
    """Return a sentence with the number of damaged tiles, as a list; empty if there are none."""
    failed = sum(name.startswith("level ") for name in slide.stats()["failed_tiles"])
    plural = "" if failed == 1 else "s"
    return [f"{failed:,} damaged tile{plural} can't be shown."] if failed else []


def level_facts(slide: Slide) -> list[LevelFacts]:
    """Return a row per level, finest first; levels that are computed for viewers have no number."""
    base = slide.layout.levels[0]
    rows = []
    for number, level, *_ in slide.pyramid:
        grid = level.grid
        stored = is_stored(level)
        compression = storage_name(level)
        if not stored:
            compression = "computed" if level.computed else f"{compression}, scaled"
        rows.append(
            LevelFacts(
                str(number) if number < slide.level_count else "",
                format_size(level.width, level.height),
                f"{level.downsample(base):.4g}",
                "" if level.computed else format_size(grid.tile_width, grid.tile_height),
                byte_size(_stored_bytes(level))
                if stored and _is_in_file(level) and slide.layout.has_tile_sizes
                else "",
                compression,
            )
        )
    return rows


def level_names(slide: Slide) -> list[tuple[int, str]]:
    """Return (number, name) of each level.

    A name contains the pixel size, or the downsample if that is unknown, and the size in pixels.
    """
    base = slide.layout.levels[0]
    found = []
    for number, level, *_ in slide.pyramid:
        downsample = level.downsample(base)
        parts = ["computed" if level.computed else str(number)]
        if slide.mpp is None:
            parts.append(f"downsample {downsample:.4g}")
        else:
            parts.append(pixel_size(slide.mpp, downsample))
        parts.append(f"{level.width:,} {TIMES} {level.height:,}")
        found.append((number, " · ".join(parts)))
    return found


def _is_in_file(level: LevelLayout) -> bool:
    """Whether the level's byte ranges refer to a file."""
    return level.array is None and level.library is None


def levels_in_short(slide: Slide) -> str:
    """Return the number of levels, and the size of the stored ones if it is known."""
    stored = [level for level in slide.layout.levels if is_stored(level)]
    computed = len(slide.pyramid) - len(stored)
    plural = "" if len(stored) == 1 else "s"
    more = f", {computed} computed" if computed else ""
    total = f", {byte_size(sum(map(_stored_bytes, stored)))} of tiles"
    return f"{len(stored)} stored level{plural}{more}{total * slide.layout.has_tile_sizes}"


def _stored_bytes(level: LevelLayout) -> int:
    return sum(int(image.grid.byte_counts.sum()) for image in level.stored)


def _channels(slide: Slide, screen: Screen | None) -> str:
    dtype = slide.levels[0].dtype
    if slide.layout.rgb:
        return f"RGB, {dtype}"
    if screen is None:
        return f"{len(slide.channels)}, {dtype}"
    names = [screen.text(channel.name) for channel in slide.channels]
    more = [f"{len(names) - MOST_CHANNELS} more"] if len(names) > MOST_CHANNELS else []
    return f"{len(names)}, {dtype}: {', '.join(names[:MOST_CHANNELS] + more)}"


def extent(width: float, height: float) -> str:
    """Format a size in micrometers."""
    unit, size = ("mm", 1e3) if max(width, height) >= 1e3 else ("µm", 1.0)
    return unbroken(f"{width / size:.4g} {TIMES} {height / size:.4g} {unit}")


def pixel_size(mpp: tuple[float, float], downsample: float) -> str:
    """Format the pixel size of a level."""
    x, y = (f"{size * downsample:.4g}" for size in mpp)
    return f"{x} µm/px" if x == y else f"{x} {TIMES} {y} µm/px"
