"""OME-Zarr images, collections and labels (versions 0.1 to 0.6), and bare Zarr arrays."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.formats import markup, wsigpu
from napari_wsigpu.formats.fields import finite
from napari_wsigpu.formats.pictures import associated_name
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

    from napari_wsigpu.formats.fields import Metadata
    from napari_wsigpu.model.layout import Channel
    from napari_wsigpu.storage.zarr.array import Folder, Node

MOST_IMAGES = 64
LONGEST_KEPT = 1 << 18
LARGEST_PROFILE = 16 << 20
DEEPEST = 32
ARCHIVES, ZIP = (".ozx", ".zarr.zip"), (b"PK\3\4", b"PK\5\6")
COLLECTION = "bioformats2raw.layout"


def probe(path: Path, head: bytes) -> bool:
    """Whether a path is a Zarr array's or group's folder, a metadata file in it, or a ZIP file."""
    if head.startswith(ZIP) and path.name.lower().endswith(ARCHIVES):
        return True
    return (not head or path.name in DOCUMENTS) and folder_of(path) is not None


def parse(path: Path, at: Mapping[str, int] = tiff.DEFAULT_PLANE) -> SlideLayout:
    """Describe an OME-Zarr image with its label images, or a bare array that is an image.

    Without `at`, the rendering settings of the image select the plane. Without settings, it is the
    middle one along z and the first one along t.

    Parameters
    ----------
    path : Path
        Absolute path of the image's folder, of a metadata file in it, or of a ZIP file with it.
    at : Mapping of str to int, optional
        The plane along "z" and "t".

    Raises
    ------
    NotASlideError
        If it is a Zarr hierarchy of another kind.
    UnsupportedSlideError
        If it can't be shown, is a plate, or zarr is not installed.
    CorruptSlideError
        If its metadata is damaged.
    SlideError
        If it can't be read.
    """
    if path.name.lower().endswith(ARCHIVES):
        return _parse_archive(path, at)
    return parse_folder(folder_of(path) or path, at)


def _parse_archive(path: Path, at: Mapping[str, int]) -> SlideLayout:
    """Describe the image in a ZIP file, which is the slide's only file."""
    from napari_wsigpu.storage.zarr.archive import ZipArchive  # few slides are archives

    file = SlideFile.of(str(path), path.stat())
    with closing(ZipArchive(file)) as archive:
        layout = _in_archive(parse_folder(archive.root, at), file)
    labels = (replace(each, layout=_in_archive(each.layout, file)) for each in layout.labels)
    return replace(layout, path=file.path, labels=tuple(labels))


def _in_archive(layout: SlideLayout, file: SlideFile) -> SlideLayout:
    return replace(layout, files=(file,))


def parse_folder(folder: Folder, at: Mapping[str, int] = tiff.DEFAULT_PLANE) -> SlideLayout:
    """Describe the image in a folder on disk or on a server; see `parse`."""
    node = read_node(folder)
    if node is None:
        raise NotASlideError(f"'{folder}' is not a Zarr hierarchy; choose a slide file or folder.")
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
    documents = chain.from_iterable(each.documents for each in (node, *more))
    files = (*map(slide_file, dict.fromkeys(documents)), *image.files)
    return SlideLayout(
        path=str(node.folder),
        vendor=vendor,
        levels=image.levels,
        rgb=rgb,
        channels=() if rgb else _channels(image, image.channels),
        background=image.background,
        mpp=_mpp(image),
        metadata={vendor: _attributes(node)},
        other_planes=image.other_planes,
        planes=Planes.along(image.planes, image.spacing("z"), image.spacing("t"), image.starts),
        first=image.first,
        problems=tuple(problems),
        files=files,
    )


def _channels(image: ZarrImage, stated: Sequence[Channel]) -> tuple[Channel, ...]:
    """Return the channels of an image; those of Booleans show True at full brightness."""
    channels = tiff.channel_names(image.levels[0].channels, stated)
    if not image.is_boolean:
        return channels
    return tuple(replace(each, window=each.window or (0.0, 1.0)) for each in channels)


def _attributes(node: Node) -> Metadata:
    """Return a node's attributes, to a limited depth; empty if they are too long."""
    kept = sum(slide_file(path).size for path in node.documents) <= LONGEST_KEPT
    found: Metadata = finite(node.attributes, DEEPEST) if kept else {}
    return found


def _mpp(image: ZarrImage) -> tuple[float, float] | None:
    (x, _, x_known), (y, _, y_known) = image.along("x"), image.along("y")
    return (x, y) if x_known and y_known else None


# Collections of images, in the layout of bioformats2raw


def _collection(node: Node, problems: list[str], at: Mapping[str, int]) -> SlideLayout:
    """Describe the first image of a collection, and its images named label or macro."""
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
    description, names = _describe_xml(node.folder / "OME" / "METADATA.ome.xml", problems)
    unshown = []
    for index, path in enumerate(stated[1:MOST_IMAGES], 1):
        name = associated_name(names[index]) if index < len(names) else None
        if name is None or name in images:
            unshown.append(str(path)[:40])
            continue
        try:
            other = child(node, path)
            picture = read_image(other, problems, end)
        except SlideError as error:
            problems.append(f"The {name} image is left out. {error}")
            continue
        # Anything that is not an ordinary 8-bit image counts as another scan.
        if picture.levels[0].dtype != np.uint8 or picture.levels[0].channels not in (1, 3, 4):
            unshown.append(str(path)[:40])
            continue
        images[name] = AssociatedLayout(name, picture.levels[0])
        files += [*map(slide_file, other.documents), *picture.files]
        end = picture.end
    if len(stated) > MOST_IMAGES or unshown:
        count = len(unshown) + max(0, len(stated) - MOST_IMAGES)
        problems.append(
            f"{count} more image(s) are not shown: open the folder of one"
            + (f", for example '{unshown[0]}'." if unshown else ".")
        )
    labels = _labels(main, image, problems)
    image = image._replace(files=tuple(files))
    found = replace(
        _layout("ome-zarr", node, image, (), main),
        associated=tuple(images.values()),
        labels=labels,
        metadata={"ome-zarr": {**_attributes(node), **_attributes(main)}},
        problems=tuple(problems),
    )
    if description is None:
        return found
    channels = description.channels if not image.channels else found.channels
    return replace(
        found,
        channels=_channels(image, channels) if found.channels else (),
        mpp=found.mpp or description.mpp,
        objective=description.objective,
        scanner=description.scanner,
        scan_date=description.scan_date,
    )


def _describe_xml(
    document: Folder, problems: list[str]
) -> tuple[ome.OmeDescription | None, list[str]]:
    """Return the OME-XML description of a collection's first image, and the names of all images."""
    if not document.is_file():
        return None, []
    try:
        large = document.stat().st_size > limits.xml_bytes
        root = None if large else markup.parse(document.read_bytes().decode("utf-8", "replace"))
    except OSError as error:
        raise file_error(str(document), error) from error
    if root is None:
        problems.append(f"'{document.name}' can't be read.")
        return None, []
    names = [image.get("Name") or "" for image in markup.children(root, "Image")]
    return ome.describe(root), names


# Data that this package's conversion adds


def _converted(layout: SlideLayout, record: Metadata, node: Node, image: ZarrImage) -> SlideLayout:
    """Add the record of a converted slide, its associated images and its ICC profile."""
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
            raise CorruptSlideError(f"'{folder}' is not an ICC profile.")
        return np.asarray(array[...]).tobytes()
    except Exception as error:
        # On damaged chunks, codecs raise exceptions of any type.
        problems.append(f"The ICC profile can't be read ({brief(error)}).")
        return None


# Label images


def _labels(node: Node, image: ZarrImage, problems: list[str]) -> tuple[LabelLayout, ...]:
    """Describe the label images of an image; an error in one of them becomes a problem."""
    try:
        group = read_node(node.folder / "labels")
    except SlideError as error:
        problems.append(f"The label images are left out. {error}")
        return ()
    stated = group.ome.get("labels") if group is not None else None
    if group is None:
        return ()
    if not isinstance(stated, list):
        problems.append("The group of label images does not list them, so none is shown.")
        return ()
    if len(stated) > MOST_IMAGES:
        problems.append(f"{len(stated) - MOST_IMAGES} more label image(s) are not shown.")
    found: dict[str, LabelLayout] = {}
    for name in stated[:MOST_IMAGES]:
        try:
            label = _label(child(group, name), image)
        except SlideError as error:
            problems.append(f"A label image is left out. {error}")
        else:
            found.setdefault(str(name), replace(label, name=str(name)))
            problems += [f"Label image {name!r}: {text}" for text in label.layout.problems]
    return tuple(found.values())


def _label(node: Node, image: ZarrImage) -> LabelLayout:
    own_problems: list[str] = []
    found = read_image(node, own_problems, labelled=image)
    level = found.levels[0]
    if level.channels > 1 or level.dtype.kind not in "iu":
        raise UnsupportedSlideError(
            f"'{node.folder}' has {level.channels} channel(s) of {level.dtype}; a label image has "
            "one channel of integers."
        )
    base = image.levels[0]
    steps, offsets = [], []
    for letter, ratio in (("x", base.width / level.width), ("y", base.height / level.height)):
        scale, shift, known = found.along(letter)
        whole, origin, whole_known = image.along(letter)
        comparable = known == whole_known and None not in (found.transform, image.transform)
        step = scale / whole if comparable else ratio
        offset = (shift - origin) / whole if comparable else 0.0
        steps.append(step)
        # Some writers state the position of a pixel's center, others of its corner, so a shift of
        # less than a pixel is ignored.
        offsets.append(offset if abs(offset) >= max(1.0, step) else 0.0)
    image_label = node.ome.get("image-label")
    return LabelLayout(
        name="",
        layout=_layout("ome-zarr", node, found, own_problems),
        step=(steps[0], steps[1]),
        offset=(offsets[0], offsets[1]),
        colors=ngff.label_colors(image_label),
        properties=ngff.label_properties(image_label),
    )
