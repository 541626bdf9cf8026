"""Check what a TIFF's directories claim, before tifffile acts on it.

tifffile allocates and computes in proportion to the numbers in a file, which may be damaged or
hostile. These checks add up the numbers at little cost and refuse a file that claims too much.
"""

from __future__ import annotations

import json
import math
import struct
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from defusedxml import DefusedXmlException, ElementTree

from napari_wsigpu.formats import markup
from napari_wsigpu.model.errors import CorruptSlideError, SlideError, UnsupportedSlideError
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.tags import Tag

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tifffile import TiffFile

# Bytes per value, by TIFF field type, of the types whose values become separate Python numbers
# (TIFF 6.0, section 2; 16 to 18 are types of BigTIFF).
NUMBERS = {3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 16: 8, 17: 8, 18: 8}
# Field types that are kept as one string of bytes: `TEXT_BYTES` of it cost about as much as one
# byte of a number.
TEXTS = {1, 2, 6, 7}
TEXT_BYTES = 16
SHORT, LONG, LONG8 = 3, 4, 16
# Struct formats of image sides and of offsets, by TIFF field type.
SIDE_FORMATS = {SHORT: "H", LONG: "I", LONG8: "Q"}
OFFSET_FORMATS = {4: "I", 13: "I", 16: "Q", 18: "Q"}
# Plain integers, because comparing enum members for every tag of every image is slow.
SIDES, SUBIMAGES = (int(Tag.IMAGE_WIDTH), int(Tag.IMAGE_LENGTH)), int(Tag.SUB_IFDS)
DESCRIPTION = int(Tag.DESCRIPTION)
MOST_TAGS = 4096
# The method that tifffile calls for files whose images differ. It compares each image with all
# others, so its time grows with the square of their number.
COMPARE_EACH = "_series_generic"
# Largest mean number of tags of such images. A large file may have more images than the limits
# allow: one per `IMAGE_BYTES` of its size.
MEAN_TAGS = 48
IMAGE_BYTES = 2560
# One read covers a SubIFD with up to this many tags; costs are checked per batch of SubIFDs.
USUAL_TAGS = 24
SUBIMAGE_BATCH = 4096
# tifffile detects a loop within this many directories itself.
LOOP_DETECTED = 100


class Directory(NamedTuple):
    """The claims of one image file directory (TIFF 6.0, section 2).

    Attributes
    ----------
    pixels : int
        Width times height; 0 if either is missing.
    subimages : int
        Number of SubIFDs.
    subimage_offsets : tuple of int
        Their offsets; empty if there are more than the limits allow.
    numbers : int
        Bytes of all numeric values of its tags, and a share of the bytes of strings.
    tags : int
        Number of tags.
    next : int
        Offset of the next directory; 0 after the last one.
    is_described : bool
        Whether its ImageDescription, if it has one, ends within the file.
    """

    pixels: int
    subimages: int
    subimage_offsets: tuple[int, ...]
    numbers: int
    tags: int
    next: int
    is_described: bool


def directories(file: TiffFile) -> Iterator[Directory]:
    """Yield the directories of a file in order, without reading the values of their tags.

    Raises
    ------
    CorruptSlideError
        If the list of directories is an endless loop, or is truncated within an entry.
    """
    try:
        offset, seen = int(file.pages.first.offset), set[int]()
    except IndexError:  # the first directory lies beyond the end of the file
        return
    while 0 < offset < int(file.filehandle.size):
        if offset in seen:
            if len(seen) >= LOOP_DETECTED:
                raise CorruptSlideError(
                    f"The list of images of '{file.filename}' is a loop; get a fresh copy of it."
                )
            return
        seen.add(offset)
        directory = _directory(file, offset)
        if directory is None:
            return
        offset = directory.next
        yield directory


def _directory(file: TiffFile, offset: int) -> Directory | None:
    """Read the directory at an offset; None if there is no plausible one.

    Raises
    ------
    CorruptSlideError
        If it is truncated within an entry.
    """
    tiff, handle = file.tiff, file.filehandle
    whole = int(handle.size)
    entry = struct.Struct(f"{tiff.byteorder}HH{'Q8s' if tiff.tagsize == 20 else 'I4s'}")
    handle.seek(offset)
    head = handle.read(tiff.tagnosize)
    count = struct.unpack(tiff.tagnoformat, head)[0] if len(head) == tiff.tagnosize else 0
    if not 0 < count <= MOST_TAGS:
        return None
    size = count * tiff.tagsize
    data = handle.read(size + tiff.offsetsize)
    if len(data) < size:
        raise CorruptSlideError(
            f"'{file.filename}' is truncated within its list of images; get a fresh copy of it."
        )
    sides, subimages, numbers, is_described = {}, 0, 0, True
    subimage_offsets: tuple[int, ...] = ()
    for code, kind, length, value in entry.iter_unpack(data[:size]):
        if code in SIDES and kind in SIDE_FORMATS:
            [sides[code]] = struct.unpack_from(tiff.byteorder + SIDE_FORMATS[kind], value)
        elif code == SUBIMAGES:
            subimages = length
            if length <= limits.subimages:
                subimage_offsets = _offsets(file, kind, length, value)
        elif code == DESCRIPTION and length > len(value):
            start = int.from_bytes(value, "little" if tiff.byteorder == "<" else "big")
            is_described = start + length <= whole
        if kind in NUMBERS:
            if (size_of_values := length * NUMBERS[kind]) <= whole:
                numbers += size_of_values  # tifffile skips values that are longer than the file
        elif kind in TEXTS and length <= whole:
            numbers += length // TEXT_BYTES
    area = sides.get(SIDES[0], 0) * sides.get(SIDES[1], 0)
    rest = data[size:]
    following = struct.unpack(tiff.offsetformat, rest)[0] if len(rest) == tiff.offsetsize else 0
    return Directory(
        area, subimages, subimage_offsets, numbers, count, following, is_described=is_described
    )


def _offsets(file: TiffFile, kind: int, length: int, value: bytes) -> tuple[int, ...]:
    """Return the offsets that a SubIFDs tag holds or points to."""
    tiff, handle = file.tiff, file.filehandle
    number = OFFSET_FORMATS.get(kind)
    if number is None:
        return ()
    numbers = struct.Struct(f"{tiff.byteorder}{length}{number}")
    if numbers.size > len(value):
        handle.seek(struct.unpack(tiff.offsetformat, value)[0])
        value = handle.read(numbers.size)
    return numbers.unpack_from(value) if len(value) >= numbers.size else ()


class _SubimageCosts:
    """Cost of reading SubIFDs, which is cached by their offset and by their list of tags.

    Most SubIFDs of a file have the same tags with different values, so one of them is measured.
    """

    def __init__(self, file: TiffFile) -> None:
        self._file = file
        self._by_offset: dict[int, tuple[int, int]] = {}
        self._by_tags: dict[tuple[int, ...], tuple[int, int]] = {}

    def total(self, offsets: Iterable[int]) -> tuple[int, int]:
        """Return the bytes of numbers and the number of tags of the SubIFDs at these offsets."""
        known, measure = self._by_offset, self._measure
        numbers = tags = 0
        for offset in sorted(offsets):  # neighbors share a block of the buffered file
            cost = known.get(offset)
            if cost is None:
                cost = known[offset] = measure(offset)
            numbers += cost[0]
            tags += cost[1]
        return numbers, tags

    def _measure(self, offset: int) -> tuple[int, int]:
        tiff, handle = self._file.tiff, self._file.filehandle
        handle.seek(offset)
        data = handle.read(tiff.tagnosize + USUAL_TAGS * tiff.tagsize)
        if len(data) < tiff.tagnosize:
            return 0, 0
        [count] = struct.unpack_from(tiff.tagnoformat, data)
        if count > USUAL_TAGS or tiff.tagnosize + count * tiff.tagsize > len(data):
            return self._measure_fully(offset)
        claimed = _types_and_lengths(tiff.byteorder, tiff.tagnosize, count).unpack_from(data)
        cost = self._by_tags.get(claimed)
        if cost is None:
            cost = self._by_tags[claimed] = self._measure_fully(offset)
        return cost

    def _measure_fully(self, offset: int) -> tuple[int, int]:
        with suppress(CorruptSlideError):  # tifffile leaves out a directory that is truncated
            directory = _directory(self._file, offset)
            if directory is not None:
                own = directory.tags * self._file.tiff.tagsize
                return max(directory.numbers, own), directory.tags
        return 0, 0


@cache
def _types_and_lengths(byteorder: str, head: int, count: int) -> struct.Struct:
    """Return a Struct of the types and lengths of `count` tags, which follow `head` bytes."""
    return struct.Struct(f"{byteorder}{head}x{('2xHI4x' if head == 2 else '2xHQ8x') * count}")


def check(file: TiffFile, path: str) -> bool:
    """Refuse a file whose directories claim more than any slide has.

    Returns
    -------
    bool
        Whether the list of directories and the descriptions of their images are complete, that is,
        end within the file.

    Raises
    ------
    UnsupportedSlideError
        If there are more images than the limits allow.
    CorruptSlideError
        If tags claim more numbers than the file can hold, or the list of directories is a loop or
        ends within an entry.
    """
    numbers = following = images = tags = 0
    are_described = True
    costs, subimage_offsets = _SubimageCosts(file), list[int]()

    def refuse_too_much() -> None:
        nonlocal numbers, tags
        # A SubIFD counts once for each image that refers to it, because tifffile reads it as often.
        read, count = costs.total(subimage_offsets)
        numbers += read
        tags += count
        subimage_offsets.clear()
        if numbers > file.filehandle.size:
            raise CorruptSlideError(
                f"The tags of '{path}' claim more numbers than it can hold; get a fresh copy of "
                "the file."
            )

    for number, directory in enumerate(directories(file), 1):
        if number > limits.images:
            raise UnsupportedSlideError(
                f"'{path}' claims more images than any slide has: {limits.advice('images')}."
            )
        if directory.subimages > limits.subimages:
            raise UnsupportedSlideError(
                f"'{path}' claims {directory.subimages} subimages of its image {number}, more than "
                f"any slide has: {limits.advice('subimages')}."
            )
        following = directory.next
        are_described &= directory.is_described
        numbers += directory.numbers
        images += 1 + len(directory.subimage_offsets)
        tags += directory.tags
        subimage_offsets += directory.subimage_offsets
        if len(subimage_offsets) > SUBIMAGE_BATCH or numbers > file.filehandle.size:
            refuse_too_much()
    refuse_too_much()
    most = max(limits.pages, int(file.filehandle.size) // IMAGE_BYTES)
    if images > most or tags > most * MEAN_TAGS:
        refusal = UnsupportedSlideError(
            f"'{path}' claims {images} images with {tags} tags, more than a file of its size has: "
            f"{limits.advice('pages')}."
        )
        # Only files whose images differ cost too much; tifffile calls this method only for them.
        setattr(file, COMPARE_EACH, partial(_refuse, refusal))
    return are_described and following < int(file.filehandle.size)


def _refuse(refusal: SlideError) -> NoReturn:
    raise refusal


def check_each(file: TiffFile) -> None:
    """Refuse to read images one by one if `check` found too many images or tags in the file.

    Raises
    ------
    UnsupportedSlideError
        If there are more than the limits allow.
    """
    refuse = vars(file).get(COMPARE_EACH)
    if refuse is not None:
        refuse()


def check_planes(name: str, count: int) -> None:
    """Refuse a stack of more planes than any slide has.

    Raises
    ------
    UnsupportedSlideError
        If there are more than the limits allow.
    """
    if count > limits.planes:
        raise UnsupportedSlideError(
            f"'{name}' claims {count} planes, more than any slide has: {limits.advice('planes')}."
        )


def distrust_shape(file: TiffFile) -> str | None:
    """Check the shape that tifffile wrote into a file's description against its pages.

    If they contradict each other, this function makes tifffile ignore the description.

    Returns
    -------
    str or None
        The problem; None if there is none.
    """
    if not file.is_shaped:
        return None
    try:
        description = file.pages.first.shaped_description or ""
        consistent = _has_shape(file, json.loads(description)["shape"])
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError):
        consistent = False
    if consistent:
        return None
    setattr(file, "is_shaped", False)  # noqa: B010 - tifffile looks it up
    return "The shape in the description (JSON) contradicts the pages; the pages are used."


def _has_shape(file: TiffFile, shape: list[int]) -> bool:
    """Whether the pages of a file, which cover the last axes of an array, add up to `shape`."""
    first = file.pages.first
    own, stated = ([side for side in sides if side != 1] for sides in (first.shape, shape))
    count, held = math.prod(stated) // math.prod(own), len(file.pages)
    if min(stated, default=0) < 1 or stated[len(stated) - len(own) :] != own:
        return False
    if count > held == 1:  # the other planes follow the first one without directories
        available = file.filehandle.size - first.dataoffsets[0]
        return bool(first.is_contiguous) and available >= count * first.nbytes
    # A file may hold several arrays; the page after the last one then starts the next array.
    return count == held or (count < held and bool(file.pages[count].aspage().is_shaped))


def check_xml(file: TiffFile, path: str) -> None:
    """Refuse an XML description that is too long or declares entities, before tifffile parses it.

    Raises
    ------
    CorruptSlideError
        If the description is too long or declares entities.
    """
    # tifffile parses the description of these formats only.
    if not (file.is_scn or file.is_philips or file.is_indica):
        return
    text = file.pages.first.description
    try:
        if not markup.is_too_long(text):
            ElementTree.fromstring(text)
            return
    except ElementTree.ParseError:
        return  # tifffile notices invalid XML itself
    except DefusedXmlException:
        pass
    raise CorruptSlideError(
        f"The XML of '{path}' is too long or declares entities, which no scanner writes; "
        "get a fresh copy of the file."
    )
