"""What exceptions of parsers and codecs say about a file."""

import struct

import imagecodecs
import numpy as np
import pytest

from napari_wsigpu.model.reasons import codec_reason, parser_reason


def raised(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda: 1 // 0, "a size is 0"),
        (lambda: 1.0 / 0, "a size is 0"),
        (lambda: ()[0], "a value is missing"),
        (lambda: {}["key"], "a value is missing"),
        (lambda: struct.unpack("I", b""), "a tag ends too early"),
        (lambda: len(5), "a value has an unexpected type"),
        (lambda: None.name, "a value has an unexpected type"),
        (lambda: bool(np.zeros(2)), "a value has an unexpected type"),
        (lambda: int("b"), "a value has an unexpected type"),
        (lambda: float("b"), "a value has an unexpected type"),
        (lambda: np.array([[1], [1, 2]]), "a value has an unexpected type"),
        (lambda: np.int8(300), "a number is too large"),
    ],
)
def test_built_in_exceptions_are_explained(function, reason):
    assert parser_reason(raised(function)) == reason


def test_own_words_of_parsers_are_kept():
    assert parser_reason(ValueError("corrupted tag list.\nmore")) == "corrupted tag list"
    assert parser_reason(ValueError()) == "its structure is invalid"


def test_a_missing_attribute_of_dicom_is_named():
    pydicom = pytest.importorskip("pydicom")
    assert parser_reason(raised(lambda: pydicom.Dataset().Rows)) == "Rows is missing"


SMALL = np.zeros((8, 8, 3), np.uint8)
LARGE = np.zeros((16, 24, 3), np.uint8)


NOISE = np.random.default_rng(0).integers(0, 255, SMALL.shape, np.uint8)
TOO_MANY, DAMAGED = "it decodes to too many bytes", "its data is damaged"


@pytest.mark.parametrize(
    ("codec", "data", "reason"),
    [
        ("zlib", lambda: imagecodecs.zlib_encode(LARGE), TOO_MANY),
        ("deflate", lambda: imagecodecs.deflate_encode(LARGE), TOO_MANY),
        ("zstd", lambda: imagecodecs.zstd_encode(LARGE), TOO_MANY),
        ("packbits", lambda: imagecodecs.packbits_encode(LARGE), TOO_MANY),
        ("zlib", lambda: b"\x78\x9c" + bytes(9), DAMAGED),
        ("zstd", lambda: bytes(9), f"{DAMAGED}: Unknown frame descriptor"),
        ("lzma", lambda: bytes(99), DAMAGED),
        ("lz4", lambda: imagecodecs.lz4_encode(LARGE), DAMAGED),
    ],
)
def test_errors_of_byte_codecs_are_explained(codec, data, reason):
    decode = getattr(imagecodecs, f"{codec}_decode")
    assert codec_reason(raised(lambda: decode(data(), out=SMALL.nbytes))) == reason


@pytest.mark.parametrize(
    ("codec", "data", "reason"),
    [
        ("jpeg8", lambda: imagecodecs.jpeg8_encode(LARGE), "its image has the shape (16, 24, 3)"),
        ("webp", lambda: imagecodecs.webp_encode(LARGE), "its image has the shape (16, 24, 3)"),
        ("jpegxl", lambda: imagecodecs.jpegxl_encode(NOISE)[:60], DAMAGED),
        ("png", lambda: imagecodecs.png_encode(SMALL)[:40], "its data is truncated"),
    ],
)
def test_errors_of_image_codecs_are_explained(codec, data, reason):
    decode = getattr(imagecodecs, f"{codec}_decode")
    assert codec_reason(raised(lambda: decode(data(), out=SMALL.copy()))) == reason


def test_own_words_of_codecs_are_kept():
    assert codec_reason(ValueError("it is not a JPEG")) == "it is not a JPEG"
    assert codec_reason(ValueError()) == "its data is damaged"
