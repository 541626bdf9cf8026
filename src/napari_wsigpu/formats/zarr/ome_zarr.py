"""OME-Zarr: images, collections and labels, versions 0.1 to 0.5; and bare Zarr arrays."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.formats import markup, wsigpu
from napari_wsigpu.formats.pictures import beside_name
from napari_wsigpu.formats.tiff import ome, tiff
from napari_wsigpu.formats.zarr import ngff
from napari_wsigpu.formats.zarr.zarr_image import (
    ZarrImage,
    bare_image,
    child,
    read_image,
    slide_file,
)
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    NotASlideError,
    SlideError,
    UnsupportedSlideError,
    file_error,
)
from napari_wsigpu.model.layout import AssociatedLayout, LabelLayout, Planes, SlideFile, SlideLayout
from napari_wsigpu.model.limits import limits
from napari_wsigpu.storage.zarr.array import DOCUMENTS, brief, folder_of, open_array, read_node

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from napari_wsigpu.storage.zarr.array import Folder, Node

MOST_IMAGES = 64
LONGEST_KEPT = 1 << 18
LARGEST_PROFILE = 16 << 20
DEEPEST = 32
COLLECTION = "bioformats2raw.layout"


def probe(path: Path, head: bytes) -> bool:
    """Whether a path is the folder of a Zarr array or group, or a file of its metadata."""
    return (not head or path.name in DOCUMENTS) and folder_of(path) is not None


def parse(path: Path, at: Mapping[str, int] = tiff.MIDDLE) -> SlideLayout:
    """Describe an OME-Zarr image with its label images, or a bare array that is a picture.

    Of z and t, the plane is shown that is asked for, or that the image's rendering settings name,
    else the middle one along z, the first one along t.

    Parameters
    ----------
    path : Path
        Absolute path of the image's folder, or of a metadata file in it.
    at : Mapping of str to int, optional
        The plane along "z" and "t".

    Raises
    ------
    NotASlideError
        If it is another kind of Zarr hierarchy.
    UnsupportedSlideError
        If it can't be shown, is a plate, or zarr is not installed.
    CorruptSlideError
        If its metadata are damaged.
    SlideError
        If it can't be read.
    """
    return parse_folder(folder_of(path) or path, at)


def parse_folder(folder: Folder, at: Mapping[str, int] = tiff.MIDDLE) -> SlideLayout:
    """Describe what lies in a folder, on disk or on a server; see `parse`."""
    node = read_node(folder)
    if node is None:
        raise NotASlideError(f"'{folder}' is no Zarr hierarchy; choose a slide's file or folder.")
    problems: list[str] = []
    if node.is_array:
        return _layout("zarr", node, bare_image(node), problems)
    if COLLECTION in node.ome and not node.ome.keys() & {"plate", "multiscales"}:
        return _collection(node, problems, at)
    image = read_image(node, problems, at=at)
    labels = _labels(node, image, problems)
    found = replace(_layout("ome-zarr", node, image, problems), labels=labels)
    record = node.attributes.get("wsigpu")
    return found if not isinstance(record, dict) else _converted(found, record, node, image)


def _layout(
    vendor: str, node: Node, image: ZarrImage, problems: Sequence[str], *more: Node
) -> SlideLayout:
    """Describe an image as a slide."""
    rgb = tiff.is_rgb(image.levels[0])
    count = image.levels[0].channels
    documents = chain.from_iterable(each.documents for each in (node, *more))
    files = (*map(slide_file, dict.fromkeys(documents)), *image.files)
    return SlideLayout(
        path=str(node.folder),
        file_size=sum(file.size for file in files),
        modified_ns=max(file.modified_ns for file in files),
        vendor=vendor,
        levels=image.levels,
        rgb=rgb,
        channels=() if rgb else tiff.channel_names(count, image.channels),
        background=image.background,
        mpp=_mpp(image),
        metadata={vendor: _attributes(node)},
        hidden_planes=image.hidden_planes,
        planes=Planes.along(image.planes, image.spacing("z"), image.spacing("t"), image.starts),
        first=image.first,
        problems=tuple(problems),
        files=files,
    )


def _attributes(node: Node) -> dict[str, Any]:
    """Return a node's attributes, unless they are too long to be looked at."""
    kept = sum(slide_file(path).size for path in node.documents) <= LONGEST_KEPT
    found: dict[str, Any] = _shallow(node.attributes, DEEPEST) if kept else {}
    return found


def _shallow(value: Any, depth: int) -> Any:
    """Copy nested metadata without what lies deeper."""
    if isinstance(value, dict):
        return {key: _shallow(item, depth - 1) for key, item in value.items() if depth}
    if isinstance(value, list):
        return [_shallow(item, depth - 1) for item in value if depth]
    return value


def _mpp(image: ZarrImage) -> tuple[float, float] | None:
    (x, _, x_known), (y, _, y_known) = image.along("x"), image.along("y")
    return (x, y) if x_known and y_known else None


# Collections of images, as bioformats2raw writes them


def _collection(node: Node, problems: list[str], at: Mapping[str, int]) -> SlideLayout:
    """Describe the first image of a collection, and those that are called label or macro."""
    inner = read_node(node.folder / "OME")
    stated = inner.ome.get("series") if inner is not None else None
    if not isinstance(stated, list):
        stated = [str(n) for n in range(MOST_IMAGES) if (node.folder / str(n)).is_dir()]
    if not stated:
        raise CorruptSlideError(f"'{node.folder}' lists no images; get a fresh copy of it.")
    main = child(node, stated[0])
    image = read_image(main, problems, at=at)
    end, images = image.end, {}
    files: list[SlideFile] = list(image.files)
    described, names = _described(node.folder / "OME" / "METADATA.ome.xml", problems)
    unshown = []
    for index, path in enumerate(stated[1:MOST_IMAGES], 1):
        name = beside_name(names[index]) if index < len(names) else None
        if name is None or name in images:
            unshown.append(str(path)[:40])
            continue
        try:
            other = child(node, path)
            picture = read_image(other, problems, end)
        except SlideError as error:
            problems.append(f"The {name} image is left out. {error}")
            continue
        if picture.levels[0].dtype != np.uint8 or picture.levels[0].channels not in (1, 3, 4):
            unshown.append(str(path)[:40])
            continue
        images[name] = AssociatedLayout(name, picture.levels[0])
        files += [*map(slide_file, other.documents), *picture.files]
        end = picture.end
    if len(stated) > MOST_IMAGES or unshown:
        count = len(unshown) + max(0, len(stated) - MOST_IMAGES)
        problems.append(
            f"{count} further image(s) are not shown: open the folder of one"
            + (f", for example '{unshown[0]}'." if unshown else ".")
        )
    labels = _labels(main, image, problems)
    image = image._replace(files=tuple(files))
    found = _layout("ome-zarr", node, image, (), main)
    found = replace(
        found,
        associated=tuple(images.values()),
        labels=labels,
        metadata={"ome-zarr": {**_attributes(node), **_attributes(main)}},
        problems=tuple(problems),
    )
    if described is None:
        return found
    channels = described.channels if not image.channels else found.channels
    return replace(
        found,
        channels=tiff.channel_names(len(found.channels), channels) if found.channels else (),
        mpp=found.mpp or described.mpp,
        objective=described.objective,
        scanner=described.scanner,
        scan_date=described.scan_date,
    )


def _described(
    document: Folder, problems: list[str]
) -> tuple[ome.OmeDescription | None, list[str]]:
    """Return what OME-XML says of the first image of a collection, and the names of all."""
    if not document.is_file():
        return None, []
    try:
        large = document.stat().st_size > limits.xml_bytes
        root = None if large else markup.parse(document.read_text("utf-8", "replace"))
    except OSError as error:
        raise file_error(str(document), error) from error
    if root is None:
        problems.append(f"'{document.name}' can't be read.")
        return None, []
    names = [image.get("Name") or "" for image in markup.children(root, "Image")]
    return ome.describe(root), names


# What this package's conversion adds


def _converted(
    layout: SlideLayout, record: dict[str, Any], node: Node, image: ZarrImage
) -> SlideLayout:
    """Add the record of a slide that was converted, its associated images and its ICC profile."""
    problems = list(layout.problems)
    associated, files, end = [], list(layout.files), image.end
    folder = node.folder / "associated"
    for name in sorted(wsigpu.ASSOCIATED):
        try:
            other = read_node(folder / name)
            if other is not None and not other.is_array:
                picture = read_image(other, problems, end)
                associated.append(AssociatedLayout(name, picture.levels[0]))
                files += [*map(slide_file, other.documents), *picture.files]
                end = picture.end
        except SlideError as error:
            problems.append(f"The {name} image is left out. {error}")
    found = wsigpu.with_record(layout, record)
    return replace(
        found,
        associated=tuple(associated),
        channels=layout.channels,
        files=tuple(files),
        icc=_profile(node.folder / "icc_profile", problems),
        problems=tuple(problems),
    )


def _profile(folder: Folder, problems: list[str]) -> bytes | None:
    if not folder.is_dir():
        return None
    try:
        array = open_array(folder)
        if array.ndim != 1 or array.dtype != np.uint8 or array.size > LARGEST_PROFILE:
            raise CorruptSlideError(f"'{folder}' is no ICC profile.")
        return np.asarray(array[...]).tobytes()
    except Exception as error:
        # Codecs of damaged chunks raise what they like.
        problems.append(f"The ICC profile can't be read ({brief(error)}).")
        return None


# Label images


def _labels(node: Node, image: ZarrImage, problems: list[str]) -> tuple[LabelLayout, ...]:
    """Describe the label images of an image; what is wrong with one becomes a problem."""
    try:
        group = read_node(node.folder / "labels")
    except SlideError as error:
        problems.append(f"The label images are left out. {error}")
        return ()
    stated = group.ome.get("labels") if group is not None else None
    if group is None or not isinstance(stated, list):
        return ()
    if len(stated) > MOST_IMAGES:
        problems.append(f"{len(stated) - MOST_IMAGES} further label image(s) are not shown.")
    found: dict[str, LabelLayout] = {}
    for name in stated[:MOST_IMAGES]:
        try:
            label = _label(child(group, name), image)
        except SlideError as error:
            problems.append(f"A label image is left out. {error}")
        else:
            found.setdefault(str(name), replace(label, name=str(name)))
            problems += [f"Of the label image {name!r}: {text}" for text in label.layout.problems]
    return tuple(found.values())


def _label(node: Node, image: ZarrImage) -> LabelLayout:
    own_problems: list[str] = []
    found = read_image(node, own_problems, labelled=image)
    level = found.levels[0]
    if level.channels > 1 or level.dtype.kind not in "iu":
        raise UnsupportedSlideError(
            f"'{node.folder}' has {level.channels} channel(s) of {level.dtype}, which are no "
            "numbers of objects."
        )
    base = image.levels[0]
    steps, offsets = [], []
    for letter, ratio in (("x", base.width / level.width), ("y", base.height / level.height)):
        scale, shift, known = found.along(letter)
        whole, origin, whole_known = image.along(letter)
        comparable = known == whole_known and None not in (found.place, image.place)
        step = scale / whole if comparable else ratio
        offset = (shift - origin) / whole if comparable else 0.0
        steps.append(step)
        # Less than a pixel is a matter of where in a pixel the writer thinks that it lies.
        offsets.append(offset if abs(offset) >= max(1.0, step) else 0.0)
    said = node.ome.get("image-label")
    return LabelLayout(
        name="",
        layout=_layout("ome-zarr", node, found, own_problems),
        step=(steps[0], steps[1]),
        offset=(offsets[0], offsets[1]),
        colors=ngff.label_colors(said),
        properties=ngff.label_properties(said),
    )
