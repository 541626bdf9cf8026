"""OpenJPEG's library: it writes and reads code streams of forms that imagecodecs does not."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char, c_char_p, c_float, c_int, c_ubyte, c_uint, c_void_p
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

# Of code blocks.
BYPASS, RESET, TERMINATE_ALL, CAUSAL, PREDICTABLE, SYMBOLS = 1, 2, 4, 8, 16, 32
# Of packets.
PACKET_STARTS, HEADER_ENDS = 2, 4
PROGRESSIONS = {"LRCP": 0, "RLCP": 1, "RPCL": 2, "PCRL": 3, "CPRL": 4}


class _Parameters(ctypes.Structure):
    _fields_ = [
        ("tile_size_on", c_int),
        *((name, c_int) for name in ("cp_tx0", "cp_ty0", "cp_tdx", "cp_tdy")),
        *((name, c_int) for name in ("cp_disto_alloc", "cp_fixed_alloc", "cp_fixed_quality")),
        ("cp_matrice", c_void_p),
        ("cp_comment", c_void_p),
        ("csty", c_int),
        ("prog_order", c_int),
        ("POC", c_int * 37 * 32),
        ("numpocs", c_uint),
        ("tcp_numlayers", c_int),
        ("tcp_rates", c_float * 100),
        ("tcp_distoratio", c_float * 100),
        *((name, c_int) for name in ("numresolution", "cblockw_init", "cblockh_init", "mode")),
        *((name, c_int) for name in ("irreversible", "roi_compno", "roi_shift", "res_spec")),
        ("prcw_init", c_int * 33),
        ("prch_init", c_int * 33),
        ("infile", c_char * 4096),
        ("outfile", c_char * 4096),
        ("index_on", c_int),
        ("index", c_char * 4096),
        *((name, c_int) for name in ("image_offset_x0", "image_offset_y0")),
        *((name, c_int) for name in ("subsampling_dx", "subsampling_dy")),
        *((name, c_int) for name in ("decod_format", "cod_format")),
        ("jpwl", c_int * (2 + 5 * 16 + 4 + 2 * 16)),
        *((name, c_int) for name in ("cp_cinema", "max_comp_size", "cp_rsiz")),
        *((name, c_char) for name in ("tp_on", "tp_flag", "tcp_mct")),
        ("jpip_on", c_int),
        ("mct_data", c_void_p),
        ("max_cs_size", c_int),
        ("rsiz", ctypes.c_uint16),
    ]


class _ComponentParameters(ctypes.Structure):
    _fields_ = [
        (name, c_uint) for name in ("dx", "dy", "w", "h", "x0", "y0", "prec", "bpp", "sgnd")
    ]


class _Component(ctypes.Structure):
    _fields_ = [
        *((name, c_uint) for name in ("dx", "dy", "w", "h", "x0", "y0", "prec", "bpp", "sgnd")),
        *((name, c_uint) for name in ("resno_decoded", "factor")),
        ("data", POINTER(c_int)),
        ("alpha", ctypes.c_uint16),
    ]


class _Image(ctypes.Structure):
    _fields_ = [
        *((name, c_uint) for name in ("x0", "y0", "x1", "y1", "numcomps", "color_space")),
        ("comps", POINTER(_Component)),
        ("icc", c_void_p),
        ("icc_length", c_uint),
    ]


@cache
def _library() -> Any:
    folder = Path(imagecodecs.__file__).parent.parent / "imagecodecs.libs"
    found = sorted(folder.glob("libopenjp2*.so*"))
    if not found:
        pytest.skip("imagecodecs brings no library of OpenJPEG here")
    library = ctypes.CDLL(str(found[0]))
    for name in ("opj_create_compress", "opj_create_decompress", "opj_image_create"):
        getattr(library, name).restype = c_void_p
    library.opj_stream_create_default_file_stream.restype = c_void_p
    return library


def encode(
    planes: Sequence[NDArray[Any]],
    path: Path,
    *,
    bits: int = 8,
    signed: bool = False,
    offset: tuple[int, int] = (0, 0),
    tile: tuple[int, int] | None = None,
    spacing: Sequence[tuple[int, int]] | None = None,
    precincts: Sequence[tuple[int, int]] = (),
    rates: Sequence[float] = (0,),
    lossy: bool = False,
    transform: bool = True,
    levels: int = 5,
    block: tuple[int, int] = (64, 64),
    style: int = 0,
    packets: int = 0,
    progression: str = "LRCP",
    parts: str = "",
    region: tuple[int, int] | None = None,
    options: Sequence[str] = (),
) -> bytes:
    """Write a code stream.

    Parameters
    ----------
    planes : sequence of ndarray of int
        The components.
    path : Path
        Of a file to write to.
    offset, tile : tuple of (int, int)
        (left, upper) edge of the picture; (left, upper) edge of its one tile.
    spacing : sequence of tuple of (int, int)
        Pixels that a sample of each component spans, across and down.
    precincts, block : (int, int)
        (width, height), of the finest resolutions first.
    rates : sequence of float
        By how much each layer compresses; 0 is all.
    parts : str
        "R", "L" or "C": begin a tile part at each of these.
    region : tuple of (int, int)
        A component, and by how many bits all of it is shifted.
    """
    library = _library()
    spacing = spacing or [(1, 1)] * len(planes)
    given = (_ComponentParameters * len(planes))()
    for one, plane, (across, down) in zip(given, planes, spacing, strict=True):
        left, upper = -(-offset[0] // across), -(-offset[1] // down)
        one.dx, one.dy, one.w, one.h = across, down, plane.shape[1], plane.shape[0]
        one.x0, one.y0, one.prec, one.bpp, one.sgnd = left, upper, bits, bits, signed
    image = ctypes.cast(
        c_void_p(library.opj_image_create(len(planes), given, 1 if len(planes) > 2 else 2)),
        POINTER(_Image),
    )
    image.contents.x0, image.contents.y0 = offset
    image.contents.x1 = offset[0] + (planes[0].shape[1] - 1) * spacing[0][0] + 1
    image.contents.y1 = offset[1] + (planes[0].shape[0] - 1) * spacing[0][1] + 1
    for number, plane in enumerate(planes):
        data = image.contents.comps[number].data
        np.ctypeslib.as_array(data, plane.shape)[...] = plane
    chosen = _Parameters()
    library.opj_set_default_encoder_parameters(byref(chosen))
    assert (chosen.cblockw_init, chosen.roi_compno, chosen.numresolution) == (64, -1, 6)
    if tile is not None:
        chosen.tile_size_on = 1
        chosen.cp_tx0, chosen.cp_ty0 = tile
        chosen.cp_tdx, chosen.cp_tdy = image.contents.x1 - tile[0], image.contents.y1 - tile[1]
    chosen.tcp_numlayers, chosen.cp_disto_alloc = len(rates), 1
    chosen.tcp_rates[: len(rates)] = list(rates)
    chosen.numresolution, chosen.irreversible = levels + 1, lossy
    chosen.cblockw_init, chosen.cblockh_init = block
    chosen.mode, chosen.prog_order = style, PROGRESSIONS[progression]
    chosen.csty = packets | bool(precincts)
    chosen.res_spec = len(precincts)
    for number, (width, height) in enumerate(precincts):
        chosen.prcw_init[number], chosen.prch_init[number] = width, height
    if region:
        chosen.roi_compno, chosen.roi_shift = region
    if parts:
        chosen.tp_on, chosen.tp_flag = b"\1", parts.encode()
    chosen.tcp_mct = bytes([transform and len(planes) > 2])
    codec = c_void_p(library.opj_create_compress(0))
    assert library.opj_setup_encoder(codec, byref(chosen), image)
    if options:
        texts = (c_char_p * (len(options) + 1))(*(text.encode() for text in options), None)
        assert library.opj_encoder_set_extra_options(codec, texts)
    stream = c_void_p(library.opj_stream_create_default_file_stream(str(path).encode(), 0))
    assert library.opj_start_compress(codec, image, stream)
    assert library.opj_encode(codec, stream)
    assert library.opj_end_compress(codec, stream)
    library.opj_stream_destroy(stream)
    library.opj_destroy_codec(codec)
    library.opj_image_destroy(image)
    return path.read_bytes()


def decode(stream: bytes, path: Path, reduce: int = 0) -> list[NDArray[np.int32]] | None:
    """Read the components of a code stream, `reduce` times halved; None if that fails."""
    library = _library()
    path.write_bytes(stream)
    codec = c_void_p(library.opj_create_decompress(0))
    parameters = (c_ubyte * 16384)()
    library.opj_set_default_decoder_parameters(byref(parameters))
    library.opj_setup_decoder(codec, byref(parameters))
    source = c_void_p(library.opj_stream_create_default_file_stream(str(path).encode(), 1))
    image = POINTER(_Image)()
    found = None
    if library.opj_read_header(source, codec, byref(image)):
        library.opj_set_decoded_resolution_factor(codec, reduce)
        if library.opj_decode(codec, source, image):
            found = [
                np.ctypeslib.as_array(one.data, (one.h, one.w)).copy()
                for one in image.contents.comps[: image.contents.numcomps]
            ]
    library.opj_stream_destroy(source)
    library.opj_destroy_codec(codec)
    if image:
        library.opj_image_destroy(image)
    return found
