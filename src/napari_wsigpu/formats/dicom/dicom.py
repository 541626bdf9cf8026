"""DICOM whole-slide images: a series of files, most often one a level."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.formats.fields import even_step, positive_number
from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.model.errors import NotASlideError, SlideError, UnsupportedSlideError
from napari_wsigpu.model.layout import (
    AssociatedLayout,
    Channel,
    LevelLayout,
    Planes,
    SlideLayout,
    TileGrid,
)
from napari_wsigpu.model.limits import limits

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from napari_wsigpu.formats.dicom.dicom_instance import Instance
    from napari_wsigpu.model.layout import Encoding
    from napari_wsigpu.storage.remote.served import ServedFile

    File = Path | ServedFile

PREAMBLE, MAGIC = 128, b"DICM"
# The attribute MediaStorageSOPClassUID, whose encoding no transfer syntax changes.
WSI_CLASS = b"\x02\0\x02\0UI\x1e\x001.2.840.10008.5.1.4.1.1.77.1.6"
FILE_META = 1024
MOST_ENTRIES = 4096
MOST_STRANGERS = 64
CONTRADICTORY = 0.01
# Pixels by which writers round the sides of levels, and what is left of a pixel by computing.
MOST_ROUNDED, ROUNDED = 2, 0.01
ASSOCIATED = {"LABEL": "label", "OVERVIEW": "macro", "THUMBNAIL": "thumbnail"}


def probe(path: Path, head: bytes) -> bool:
    """Whether a path is a DICOM file, or a folder that holds a DICOM slide.

    A file that is TIFF as well is one of both by its name.

    Raises
    ------
    OSError
        If a folder can't be read.
    """
    if not head:
        return path.is_dir() and _first_in(path) is not None
    return head.startswith(MAGIC, PREAMBLE) and path.suffix.lower() not in {
        ".tif",
        ".tiff",
    }


def parse(path: Path, at: Mapping[str, int] = tiff.MIDDLE) -> SlideLayout:
    """Describe the slide that a file belongs to, or that a folder holds.

    Parameters
    ----------
    path : Path
        Absolute path; the slide's other files lie beside the file.
    at : Mapping of str to int, optional
        The focal plane, as "z"; by default the file's own, if it holds but one, else the middle
        one.

    Raises
    ------
    NotASlideError
        If it is another kind of DICOM file.
    UnsupportedSlideError
        If the slide can't be shown, or the packages for DICOM are not installed.
    SlideError
        If it can't be read or is damaged.
    """
    is_folder = path.is_dir()
    chosen = _first_in(path) if is_folder else path
    if chosen is None or not _is_wsi(chosen):
        raise other_kind(str(path))
    others = sorted(file for file in chosen.parent.iterdir() if file != chosen and _is_wsi(file))
    return parse_files(str(path), None if is_folder else chosen, [chosen, *others], at)


def other_kind(path: str) -> NotASlideError:
    """Return the error of a DICOM file that is no slide."""
    return NotASlideError(
        f"'{path}' is a DICOM file of another kind than a whole-slide image; "
        "open it with a program for radiology."
    )


def parse_files(
    path: str, chosen: File | None, files: Sequence[File], at: Mapping[str, int] = tiff.MIDDLE
) -> SlideLayout:
    """Describe the slide that a file belongs to, of which others may.

    Parameters
    ----------
    path : str
        Path of the slide.
    chosen : Path or ServedFile or None
        The file; of none the slide with the largest picture is described.
    files : sequence of Path or ServedFile
        The same and others.
    at : Mapping of str to int, optional
        As `parse` takes it.

    Raises
    ------
    SlideError
        As `parse` does.
    """
    try:
        from napari_wsigpu.formats.dicom import dicom_instance
    except ImportError as error:
        raise UnsupportedSlideError(
            f"'{path}' is a DICOM slide, which needs further packages ({error}); "
            'run pip install "napari-wsigpu[dicom]" and start again.'
        ) from error

    problems: list[str] = []
    found: dict[str, Instance] = {}
    series = None
    for file in files:
        try:
            instance = dicom_instance.read(file, series)
        except SlideError as error:
            if file == chosen:
                raise
            problems.append(str(error))
            continue
        if instance is None:
            continue
        found.setdefault(instance.uid, instance)
        if file == chosen:
            series = instance.series
    instances = _one_series(path, chosen, list(found.values()), problems)
    return _layout(path, chosen, instances, problems, at)


def is_wsi(begin: bytes) -> bool:
    """Whether a file that begins so is a part of a slide."""
    return begin[PREAMBLE:].startswith(MAGIC) and WSI_CLASS in begin[:FILE_META]


def _begin(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(FILE_META)


def _is_wsi(path: Path) -> bool:
    try:
        return path.is_file() and is_wsi(_begin(path))
    except OSError:
        return False


def _first_in(folder: Path) -> Path | None:
    """Return a file of a DICOM slide in a folder; gives up soon where there is none."""
    strangers = 0
    for entry in islice(folder.iterdir(), MOST_ENTRIES):
        if entry.suffix.lower() in (".dcm", ""):
            if _is_wsi(entry):
                return entry
            strangers += 1
            if strangers == MOST_STRANGERS:
                return None
    return None


def _one_series(
    path: str, chosen: File | None, instances: Sequence[Instance], problems: list[str]
) -> list[Instance]:
    """Return the files of the chosen file's series; of none, of the largest image's."""
    if chosen is None:
        levels = (each for each in instances if each.flavor == "VOLUME")
        # What was put together of several planes is shown where there is nothing else.
        main = max(
            levels, key=lambda each: (each.width * each.height, not _is_fused(each)), default=None
        )
    else:
        main = next(each for each in instances if each.path == chosen)
    series = [
        each
        for each in instances
        if main is not None and each.series == main.series and _may_share_pyramid(each, main)
    ]
    others = len({each.series for each in instances}) - 1
    if main is not None and main.flavor == "VOLUME":
        unlike = [each for each in series if not _is_as_sharp(each, main)]
        if unlike:
            problems.append(
                f"{len(unlike)} file(s) with{'out' if _is_fused(main) else ''} extended depth of "
                "field are not shown; open one of them."
            )
        series = [each for each in series if _is_as_sharp(each, main)]
    if not any(each.flavor == "VOLUME" for each in series):
        reason = problems[0] if problems else "None of its files is a level of a slide."
        raise UnsupportedSlideError(f"'{path}' holds no slide that can be shown. {reason}")
    if chosen is None and others:
        problems.append(
            f"The folder holds {others} more DICOM series, which are not shown; open a file of one."
        )
    return series


def _is_fused(instance: Instance) -> bool:
    """Whether a picture was put together of several focal planes."""
    return instance.metadata.get("ExtendedDepthOfField") == "YES"


def _is_as_sharp(instance: Instance, other: Instance) -> bool:
    """Whether two levels show single focal planes both, or several put together."""
    return instance.flavor != "VOLUME" or _is_fused(instance) == _is_fused(other)


def _may_share_pyramid(instance: Instance, other: Instance) -> bool:
    """Whether two files are levels of one pyramid, as far as both say which, or one is none."""
    uids = {str(each.metadata.get("PyramidUID") or "") for each in (instance, other)} - {""}
    return len(uids) < 2 or {instance.flavor, other.flavor} != {"VOLUME"}


def _layout(
    path: str,
    chosen: File | None,
    instances: Sequence[Instance],
    problems: list[str],
    at: Mapping[str, int],
) -> SlideLayout:
    ends = list(accumulate(each.file.size for each in instances))
    starts = {each.uid: end - each.file.size for each, end in zip(instances, ends, strict=True)}
    groups: dict[tuple[int, int], list[Instance]] = defaultdict(list)
    associated: dict[str, AssociatedLayout] = {}
    for each in instances:
        name = ASSOCIATED.get(each.flavor)
        if name is None:
            groups[each.height, each.width].append(each)
        elif name not in associated:
            planes = _focal_planes([each])
            shown = planes[len(planes) // 2]
            image = _level(path, [each], shown, starts, ends[-1], problems)
            associated[name] = AssociatedLayout(name, image, icc=_icc(each, starts))
    sizes = sorted(groups, key=math.prod, reverse=True)
    levels: list[LevelLayout] = []
    main = groups[sizes[0]]
    planes = _focal_planes(main)
    z = at.get("z", _own_plane(chosen, groups.values(), len(planes)))
    for size in sizes:
        same = _focal_planes(groups[size])
        if len(same) != len(planes):
            problems.append(
                f"The level of {size[1]} x {size[0]} pixels is left out, as it has {len(same)} "
                f"focal plane(s) instead of {len(planes)}."
            )
            continue
        level = _level(path, groups[size], same[z], starts, ends[-1], problems)
        if levels:
            level = _unpadded(level, groups[size][0], levels[0], main[0])
        if levels and not _is_same_picture(level, levels[0]):
            problems.append(
                f"The level of {level.width} x {level.height} pixels is left out, as it differs "
                "from the finest one in shape, channels or sample type."
            )
        else:
            levels.append(level)
    if any(level.reduction is not None for level in levels):
        levels[0] = replace(levels[0], reduction=1.0)
    tiff.check_tiles_present(levels, path, ends[-1])
    metadata = main[0].metadata
    labels = [each.metadata for each in instances if each.flavor == "LABEL"]
    barcodes = (_joined(each, "BarcodeValue") for each in (metadata, *labels))
    rgb = tiff.is_rgb(levels[0])
    return SlideLayout(
        path=path,
        file_size=ends[-1],
        modified_ns=max(each.file.modified_ns for each in instances),
        vendor="dicom",
        levels=tuple(levels),
        associated=tuple(associated.values()),
        rgb=rgb,
        channels=() if rgb else _channels(main),
        background=tiff.background(levels[0]),
        mpp=_mpp(main[0], problems),
        objective=positive_number(_first_optical_path(metadata).get("ObjectiveLensPower")),
        metadata={"dicom": metadata},
        hidden_planes=len(planes) * len(_optical_paths(main)) // len(planes[0]) - 1,
        planes=Planes(z, size_z=len(planes), z_spacing=_z_spacing(main, planes, problems)),
        scanner=_joined(metadata, "Manufacturer", "ManufacturerModelName"),
        scan_date=_joined(metadata, "AcquisitionDateTime")
        or _joined(metadata, "ContentDate", "ContentTime"),
        barcode=next(filter(None, barcodes), None),
        icc=_icc(main[0], starts),
        problems=(*problems, *(text for each in instances for text in each.problems)),
        files=tuple(each.file for each in instances),
    )


def _level(
    path: str,
    instances: Sequence[Instance],
    depths: Mapping[str, float],
    starts: Mapping[str, int],
    past: int,
    problems: list[str],
) -> LevelLayout:
    """Put the frames of instances of one size in their places; those of the file `path` first.

    `depths` says which focal plane of each optical path is shown, `starts` where each file begins
    in the slide's bytes, `past` where all end.
    """
    first = instances[0]
    same = [each for each in instances if _tiling(each) == _tiling(first)]
    if len(same) < len(instances):
        problems.append(
            f"{len(instances) - len(same)} file(s) of {first.width} x {first.height} pixels are "
            "left out, as their frames differ in size or encoding from those of others."
        )
    total = first.metadata.get("InConcatenationTotalNumber")
    if isinstance(total, int) and total > len(same):
        problems.append(
            f"{total - len(same)} of {total} files of the level of {first.width} x "
            f"{first.height} pixels are missing."
        )
    shown = list(depths)
    rows = math.ceil(first.height / first.tile_height)
    columns = math.ceil(first.width / first.tile_width)
    shape = (len(shown), rows, columns)
    if math.prod(shape) > limits.tiles:
        raise UnsupportedSlideError(
            f"'{first.path}' claims {len(shown)} channels of {rows * columns} frames, more than a "
            "slide can have; get a fresh copy of the file."
        )
    offsets = np.full(shape, starts[first.uid], np.int64)
    byte_counts = np.zeros(shape, np.int64)
    named = [each for each in same if str(each.path) == path]
    for each in (*named, *(each for each in same if each not in named)):
        frames = each.frames
        shown_frames = [
            (plane, (frames.paths == name) & (frames.z == depths[name]))
            for plane, name in enumerate(shown)
        ]
        places = [
            (plane, frames.rows[chosen], frames.columns[chosen]) for plane, chosen in shown_frames
        ]
        if any(byte_counts[place].any() for place in places):
            problems.append(
                f"'{each.path.name}' holds other frames for places of the level of {first.width} x "
                f"{first.height} pixels that are shown already, and is left out."
            )
            continue
        lost = (frames.offsets < 0) | (frames.offsets > each.file.size - frames.byte_counts)
        if lost.any():
            problems.append(
                f"'{each.path.name}' is cut off: {int(lost.sum())} of its frames lie beyond its "
                "end; get a fresh copy of it."
            )
        positions = np.where(lost, past, frames.offsets + starts[each.uid])
        for where, (_, chosen) in zip(places, shown_frames, strict=True):
            offsets[where] = positions[chosen]
            byte_counts[where] = frames.byte_counts[chosen]
    missing = int((byte_counts == 0).sum())
    if missing and first.metadata.get("DimensionOrganizationType") == "TILED_FULL":
        problems.append(
            f"{missing} of {byte_counts.size} frames of the level of {first.width} x "
            f"{first.height} pixels are missing."
        )
    return LevelLayout(
        first.width,
        first.height,
        first.encoding.samples * len(shown),
        replace(first.encoding, jpeg_tables=(None,) * len(shown)),
        TileGrid(first.tile_height, first.tile_width, offsets, byte_counts),
    )


def _is_same_picture(level: LevelLayout, base: LevelLayout) -> bool:
    """Whether a level shows what `base` shows, up to two pixels of its own."""
    difference = abs(level.width * base.height - level.height * base.width)
    same_shape = difference <= 2 * max(base.width, base.height)
    return same_shape and (level.channels, level.dtype) == (base.channels, base.dtype)


def _tiling(instance: Instance) -> tuple[int, int, Encoding]:
    return instance.tile_height, instance.tile_width, instance.encoding


def _optical_paths(instances: Sequence[Instance]) -> list[str]:
    names = [name for each in instances for name in np.unique(each.frames.paths).tolist()]
    return sorted(set(names))


def _focal_planes(instances: Sequence[Instance]) -> list[dict[str, float]]:
    """Return the focal planes of instances of one size, from the slide up.

    Each says how deep it is of each optical path that is shown: these count their own planes, if
    they have equally many.
    """
    paths = _optical_paths(instances)
    shown = paths if instances[0].encoding.samples == 1 else paths[:1]
    z = np.concatenate([each.frames.z for each in instances])
    names = np.concatenate([each.frames.paths for each in instances])
    own = [np.unique(z[names == name]).tolist() for name in shown]
    if len({len(depths) for depths in own}) == 1:
        return [dict(zip(shown, depths, strict=True)) for depths in zip(*own, strict=True)]
    every: list[float] = sorted(set().union(*own))
    return [dict.fromkeys(shown, depth) for depth in every]


def _own_plane(file: File | None, groups: Iterable[Sequence[Instance]], count: int) -> int:
    """Return the number of the plane that a file holds, if it is one; else the middle one's."""
    for group in groups:
        for each in group:
            depths = set(each.frames.z.tolist())
            if each.path == file and len(depths) == 1:
                planes = _focal_planes(group)
                held = [z for z, plane in enumerate(planes) if depths & set(plane.values())]
                if len(planes) == count and len(held) == 1:
                    return held[0]
    return count // 2


def _z_spacing(
    instances: Sequence[Instance], planes: Sequence[Mapping[str, float]], problems: list[str]
) -> float | None:
    """Return micrometres between focal planes, if they are the same, and the file agrees."""
    if not all(each.has_depths for each in instances):
        return None
    step = even_step([next(iter(plane.values())) for plane in planes])
    measures = _pixel_measures(instances[0])
    stated = positive_number(measures.get("SpacingBetweenSlices"))  # in millimetres
    if step is None or stated is None or abs(stated * 1000 - step) <= CONTRADICTORY * step:
        return step
    problems.append("Its focal planes lie in other steps than it says, so that none is given.")
    return None


def _channels(instances: Sequence[Instance]) -> tuple[Channel, ...]:
    """Name each optical path as the files describe it."""
    stated = [item for each in instances for item in _items(each.metadata, "OpticalPathSequence")]
    names = {
        str(item.get("OpticalPathIdentifier")): item.get("OpticalPathDescription")
        for item in stated
    }
    paths = _optical_paths(instances)
    if len(paths) == 1:
        return (Channel(names.get(paths[0]) or "gray"),)
    return tuple(Channel(names.get(path) or f"channel {path}") for path in paths)


def _first_optical_path(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(iter(_items(metadata, "OpticalPathSequence")), {})


def _mpp(instance: Instance, problems: list[str]) -> tuple[float, float] | None:
    """Return micrometres a pixel (x, y) by the spacing in mm of rows and columns."""
    stated = _pixel_measures(instance).get("PixelSpacing")
    values = stated if isinstance(stated, list) else [stated]
    if stated is not None and (len(values) != 2 or None in map(positive_number, values)):
        problems.append(f"'{instance.path.name}' states no pixel spacing that can be.")
    if instance.spacing is None:
        return None
    row, column = instance.spacing
    return column * 1000, row * 1000


def _unpadded(
    level: LevelLayout, instance: Instance, base: LevelLayout, main: Instance
) -> LevelLayout:
    """Return a level without what fills up its last tiles, and with its downsample.

    Philips counts whole tiles as a level's size, so that its sides do not say how much smaller
    it is: the spacing of its pixels does.
    """
    if instance.spacing is None or main.spacing is None:
        return level
    ratios = [own / whole for own, whole in zip(instance.spacing, main.spacing, strict=True)]
    if min(ratios) <= 1 or abs(ratios[0] - ratios[1]) > CONTRADICTORY * ratios[0]:
        return level
    height, width = (
        math.ceil(side / ratio - ROUNDED)
        for side, ratio in zip((base.height, base.width), ratios, strict=True)
    )
    grid = level.grid
    padding = level.height - height, level.width - width
    if max(padding) <= MOST_ROUNDED or not all(
        0 <= beyond < tile
        for beyond, tile in zip(padding, (grid.tile_height, grid.tile_width), strict=True)
    ):
        return level
    rows, columns = math.ceil(height / grid.tile_height), math.ceil(width / grid.tile_width)
    held = (slice(None), slice(rows), slice(columns))
    grid = replace(grid, offsets=grid.offsets[held], byte_counts=grid.byte_counts[held])
    return replace(level, height=height, width=width, grid=grid, reduction=sum(ratios) / 2)


def _pixel_measures(instance: Instance) -> dict[str, Any]:
    """Return what a file says of sizes and distances."""
    groups = _items(instance.metadata, "SharedFunctionalGroupsSequence")
    found = (measures for group in groups for measures in _items(group, "PixelMeasuresSequence"))
    return next(found, {})


def _items(metadata: Mapping[str, Any], keyword: str) -> list[dict[str, Any]]:
    """Return the items of a sequence; none where it is no sequence."""
    value = metadata.get(keyword)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _joined(metadata: Mapping[str, Any], *keywords: str) -> str | None:
    texts = [metadata.get(keyword) for keyword in keywords]
    return " ".join(text for text in texts if isinstance(text, str) and text.strip()) or None


def _icc(instance: Instance, starts: Mapping[str, int]) -> tuple[int, int] | None:
    if instance.icc is None:
        return None
    offset, length = instance.icc
    return offset + starts[instance.uid], length
