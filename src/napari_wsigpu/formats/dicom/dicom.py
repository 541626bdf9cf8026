"""DICOM whole-slide images (PS3.3, A.32.8): a series of files, usually one per level."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

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
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from napari_wsigpu.formats.dicom.dicom_instance import Instance
    from napari_wsigpu.formats.fields import Metadata
    from napari_wsigpu.model.layout import Encoding
    from napari_wsigpu.storage.remote.served import ServedFile

    File = Path | ServedFile

PREAMBLE, MAGIC = 128, b"DICM"
# The attribute MediaStorageSOPClassUID. The file meta information is always in Explicit VR Little
# Endian (PS3.10, section 7.1), so its bytes don't depend on the transfer syntax.
WSI_CLASS = b"\x02\0\x02\0UI\x1e\x001.2.840.10008.5.1.4.1.1.77.1.6"
DIRECTORY_CLASS = b"\x02\0\x02\0UI\x14\x001.2.840.10008.1.3.10"
FILE_META = 1024
# Files on exchange media have no extension (PS3.10, section 8.2). UIDs as names end in a number.
ENDINGS = (".dcm", ".dicom", ".dic", "")
# The search for slides in a folder ends after this many entries, or files that are not slides.
MOST_ENTRIES = 4096
MOST_OTHER_FILES = 64
# Depth of the search for slides: media have nested folders for patients, studies and series, often
# inside another folder.
DEEPEST = 5
# Relative difference above which two stated lengths contradict each other.
CONTRADICTORY = 0.01
# Pixels: how far writers round the sides of levels, and the rounding error of our own division.
MOST_ROUNDED, ROUNDED = 2, 0.01
ASSOCIATED = {"LABEL": "label", "OVERVIEW": "macro", "THUMBNAIL": "thumbnail"}


def probe(path: Path, head: bytes) -> bool:
    """Whether a path is a DICOM file, or a folder that holds a DICOM slide, possibly in subfolders.

    A dual-personality file, which is both DICOM and TIFF (PS3.10, section 7.1), is read as the
    format that its extension names.

    Raises
    ------
    OSError
        If a folder can't be read.
    """
    if not head:
        return path.is_dir() and next(slide_folders(path), None) is not None
    return head.startswith(MAGIC, PREAMBLE) and path.suffix.lower() not in {".tif", ".tiff"}


def parse(path: Path, at: Mapping[str, int] = tiff.DEFAULT_PLANE) -> SlideLayout:
    """Describe the slide that a file belongs to, or that a folder holds.

    Parameters
    ----------
    path : Path
        Absolute path of the folder, of one of the slide's files (all in one folder), or of a
        DICOMDIR that lists them.
    at : Mapping of str to int, optional
        The focal plane, as "z". The default is the file's plane if it holds only one, else the
        middle plane of the slide.

    Raises
    ------
    NotASlideError
        If it is a DICOM file of another kind.
    UnsupportedSlideError
        If the slide can't be shown, or the packages for DICOM are not installed.
    SlideError
        If it can't be read or is damaged.
    """
    if path.is_dir():
        files = [file for folder in slide_folders(path) for file in _files_in(folder)]
        return parse_files(str(path), None, files, at)
    head = _head(path)
    if head[PREAMBLE:].startswith(MAGIC) and DIRECTORY_CLASS in head:
        return _parse_directory(path, at)
    if not is_wsi(head):
        raise other_kind(str(path))
    others = [file for file in _files_in(path.parent) if file != path]
    return parse_files(str(path), path, [path, *others], at)


def _parse_directory(path: Path, at: Mapping[str, int]) -> SlideLayout:
    """Describe the slide with the largest image among the files that a DICOMDIR lists."""
    check_packages(str(path))
    from napari_wsigpu.formats.dicom import dicom_instance

    listed = dicom_instance.listed_files(path)
    files = [file for file in listed if _is_wsi(file)]
    if not listed:
        raise other_kind(str(path))
    if not files:
        raise UnsupportedSlideError(
            f"None of the {len(listed)} slide files listed in '{path}' were found; copy the whole "
            "disc or folder, including its subfolders."
        )
    layout = parse_files(str(path), None, files, at)
    if len(files) == len(listed):
        return layout
    lost = f"{len(listed) - len(files)} of {len(listed)} listed slide files are missing."
    return replace(layout, problems=(*layout.problems, lost))


def other_kind(path: str) -> NotASlideError:
    """Return the error for a DICOM file that is not a whole-slide image."""
    return NotASlideError(
        f"'{path}' is a DICOM file, but not a whole-slide image; open it with a radiology viewer."
    )


def parse_files(
    path: str,
    chosen: File | None,
    files: Sequence[File],
    at: Mapping[str, int] = tiff.DEFAULT_PLANE,
) -> SlideLayout:
    """Describe the slide that a file belongs to, from a list of files that may belong to it.

    Parameters
    ----------
    path : str
        Path of the slide.
    chosen : Path or ServedFile or None
        The file; None describes the slide with the largest image.
    files : sequence of Path or ServedFile
        All candidate files, including `chosen`.
    at : Mapping of str to int, optional
        As in `parse`.

    Raises
    ------
    SlideError
        As `parse` does.
    """
    check_packages(path)
    from napari_wsigpu.formats.dicom import dicom_instance

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
    return slide_of(path, chosen, list(found.values()), problems, at)


def slide_of(
    path: str,
    chosen: File | None,
    instances: Sequence[Instance],
    problems: list[str],
    at: Mapping[str, int],
) -> SlideLayout:
    """Describe the slide that some of the instances form; see `parse_files`.

    Raises
    ------
    UnsupportedSlideError
        If the instances hold no slide that can be shown.
    SlideError
        If the instances are damaged.
    """
    instances = _one_series(path, chosen, instances, problems)
    return _layout(path, chosen, instances, problems, at)


def check_packages(path: str) -> None:
    """Raise an `UnsupportedSlideError` if the packages for DICOM are not installed."""
    try:
        from napari_wsigpu.formats.dicom import dicom_instance  # noqa: F401
    except ImportError as error:
        raise UnsupportedSlideError(
            f"Reading the DICOM slide '{path}' requires optional packages ({error}); "
            'run pip install "napari-wsigpu[dicom]" and restart.'
        ) from error


def is_wsi(head: bytes) -> bool:
    """Whether a file that starts with these bytes belongs to a whole-slide image."""
    return head[PREAMBLE:].startswith(MAGIC) and WSI_CLASS in head[:FILE_META]


def may_be_dicom(name: str) -> bool:
    """Whether a file with this name may be DICOM."""
    ending = PurePosixPath(name).suffix.lower()
    return ending in ENDINGS or ending[1:].isdigit()


def slide_folders(root: Path) -> Iterator[Path]:
    """Yield the folders that hold DICOM slides: `root`, or folders below it.

    The search is limited, so it may miss some folders. It does not enter subfolders of a folder
    with slide files.

    Raises
    ------
    OSError
        If `root` can't be read.
    """
    entries = other_files = 0
    folders = [(root, 1)]
    for folder, depth in folders:  # breadth first: the loop appends to this list
        below: list[tuple[Path, int]] = []
        with suppress(*[OSError] * (depth > 1)), os.scandir(folder) as listing:
            for entry in listing:
                entries += 1
                if entries > MOST_ENTRIES or other_files == MOST_OTHER_FILES:
                    return
                if entry.is_dir(follow_symlinks=False):
                    below.append((folder / entry.name, depth + 1))
                elif may_be_dicom(entry.name):
                    if _is_wsi(folder / entry.name):
                        yield folder
                        break
                    other_files += 1
            else:
                folders += sorted(below) if depth < DEEPEST else []


def _files_in(folder: Path) -> list[Path]:
    return sorted(filter(_is_wsi, folder.iterdir()))


def _is_wsi(path: Path) -> bool:
    return is_wsi(_head(path))


def _head(path: Path) -> bytes:
    """Return the first bytes of a regular file; an empty result for anything else."""
    try:
        if path.is_file():  # opening a pipe would block
            with path.open("rb") as file:
                return file.read(FILE_META)
    except OSError:
        pass
    return b""


def _one_series(
    path: str, chosen: File | None, instances: Sequence[Instance], problems: list[str]
) -> list[Instance]:
    """Return the files of the chosen file's series, by default of the largest image's series."""
    if chosen is None:
        levels = (each for each in instances if each.flavor == "VOLUME")
        # Among images of the same size, prefer single focal planes to extended depth of field.
        main = max(
            levels, key=lambda each: (each.width * each.height, not _is_fused(each)), default=None
        )
    else:
        main = next(each for each in instances if each.path == chosen)
    own = [] if main is None else [each for each in instances if each.series == main.series]
    series = [each for each in own if main is not None and _may_share_pyramid(each, main)]
    others = len({each.series for each in instances}) - 1
    if main is not None and main.flavor == "VOLUME":
        others_fused = [each for each in series if not _is_fused_like(each, main)]
        if others_fused:
            problems.append(
                f"{len(others_fused)} file(s) with{'out' if _is_fused(main) else ''} extended "
                "depth of field are not shown; open one of them to see them."
            )
        series = [each for each in series if _is_fused_like(each, main)]
    if not any(each.flavor == "VOLUME" for each in series):
        reason = problems[0] if problems else "None of its files is a level of a slide."
        raise UnsupportedSlideError(f"'{path}' holds no slide that can be shown. {reason}")
    if chosen is None and others:
        problems.append(
            f"The folder holds {others} more DICOM series, which are not shown; open a file of a "
            "series to see it."
        )
    return series


def _is_fused(instance: Instance) -> bool:
    """Whether an image was computed from several focal planes (extended depth of field)."""
    return instance.metadata.get("ExtendedDepthOfField") == "YES"


def _is_fused_like(instance: Instance, other: Instance) -> bool:
    """Whether both images or neither have extended depth of field; true for associated images."""
    return instance.flavor != "VOLUME" or _is_fused(instance) == _is_fused(other)


def _may_share_pyramid(instance: Instance, other: Instance) -> bool:
    """Whether two files may belong to one pyramid: two levels must not differ in PyramidUID.

    The attribute is optional, and associated images belong to every pyramid of a series.
    """
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
                f"The level of {size[1]} x {size[0]} pixels is left out, because it has "
                f"{len(same)} focal plane(s) instead of {len(planes)}."
            )
            continue
        level = _level(path, groups[size], same[z], starts, ends[-1], problems)
        if levels:
            level = _unpadded(level, groups[size][0], levels[0], main[0])
        if levels and not _is_same_image(level, levels[0]):
            problems.append(
                f"The level of {level.width} x {level.height} pixels is left out, because it "
                "differs from the finest level in aspect ratio, channels or sample type."
            )
        else:
            levels.append(level)
    if any(level.reduction is not None for level in levels):
        levels[0] = replace(levels[0], reduction=1.0)
    tiff.check_tiles_present(levels, path, ends[-1])
    metadata = main[0].metadata
    path_item = next(iter(_items(metadata, "OpticalPathSequence")), {})
    labels = [each.metadata for each in instances if each.flavor == "LABEL"]
    barcodes = (_joined(each, "BarcodeValue") for each in (metadata, *labels))
    rgb = tiff.is_rgb(levels[0])
    return SlideLayout(
        path=path,
        vendor="dicom",
        levels=tuple(levels),
        associated=tuple(associated.values()),
        rgb=rgb,
        channels=() if rgb else _channels(main),
        background=tiff.background(levels[0]),
        mpp=_mpp(main[0], problems),
        objective=positive_number(path_item.get("ObjectiveLensPower")),
        metadata={"dicom": metadata},
        other_planes=len(planes) * len(_optical_paths(main)) // len(planes[0]) - 1,
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
    end: int,
    problems: list[str],
) -> LevelLayout:
    """Describe the level that instances of one size form.

    Parameters
    ----------
    path : str
        Path of the slide; if it is a file, that file's frames take precedence.
    instances : sequence of Instance
        The instances.
    depths : Mapping of str to float
        The shown focal plane of each optical path.
    starts : Mapping of str to int
        Offset of each file in the slide's bytes, by its UID.
    end : int
        Offset of the end of the last file.
    problems : list of str
        Receives the problems found.
    """
    first = instances[0]
    same = [each for each in instances if _tiling(each) == _tiling(first)]
    if len(same) < len(instances):
        problems.append(
            f"{len(instances) - len(same)} file(s) of {first.width} x {first.height} pixels are "
            "left out, because their frames differ in size or encoding from the other files."
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
        indices = [
            (plane, frames.rows[chosen], frames.columns[chosen]) for plane, chosen in shown_frames
        ]
        if any(byte_counts[index].any() for index in indices):
            problems.append(
                f"'{each.path.name}' is left out, because other files already hold the same tiles "
                f"of the level of {first.width} x {first.height} pixels."
            )
            continue
        lost = (frames.offsets < 0) | (frames.offsets > each.file.size - frames.byte_counts)
        if lost.any():
            problems.append(
                f"'{each.path.name}' is truncated: {int(lost.sum())} of its frames lie beyond its "
                "end; get a fresh copy of it."
            )
        # A lost frame must not be read from the next file, which follows in the slide's bytes.
        positions = np.where(lost, end, frames.offsets + starts[each.uid])
        for index, (_, chosen) in zip(indices, shown_frames, strict=True):
            offsets[index] = positions[chosen]
            byte_counts[index] = frames.byte_counts[chosen]
    missing = int((byte_counts == 0).sum())
    if missing and first.metadata.get("DimensionOrganizationType") == "TILED_FULL":
        problems.append(
            f"{missing} of {byte_counts.size} frames of the level of {first.width} x "
            f"{first.height} pixels are missing."
        )
    encoding, samples = first.encoding, first.encoding.samples
    if first.is_planar:  # a segment for each sample
        byte_counts = np.repeat(byte_counts // samples, samples, axis=0)
        offsets = np.repeat(offsets, samples, axis=0)
        offsets += byte_counts * np.arange(samples).reshape(-1, 1, 1)
        encoding = replace(encoding, samples=1)
    return LevelLayout(
        first.width,
        first.height,
        3 if encoding.table is not None else samples * len(shown),
        replace(encoding, jpeg_tables=(None,) * len(offsets)),
        TileGrid(first.tile_height, first.tile_width, offsets, byte_counts),
    )


def _is_same_image(level: LevelLayout, base: LevelLayout) -> bool:
    """Whether a level has the channels, type and aspect ratio of `base`, within two pixels."""
    difference = abs(level.width * base.height - level.height * base.width)
    same_shape = difference <= 2 * max(base.width, base.height)
    return same_shape and (level.channels, level.dtype) == (base.channels, base.dtype)


def _tiling(instance: Instance) -> tuple[int, int, Encoding, bool]:
    return instance.tile_height, instance.tile_width, instance.encoding, instance.is_planar


def _optical_paths(instances: Sequence[Instance]) -> list[str]:
    names = [name for each in instances for name in np.unique(each.frames.paths).tolist()]
    return sorted(set(names))


def _focal_planes(instances: Sequence[Instance]) -> list[dict[str, float]]:
    """Return the focal planes of instances of one size, from the glass up.

    Each is a mapping from the shown optical paths to a depth. The depths of a plane may differ
    between optical paths, if all paths have the same number of planes.
    """
    paths = _optical_paths(instances)
    encoding = instances[0].encoding
    shown = paths if encoding.samples == 1 and encoding.table is None else paths[:1]
    z = np.concatenate([each.frames.z for each in instances])
    names = np.concatenate([each.frames.paths for each in instances])
    own = [np.unique(z[names == name]).tolist() for name in shown]
    if len({len(depths) for depths in own}) == 1:
        return [dict(zip(shown, depths, strict=True)) for depths in zip(*own, strict=True)]
    every: list[float] = sorted(set().union(*own))
    return [dict.fromkeys(shown, depth) for depth in every]


def _own_plane(file: File | None, groups: Iterable[Sequence[Instance]], count: int) -> int:
    """Return the index of the only plane that a file holds, else the index of the middle one."""
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
    """Return the micrometers between focal planes, if they are evenly spaced.

    Returns None if the file states another spacing, which is reported as a problem.
    """
    if not all(each.has_depths for each in instances):
        return None
    step = even_step([next(iter(plane.values())) for plane in planes])
    measures = _pixel_measures(instances[0])
    stated = positive_number(measures.get("SpacingBetweenSlices"))  # in millimeters
    if step is None or stated is None or abs(stated * 1000 - step) <= CONTRADICTORY * step:
        return step
    problems.append("The stated spacing of the focal planes contradicts their positions.")
    return None


def _channels(instances: Sequence[Instance]) -> tuple[Channel, ...]:
    """Name each optical path by its description in the files."""
    stated = [item for each in instances for item in _items(each.metadata, "OpticalPathSequence")]
    names = {
        str(item.get("OpticalPathIdentifier")): item.get("OpticalPathDescription")
        for item in stated
    }
    paths = _optical_paths(instances)
    if len(paths) == 1:
        return (Channel(names.get(paths[0]) or "gray"),)
    return tuple(Channel(names.get(path) or f"channel {path}") for path in paths)


def _mpp(instance: Instance, problems: list[str]) -> tuple[float, float] | None:
    """Return micrometers per pixel (x, y), from the spacing of rows and columns in millimeters."""
    stated = _pixel_measures(instance).get("PixelSpacing")
    values = stated if isinstance(stated, list) else [stated]
    if stated is not None and (len(values) != 2 or None in map(positive_number, values)):
        problems.append(
            f"'{instance.path.name}' has an impossible pixel spacing, which is ignored."
        )
    if instance.spacing is None:
        return None
    row, column = instance.spacing
    return column * 1000, row * 1000


def _unpadded(
    level: LevelLayout, instance: Instance, base: LevelLayout, main: Instance
) -> LevelLayout:
    """Return a level without the padding of its last tiles, and with its downsample.

    Philips rounds the size of a level up to whole tiles, so the downsample follows from the pixel
    spacing instead.
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
    below, right = level.height - height, level.width - width
    fits = 0 <= below < grid.tile_height and 0 <= right < grid.tile_width
    if max(below, right) <= MOST_ROUNDED or not fits:
        return level
    rows, columns = math.ceil(height / grid.tile_height), math.ceil(width / grid.tile_width)
    held = (slice(None), slice(rows), slice(columns))
    grid = replace(grid, offsets=grid.offsets[held], byte_counts=grid.byte_counts[held])
    return replace(level, height=height, width=width, grid=grid, reduction=sum(ratios) / 2)


def _pixel_measures(instance: Instance) -> Metadata:
    """Return the shared Pixel Measures of a file (PS3.3, C.7.6.16.2.1)."""
    groups = _items(instance.metadata, "SharedFunctionalGroupsSequence")
    found = (measures for group in groups for measures in _items(group, "PixelMeasuresSequence"))
    return next(found, {})


def _items(metadata: Metadata, keyword: str) -> list[Metadata]:
    """Return the items of a sequence; an empty list if the attribute is not a sequence."""
    value = metadata.get(keyword)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _joined(metadata: Metadata, *keywords: str) -> str | None:
    texts = [metadata.get(keyword) for keyword in keywords]
    return " ".join(text for text in texts if isinstance(text, str) and text.strip()) or None


def _icc(instance: Instance, starts: Mapping[str, int]) -> tuple[int, int] | bytes | None:
    if callable(instance.icc):
        return instance.icc()
    if instance.icc is None or isinstance(instance.icc, bytes):
        return instance.icc
    offset, length = instance.icc
    return offset + starts[instance.uid], length
