"""What a TIFF's directories claim, added up before tifffile believes it."""

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

# Bytes of a value of the types that become Python numbers, one by one.
NUMBERS = {3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 16: 8, 17: 8, 18: 8}
# Texts and other bytes, which are taken as they are: so many cost as much as a number's one.
TEXTS = {1, 2, 6, 7}
TEXT_BYTES = 16
SHORT, LONG, LONG8 = 3, 4, 16
SIZES = {SHORT: "H", LONG: "I", LONG8: "Q"}
OFFSETS = {4: "I", 13: "I", 16: "Q", 18: "Q"}
# As numbers, for each tag of each image is looked at.
SIDES, SUBIMAGES = (int(Tag.IMAGE_WIDTH), int(Tag.IMAGE_LENGTH)), int(Tag.SUB_IFDS)
MOST_TAGS = 4096
# What tifffile calls of files whose images are unlike each other: it looks at each, which takes a
# time that grows with their number squared.
LOOKS_AT_EACH = "_series_generic"
# How many tags such images have on average at most, and for how many bytes of a large file one more
# image is let pass than the limits say.
MEAN_TAGS = 48
IMAGE_BYTES = 2560
# Images below others are read with room for so many tags, and so many of them at once.
USUAL_TAGS = 24
AT_ONCE = 4096
# tifffile looks for a loop among so many directories.
LOOKED_AT = 100


class Directory(NamedTuple):
    """What an image says of itself.

    Attributes
    ----------
    pixels : int
        Its area; 0 where it doesn't say.
    subimages : int
        How many images it says to have below it.
    below : tuple of int
        Where these are, unless they are more than the limits say.
    numbers : int
        Bytes of the numbers that its tags say to have in the file, and a share of those of texts.
    tags : int
        How many tags it has.
    next : int
        Where the next one is; 0 if it is the last.
    """

    pixels: int
    subimages: int
    below: tuple[int, ...]
    numbers: int
    tags: int
    next: int


def directories(file: TiffFile) -> Iterator[Directory]:
    """Yield what the images of a file say, in their order; no tag's value is read for it.

    Raises
    ------
    CorruptSlideError
        If their list is a loop that nobody would leave, or is cut off within an entry.
    """
    try:
        offset, seen = int(file.pages.first.offset), set[int]()
    except IndexError:  # the first one lies beyond the end of the file
        return
    while 0 < offset < int(file.filehandle.size):
        if offset in seen:
            if len(seen) >= LOOKED_AT:
                raise CorruptSlideError(
                    f"The list of images of '{file.filename}' leads back to where it was; "
                    "get a fresh copy of the file."
                )
            return
        seen.add(offset)
        directory = _directory(file, offset)
        if directory is None:
            return
        offset = directory.next
        yield directory


def _directory(file: TiffFile, offset: int) -> Directory | None:
    """Return what one says, None if there is none.

    Raises
    ------
    CorruptSlideError
        If it is cut off within an entry.
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
            f"'{file.filename}' is cut off within its list of images; get a fresh copy of it."
        )
    sides, subimages, numbers = {}, 0, 0
    below: tuple[int, ...] = ()
    for code, kind, length, value in entry.iter_unpack(data[:size]):
        if code in SIDES and kind in SIZES:
            [sides[code]] = struct.unpack_from(tiff.byteorder + SIZES[kind], value)
        elif code == SUBIMAGES:
            subimages = length
            if length <= limits.subimages:
                below = _offsets(file, kind, length, value)
        if kind in NUMBERS:
            if (taken := length * NUMBERS[kind]) <= whole:
                numbers += taken  # of more, tifffile leaves it out
        elif kind in TEXTS and length <= whole:
            numbers += length // TEXT_BYTES
    area = sides.get(SIDES[0], 0) * sides.get(SIDES[1], 0)
    rest = data[size:]
    following = struct.unpack(tiff.offsetformat, rest)[0] if len(rest) == tiff.offsetsize else 0
    return Directory(area, subimages, below, numbers, count, following)


def _offsets(file: TiffFile, kind: int, length: int, value: bytes) -> tuple[int, ...]:
    """Return the offsets that a tag holds, or points to."""
    tiff, handle = file.tiff, file.filehandle
    number = OFFSETS.get(kind)
    if number is None:
        return ()
    numbers = struct.Struct(f"{tiff.byteorder}{length}{number}")
    if numbers.size > len(value):
        handle.seek(struct.unpack(tiff.offsetformat, value)[0])
        value = handle.read(numbers.size)
    return numbers.unpack_from(value) if len(value) >= numbers.size else ()


class _Below:
    """What it costs to read images below others; most are as one before, but for their values."""

    def __init__(self, file: TiffFile) -> None:
        self._file = file
        self._at: dict[int, tuple[int, int]] = {}
        self._alike: dict[tuple[int, ...], tuple[int, int]] = {}

    def cost(self, offsets: Iterable[int]) -> tuple[int, int]:
        """Return how many bytes the images at these offsets have to be read, and how many tags."""
        known, look = self._at, self._look
        numbers = tags = 0
        for offset in sorted(offsets):  # neighbours lie in one block of the file
            found = known.get(offset)
            if found is None:
                found = known[offset] = look(offset)
            numbers += found[0]
            tags += found[1]
        return numbers, tags

    def _look(self, offset: int) -> tuple[int, int]:
        tiff, handle = self._file.tiff, self._file.filehandle
        handle.seek(offset)
        data = handle.read(tiff.tagnosize + USUAL_TAGS * tiff.tagsize)
        if len(data) < tiff.tagnosize:
            return 0, 0
        [count] = struct.unpack_from(tiff.tagnoformat, data)
        if count > USUAL_TAGS or tiff.tagnosize + count * tiff.tagsize > len(data):
            return self._look_closely(offset)
        claimed = _kinds_and_lengths(tiff.byteorder, tiff.tagnosize, count).unpack_from(data)
        found = self._alike.get(claimed)
        if found is None:
            found = self._alike[claimed] = self._look_closely(offset)
        return found

    def _look_closely(self, offset: int) -> tuple[int, int]:
        with suppress(CorruptSlideError):  # it is cut off, and will be left out
            directory = _directory(self._file, offset)
            if directory is not None:
                own = directory.tags * self._file.tiff.tagsize
                return max(directory.numbers, own), directory.tags
        return 0, 0


@cache
def _kinds_and_lengths(byteorder: str, head: int, count: int) -> struct.Struct:
    """Return what unpacks kind and length of so many tags, behind their number of `head` bytes."""
    return struct.Struct(f"{byteorder}{head}x{('2xHI4x' if head == 2 else '2xHQ8x') * count}")


def check(file: TiffFile, path: str) -> bool:
    """Refuse a file whose directories claim more than any slide's do.

    Returns
    -------
    bool
        Whether their list is whole: it does not lead beyond the end of the file.

    Raises
    ------
    UnsupportedSlideError
        If there are more images than the limits say.
    CorruptSlideError
        If tags claim more numbers than the file can hold, or the images' list is a loop or ends
        within an entry.
    """
    numbers = following = images = tags = 0
    below, named = _Below(file), list[int]()

    def refuse_too_much() -> None:
        nonlocal numbers, tags
        # Again for each image that names it: it is read as often.
        read, count = below.cost(named)
        numbers += read
        tags += count
        named.clear()
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
                f"'{path}' claims {directory.subimages} images below its image {number}, more than "
                f"any slide has: {limits.advice('subimages')}."
            )
        following = directory.next
        numbers += directory.numbers
        images += 1 + len(directory.below)
        tags += directory.tags
        named += directory.below
        if len(named) > AT_ONCE or numbers > file.filehandle.size:
            refuse_too_much()
    refuse_too_much()
    most = max(limits.pages, int(file.filehandle.size) // IMAGE_BYTES)
    if images > most or tags > most * MEAN_TAGS:
        refusal = UnsupportedSlideError(
            f"'{path}' claims {images} images with {tags} tags, more than a file of its size has: "
            f"{limits.advice('pages')}."
        )
        setattr(file, LOOKS_AT_EACH, partial(_refuse, refusal))
    return following < int(file.filehandle.size)


def _refuse(refusal: SlideError) -> NoReturn:
    raise refusal


def check_each(file: TiffFile) -> None:
    """Refuse to look at each image of a file that was checked, if they or their tags are too many.

    Raises
    ------
    UnsupportedSlideError
        If there are more than the limits say.
    """
    refuse = vars(file).get(LOOKS_AT_EACH)
    if refuse is not None:
        refuse()


def check_planes(name: str, count: int) -> None:
    """Refuse a stack of more planes than any slide's.

    Raises
    ------
    UnsupportedSlideError
        If there are more than the limits say.
    """
    if count > limits.planes:
        raise UnsupportedSlideError(
            f"'{name}' claims {count} planes, more than any slide has: {limits.advice('planes')}."
        )


def distrust_shape(file: TiffFile) -> str | None:
    """Say that a description by tifffile contradicts the pages, which then are all that counts."""
    if not file.is_shaped:
        return None
    try:
        said = file.pages.first.shaped_description or ""
        sound = _is_shaped(file, json.loads(said)["shape"])
    except (KeyError, TypeError, ValueError, IndexError):
        sound = False
    if sound:
        return None
    setattr(file, "is_shaped", False)  # noqa: B010 - tifffile looks it up
    return "Its description of the shape (JSON) contradicts its pages, which count."


def _is_shaped(file: TiffFile, shape: list[int]) -> bool:
    """Whether a file has as many pages as an array of that shape needs, each of its last axes."""
    first = file.pages.first
    own, stated = ([side for side in sides if side != 1] for sides in (first.shape, shape))
    count, held = math.prod(stated) // math.prod(own), len(file.pages)
    if min(stated, default=0) < 1 or stated[len(stated) - len(own) :] != own:
        return False
    if count > held == 1:  # the others lie behind the first one, without pages of their own
        behind = file.filehandle.size - first.dataoffsets[0]
        return bool(first.is_contiguous) and behind >= count * first.nbytes
    # The page behind the last one is the first of another array.
    return count == held or (count < held and bool(file.pages[count].aspage().is_shaped))


def check_xml(file: TiffFile, path: str) -> None:
    """Refuse a description that attacks who parses it as XML, before tifffile does.

    Raises
    ------
    CorruptSlideError
        If it declares entities.
    """
    # Of these, tifffile parses it.
    if not (file.is_scn or file.is_philips or file.is_indica):
        return
    text = file.pages.first.description
    try:
        if not markup.is_too_long(text):
            ElementTree.fromstring(text)
            return
    except ElementTree.ParseError:
        return  # which tifffile says, too
    except DefusedXmlException:
        pass
    raise CorruptSlideError(
        f"The XML of '{path}' is too long or declares entities, which no scanner does; "
        "get a fresh copy of the file."
    )
