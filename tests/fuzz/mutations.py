"""Damage done to files by who knows how they are built.

Each function takes a file's bytes and a random generator and returns other bytes. `mutate` chooses
among those that fit: a TIFF has its tags changed, a JPEG in it its segments, an XML in it its
values.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    Mutation = Callable[[bytearray, Random], bytearray]

# TIFF's types, and their sizes in bytes.
SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
SIZES |= {16: 8, 17: 8, 18: 8}
TAGS = (254, 256, 257, 258, 259, 262, 266, 270, 273, 274, 277, 278, 279, 284, 305, 317, 320, 322)
TAGS += (323, 324, 325, 330, 338, 339, 347, 529, 530, 531, 532, 700, 34675, 50838, 65420, 65426)
MOST_PAGES = 64
MOST_BYTES = 1 << 22
SEGMENTS = (0xC0, 0xC1, 0xC2, 0xC3, 0xC4, 0xC9, 0xD8, 0xD9, 0xDA, 0xDB, 0xDD, 0xE0, 0xE1, 0xEE)
JPEG_START = re.compile(rb"\xff\xd8\xff[\xc0-\xfe]")
CODESTREAM_START = re.compile(rb"\xff\x4f\xff\x51")
JPEG_2000_MARKERS = re.compile(rb"\xff[\x4f-\x64\x90-\x93\xd9]")
TEXT_START = re.compile(rb"<\?xml|<[A-Za-z:-]{2,40}[ >]|\{\s*\"")
XML_VALUE = re.compile(rb"(?<=[=>\"])[^<>\"]{1,60}(?=[<\"])")
JSON_VALUE = re.compile(rb'(?<=[:\[,])\s*("[^"]*"|-?[0-9.]+|true|false|null)')
INI_VALUE = re.compile(rb"(?<== )[^\r\n]*|(?<==)[^\r\n;|]*")
XML_VALUES = (
    b"NaN", b"INF", b"-1", b"0", b"1e308", b"1e-308", b"99999999999999999999", b"", b"x" * 5000,
    b"&#0;", b"&amp;" * 99, b"\xff\xfe", b"2147483648", b"-2147483649", b"0x10", b"1,5", b"1 2 3",
    b"../../x", b"/dev/zero", "٣".encode(), b"\n", b"%s%n", b"true",
)  # fmt: skip
JSON_VALUES = (
    b"null", b"true", b"[]", b"{}", b'""', b"-1", b"0", b"1e308", b"1e999", b"NaN", b"Infinity",
    b"99999999999999999999", b"[" * 2000, b'{"a":' * 500, b'"../.."', b'"/dev/zero"', b'"bytes"',
    b'"gzip"', b'"lzma"', b'"pickle"', b'"<f8"', b'"|O"', b'"<M8[ns]"', b"[1,1,1]", b"[0,0]",
    b"4096", b"2147483648", b'"\\ud800"', b"0.5",
)  # fmt: skip


def number(random: Random, size: int, around: int) -> int:
    """Return a number that programs trip over; `around` is one that may be of interest here."""
    chosen = random.choice(
        (0, 1, 2, 3, 7, 8, 255, 256, 65535, 65536, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1,
         (1 << 63) - 1, (1 << 64) - 1, around, around - 1, around + 1, around * 2, around // 2,
         random.getrandbits(8), random.getrandbits(16), random.getrandbits(32))
    )  # fmt: skip
    return chosen & ((1 << 8 * size) - 1)


def mutate(data: bytes, random: Random) -> bytes:
    """Damage a file once, in a way that fits what it is."""
    fitting: list[Mutation] = [flip, overwrite, cut, repeat, renumber]
    if data[:2] in (b"II", b"MM"):
        fitting += [tiff] * 12
    if JPEG_START.search(data):
        fitting += [jpeg] * 5
    if CODESTREAM_START.search(data):
        fitting += [jpeg_2000] * 6
    if data[128:132] == b"DICM":
        fitting += [dicom] * 10
    if TEXT_START.search(data):
        fitting += [text] * 5
    if data[:1] == b"{":
        fitting += [text] * 15
    if data[:3] == b"\xef\xbb\xbf":
        fitting += [ini] * 15
    if data[:10] == b"ZISRAWFILE" or data[:4] in (b"SIS\0", b"01.0"):
        fitting += [renumber] * 12
    changed = random.choice(fitting)(bytearray(data), random)
    return bytes(changed[:MOST_BYTES])


# Of any file


def flip(data: bytearray, random: Random) -> bytearray:
    """Change some bits."""
    for _ in range(random.choice((1, 1, 3, 20)) if data else 0):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return data


def overwrite(data: bytearray, random: Random) -> bytearray:
    """Write a run of one value, or of noise."""
    at = random.randrange(len(data) + 1)
    length = random.choice((1, 2, 4, 8, 64, 1000))
    value = random.choice((b"\0", b"\xff", b"\x7f", None))
    run = random.randbytes(length) if value is None else value * length
    data[at : at + length] = run[: len(data) - at]
    return data


def cut(data: bytearray, random: Random) -> bytearray:
    """Drop the end, the beginning or a part between."""
    at, other = sorted(random.randrange(len(data) + 1) for _ in range(2))
    kept = random.choice((slice(0, at), slice(at, None), None))
    if kept is None:
        del data[at : min(other, at + 200)]
        return data
    return data[kept]


def repeat(data: bytearray, random: Random) -> bytearray:
    """Repeat a part."""
    at = random.randrange(len(data) + 1)
    part = data[at : at + random.choice((1, 16, 500))]
    data[at:at] = part * random.choice((1, 2, 50))
    return data


def renumber(data: bytearray, random: Random) -> bytearray:
    """Write a number of 1 to 8 bytes somewhere, more often near the beginning or the end."""
    size = random.choice((1, 2, 4, 4, 8))
    if len(data) <= size:
        return data
    last = len(data) - size
    near = min(last, 1000)
    at = random.choice(
        (random.randrange(last), random.randrange(near), last - random.randrange(near))
    )
    order = random.choice(("little", "big"))
    old = int.from_bytes(data[at : at + size], order)
    value = number(random, size, random.choice((old, len(data))))
    data[at : at + size] = value.to_bytes(size, order)
    return data


# TIFF


def tiff(data: bytearray, random: Random) -> bytearray:
    """Change a tag's code, type, count or value, or what follows a page."""
    order = "little" if data[:1] == b"I" else "big"
    big = int.from_bytes(data[2:4], order) == 43
    width = 8 if big else 4
    entries, links = _entries(data, order, big=big)
    if not entries or random.random() < 0.05:
        at = random.choice(links)
        value = random.choice([number(random, width, len(data)), *(entries[:1] or [0]), 8, 0])
        return _put(data, at, width, order, value)
    entry = random.choice(entries)
    what = random.choice(("code", "type", "count", "value", "value", "value", "element", "element"))
    if what == "code":
        return _put(data, entry, 2, order, random.choice((*TAGS, number(random, 2, 256))))
    if what == "type":
        return _put(data, entry + 2, 2, order, random.choice((*SIZES, 0, 14, 15, 19, 65535)))
    count = int.from_bytes(data[entry + 4 : entry + 4 + width], order)
    if what == "count":
        return _put(data, entry + 4, width, order, number(random, width, count))
    value_at = entry + 4 + width
    kind = int.from_bytes(data[entry + 2 : entry + 4], order)
    size = SIZES.get(kind, 1)
    if what == "element" and size * count > width:
        value_at = int.from_bytes(data[value_at : value_at + width], order)
        value_at += size * random.randrange(min(count, 1 << 20))
    if what == "element" or size * count <= width:
        step = min(size, 8) if kind not in (5, 10) else 4
        old = int.from_bytes(data[value_at : value_at + step], order)
        return _put(data, value_at, step, order, number(random, step, old))
    old = int.from_bytes(data[value_at : value_at + width], order)
    around = random.choice((old, len(data), entry))
    return _put(data, value_at, width, order, number(random, width, around))


def _put(data: bytearray, at: int, size: int, order: str, value: int) -> bytearray:
    if 0 <= at <= len(data) - size:
        data[at : at + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, order)  # type: ignore[arg-type]
    return data


def _entries(data: bytes, order: str, *, big: bool) -> tuple[list[int], list[int]]:
    """Return where the tags of all pages are, and where the offsets of pages are."""
    width, counted, step = (8, 8, 20) if big else (4, 2, 12)
    entries: list[int] = []
    links = [8 if big else 4]
    waiting = list(links)
    seen: set[int] = set()
    while waiting and len(seen) < MOST_PAGES:
        at = waiting.pop()
        page = int.from_bytes(data[at : at + width], order)
        if page in seen or not 0 < page < len(data):
            continue
        seen.add(page)
        count = min(int.from_bytes(data[page : page + counted], order), 200)
        for index in range(count):
            entry = page + counted + index * step
            entries.append(entry)
            if data[entry : entry + 2] == (330).to_bytes(2, order):  # type: ignore[arg-type]
                waiting.append(entry + 4 + width)
        links.append(page + counted + count * step)
        waiting.append(links[-1])
    return entries, links


# Codestreams, wherever they lie


def jpeg(data: bytearray, random: Random) -> bytearray:
    """Change a marker, a length, or a value of a segment of one JPEG."""
    start = random.choice([found.start() for found in JPEG_START.finditer(data)])
    places = []
    at = start + 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        places.append(at)
        if data[at + 1] == 0xDA:
            break
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    place = random.choice(places or [start])
    length = int.from_bytes(data[place + 2 : place + 4], "big")
    what = random.randrange(5)
    if what == 0:
        return _put(data, place + 1, 1, "big", random.choice(SEGMENTS))
    if what == 1:
        return _put(data, place + 2, 2, "big", number(random, 2, length))
    if what == 2:  # most of what counts is near the beginning of a segment
        size = random.choice((1, 2))
        at = place + 4 + random.randrange(max(1, min(length, 20)))
        return _put(data, at, size, "big", number(random, size, data[at] if at < len(data) else 0))
    if what == 3:
        at = random.randrange(place, min(len(data), place + 3000))
        return _put(data, at, 2, "big", 0xFF00 | random.choice((*range(0xD0, 0xD8), *SEGMENTS)))
    end = place + 2 + length  # another segment in its place
    source = random.choice(places or [start])
    part = data[source : source + 2 + int.from_bytes(data[source + 2 : source + 4], "big")]
    data[place:end] = part[: end - place].ljust(end - place, b"\0")
    return data


def jpeg_2000(data: bytearray, random: Random) -> bytearray:
    """Change a marker or a value of a segment of one JPEG 2000."""
    start = random.choice([found.start() for found in CODESTREAM_START.finditer(data)])
    end = min(len(data), start + 4000)
    places = [start + found.start() for found in JPEG_2000_MARKERS.finditer(data[start:end])]
    place = random.choice(places[: random.choice((2, 4, 99))])
    if random.random() < 0.15:
        return _put(data, place + 1, 1, "big", random.choice((0x4F, 0x51, 0x52, 0x5C, 0x90, 0xD9)))
    size = random.choice((1, 2, 4))
    at = place + 2 + random.randrange(45)
    old = int.from_bytes(data[at : at + size], "big")
    return _put(data, at, size, "big", number(random, size, old))


# Texts


def text(data: bytearray, random: Random) -> bytearray:
    """Change a value of XML or JSON; in a file that holds more than it, keep its length."""
    start = random.choice([found.start() for found in TEXT_START.finditer(data)] or [0])
    is_json = data[start : start + 1] == b"{"
    pattern = JSON_VALUE if is_json else XML_VALUE
    end = min(len(data), start + 20_000)
    found = [
        (start + each.start(), start + each.end()) for each in pattern.finditer(data[start:end])
    ]
    if not found:
        return flip(data, random)
    begin, end = random.choice(found)
    value = random.choice(JSON_VALUES if is_json else XML_VALUES)
    if random.random() < 0.3:  # one of its own values elsewhere
        other = random.choice(found)
        value = bytes(data[slice(*other)])
    whole = data[:1] in (b"{", b"<")
    data[begin:end] = value if whole else value[: end - begin].ljust(end - begin, b" ")
    return data


def ini(data: bytearray, random: Random) -> bytearray:
    """Change a value of an .ini file, or drop or repeat a line."""
    if random.random() < 0.3:
        lines = data.split(b"\n")
        at = random.randrange(len(lines))
        lines[at : at + 1] = random.choice(([], [lines[at]] * 2))
        return bytearray(b"\n".join(lines))
    found = [each.span() for each in INI_VALUE.finditer(data)]
    begin, end = random.choice(found or [(0, 0)])
    other = slice(*random.choice(found or [(0, 0)]))
    data[begin:end] = random.choice((*XML_VALUES, bytes(data[other])))
    return data


# DICOM


def dicom(data: bytearray, random: Random) -> bytearray:
    """Change an element's group, kind, length or value; also of those within sequences."""
    places = _elements(data)
    at = random.choice(places or [132])
    what = random.randrange(5)
    if what == 0:
        return _put(data, at + random.choice((0, 2)), 2, "little", number(random, 2, 0x28))
    if what == 1:
        kinds = (b"OB", b"OW", b"SQ", b"UN", b"US", b"UL", b"DS", b"IS", b"LO", b"UI", b"FD", b"AT")
        data[at + 4 : at + 6] = random.choice(kinds)
        return data
    if what == 2:
        return _put(
            data, at + 6, 2, "little", number(random, 2, data[at + 6] if at + 6 < len(data) else 0)
        )
    if what == 3:
        return _put(data, at + 8, 4, "little", number(random, 4, len(data)))
    value = random.choice(
        (b"-1", b"0", b"1e308", b"NaN", b"99999999999", b"\xff\xff", b"\0\0", b"1\\2")
    )
    data[at + 8 : at + 8 + len(value)] = value
    return data


def _elements(data: bytes) -> Sequence[int]:
    """Return where elements with an explicit kind seem to begin."""
    kinds = rb"(?=(..){2}(AE|AS|AT|CS|DA|DS|DT|FD|FL|IS|LO|LT|OB|OW|PN|SH|SQ|ST|TM|UI|UL|UN|US|UT))"
    pattern = rb"(?s)" + kinds + rb"[\x02\x08\x10\x11\x18\x20\x22\x28\x40\x48\x00][\x00\x52]"
    found = [each.start() for each in re.finditer(pattern, data[: 1 << 16])]
    tail = struct.pack("<HH", 0x7FE0, 0x0010)
    at = data.find(tail)
    return found if at < 0 else [*found, at, at + 12]
