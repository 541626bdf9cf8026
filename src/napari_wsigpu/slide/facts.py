"""What the inspector says of a slide, as plain text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from napari_wsigpu.codecs.table import storage_name
from napari_wsigpu.formats.wsigpu import region_of
from napari_wsigpu.model.privacy import Screen
from napari_wsigpu.model.units import byte_size
from napari_wsigpu.storage.remote.url import file_name

if TYPE_CHECKING:
    from napari_wsigpu.model.layout import LevelLayout, Planes
    from napari_wsigpu.slide.slide import Slide

TIMES = "\N{MULTIPLICATION SIGN}"
TOGETHER = "\N{NO-BREAK SPACE}"
MOST_CHANNELS = 6
NOT_GIVEN = "not given"
# Vendors whose names are not just the code's with a capital letter.
NAMES = {"dicom": "DICOM", "philips-isyntax": "Philips", "wsigpu": "napari-wsigpu"}
MUCH = 5000  # fields


class Said(NamedTuple):
    """What a file says, as nested metadata, and what is wrong with it, in sentences."""

    metadata: dict[str, Any]
    problems: list[str]


class LevelFacts(NamedTuple):
    """One row of the table of levels."""

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
    """Return (name, value) of what people look for first.

    What the names of the scanner and of channels repeat of private metadata is masked; where there
    is so much of it that this takes long, the names are left out.
    """
    width, height = slide.dimensions
    layout = slide.layout
    found = [("Vendor", NAMES.get(slide.vendor, slide.vendor.capitalize()))]
    if slide.vendor == "generic-tiff":
        found = [("Format", "OME-TIFF" if "ome" in layout.metadata else "TIFF")]
    screen = None if says_much(slide) else Screen(slide.metadata)
    if layout.scanner and screen is not None:
        found.append(("Scanner", screen.metadata["scanner"]))
    found.append(
        ("Objective", NOT_GIVEN if slide.objective is None else f"{slide.objective:g}{TIMES}")
    )
    if slide.mpp is None:
        found.append(("MPP", NOT_GIVEN))
    else:
        x, y = slide.mpp
        size = f"{x:.4g}" if x == y else f"{x:.4g} {TIMES} {y:.4g}"
        found.append(("MPP", _unbroken(f"{size} µm/px")))
    found.append(("Dimensions", _unbroken(f"{width:,} {TIMES} {height:,} px")))
    if slide.mpp is not None:
        found.append(("Extent", extent(width * slide.mpp[0], height * slide.mpp[1])))
    region = region_of(slide.metadata)
    if region is not None:
        x, y, across, down = region
        place = _unbroken(f"at {x:,}, {y:,} of its source")
        found.append(("Region", f"{_unbroken(f'{across:,} {TIMES} {down:,} px')} {place}"))
    found.append(("Channels", _channels(slide, screen)))
    if slide.planes.names:
        found.append(("Planes", _planes(slide.planes)))
    if layout.further_planes:
        found.append(("Further planes", f"{layout.further_planes:,}, not shown"))
    return found


def _planes(planes: Planes) -> str:
    """Say how many planes there are along each axis, and how far apart."""
    steps = {"z": (planes.z_spacing, "µm"), "t": (planes.time_step, "s")}
    found = []
    for name, size in reversed(planes.sizes.items()):
        step, unit = steps[name]
        apart = "" if step is None else f", {_unbroken(f'{step:.4g} {unit}')} apart"
        found.append(f"{size:,} along {name}{apart}")
    return "; ".join(found)


def said(slide: Slide, *, private: bool) -> Said:
    """Return what the slide's file says, and what is wrong with it.

    Unless `private`, private metadata is masked, also where the sentences repeat it. That takes
    long where there is much: see `says_much`.
    """
    found = list(slide.layout.problems)
    if private:
        return Said(slide.metadata, found)
    screen = Screen(slide.metadata, slide.path)
    return Said(screen.metadata, screen.sentences(found))


def says_much(slide: Slide) -> bool:
    """Whether the file says so much that it has to be prepared off the main thread."""
    count, waiting = 0, [slide.layout.metadata]
    while waiting and count <= MUCH:
        value: Any = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        count += 1
    return count > MUCH


def damage(slide: Slide) -> list[str]:
    """Return a sentence if tiles of levels turned out to be damaged so far."""
    failed = sum(name.startswith("level ") for name in slide.stats()["failed_tiles"])
    plural = "s are" if failed > 1 else " is"
    return [f"{failed:,} damaged tile{plural} shown as background."] if failed else []


def level_facts(slide: Slide) -> list[LevelFacts]:
    """Return a row for each level, finest first; only the slide's own have a number."""
    base = slide.layout.levels[0]
    rows = []
    for number, level, *_ in slide.pyramid:
        grid = level.grid
        stored = _is_stored(level)
        compression = storage_name(level)
        if not stored:
            compression = "computed" if level.computed else f"{compression}, scaled"
        rows.append(
            LevelFacts(
                str(number) if number < slide.level_count else "",
                _pair(level.width, level.height),
                f"{level.downsample(base):.4g}",
                "" if level.computed else _pair(grid.tile_width, grid.tile_height),
                byte_size(_stored_bytes(level)) if stored and _is_in_file(level) else "",
                compression,
            )
        )
    return rows


def level_names(slide: Slide) -> list[tuple[int, str]]:
    """Return number and name of each level: which it is, its pixel size or downsample, its size."""
    base = slide.layout.levels[0]
    found = []
    for number, level, *_ in slide.pyramid:
        downsample = level.downsample(base)
        parts = ["computed" if level.computed else f"level {number}"]
        if slide.mpp is None:
            parts.append(f"downsample {downsample:.4g}")
        else:
            parts.append(pixel_size(slide.mpp, downsample))
        parts.append(f"{level.width:,} {TIMES} {level.height:,} px")
        found.append((number, "  ·  ".join(parts)))
    return found


def _is_in_file(level: LevelLayout) -> bool:
    """Whether the tiles lie in a file as the level says."""
    return level.array is None and level.library is None


def levels_in_short(slide: Slide) -> str:
    """Return how many levels there are and how much the stored ones take."""
    stored = [level for level in slide.layout.levels if _is_stored(level)]
    computed = len(slide.pyramid) - len(stored)
    plural = "" if len(stored) == 1 else "s"
    more = f", {computed} computed" if computed else ""
    total = byte_size(sum(map(_stored_bytes, stored)))
    return f"{len(stored)} stored level{plural}{more}, {total} of tiles"


def _is_stored(level: LevelLayout) -> bool:
    return not level.computed and level.encoding.jpeg_scale == 1


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
    """Return a size given in micrometres."""
    unit, size = ("mm", 1e3) if max(width, height) >= 1e3 else ("µm", 1.0)
    return _unbroken(f"{width / size:.4g} {TIMES} {height / size:.4g} {unit}")


def pixel_size(mpp: tuple[float, float], downsample: float) -> str:
    """Return the size of a level's pixels."""
    x, y = (f"{size * downsample:.4g}" for size in mpp)
    return f"{x} µm/px" if x == y else f"{x} {TIMES} {y} µm/px"


def _pair(width: int, height: int) -> str:
    """Return a size that may be broken after the sign."""
    return f"{width:,}{TOGETHER}{TIMES} {height:,}"


def _unbroken(text: str) -> str:
    return text.replace(" ", TOGETHER)
