"""Our JPEG 2000 kernels, compiled for the host and on a GPU, against OpenJPEG."""

import random
import shutil
import struct

import imagecodecs
import numpy as np
import pytest

from benchmarks import jpeg2000 as benchmark
from benchmarks.synthetic import make_slide
from napari_wsigpu.codecs.decoder import EncodedTile
from napari_wsigpu.codecs.tile import decode_tile
from napari_wsigpu.gpu.device.interfaces import TileFormat
from napari_wsigpu.gpu.jpeg2000 import form_decoder
from napari_wsigpu.gpu.jpeg2000.form_decoder import FormDecoder, form_of
from napari_wsigpu.gpu.jpeg2000.jpeg2000_engine import Jpeg2000Engine, form_of_stream
from napari_wsigpu.gpu.jpeg2000.jpeg2000_header import read_header
from napari_wsigpu.model.errors import DeviceError
from napari_wsigpu.model.tags import COMPRESSION, HTJ2K
from napari_wsigpu.reading.offload import ENGINES
from napari_wsigpu.slide import runtime
from tests.fakes import host_cuda
from tests.fakes.host_cuda import host_cuda_device
from tests.fakes.host_device import HostDevice, HostMachine, OnDevice, at, joined, level_of
from tests.writers import openjpeg
from tests.writers.openjpeg import (
    BYPASS,
    CAUSAL,
    HEADER_ENDS,
    PACKET_STARTS,
    PREDICTABLE,
    PROGRESSIONS,
    RESET,
    SYMBOLS,
    TERMINATE_ALL,
)

UNTOUCHED, GUARD = 201, 64


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A CUDA device whose kernels run on the host."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    with pytest.MonkeyPatch.context() as patch:
        return host_cuda_device(patch, tmp_path_factory.mktemp("jpeg2000"), compiler)


@pytest.fixture(scope="module", params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "host":
        return request.getfixturevalue("host")
    try:
        return runtime.default().devices.worker(0).device
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "stream.j2k"


def picture(seed, shape, bits=8, *, signed=False):
    """A plane of waves and noise."""
    rng = np.random.default_rng(seed)
    y, x = np.indices(shape)
    waves = np.sin(x / (3 + 9 * rng.random())) * np.cos(y / (3 + 9 * rng.random()))
    plane = 0.5 + 0.4 * waves + rng.normal(0, 0.03, shape)
    plane[: shape[0] // 3] = rng.random()
    whole = (plane * (1 << bits)).clip(0, (1 << bits) - 1).astype(np.int32)
    return whole - (1 << bits - 1) if signed else whole


def decoded(device, streams, kind=FormDecoder, least=0):
    """Return the status of each stream, and the pixels.

    With `least` code blocks in a tile, their packets are read while others are decoded.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(form_decoder, "LONG_TO_READ", least)
        return decoded_in_order(device, streams, kind)


def decoded_in_order(device, streams, kind):
    form = form_of(read_header(streams[0]))
    assert not isinstance(form, str), form
    decoder = kind(device, form)
    stream = device.new_stream()
    lengths = np.array([len(text) for text in streams])
    starts = np.cumsum([0, *lengths])[:-1]
    size = int(np.prod(form.shape)) * form.dtype.itemsize
    texts = np.frombuffer(b"".join(streams), np.uint8)
    encoded, held = device.allocate(len(texts))
    memory, also = device.allocate(decoder.layout(len(streams))["size"])
    pixels = device.empty((len(streams), size + GUARD), np.uint8)
    with device.active():
        device.fill(pixels, UNTOUCHED, stream)
        device.upload(encoded, texts, stream)
        targets = device.address(pixels) + np.arange(len(streams)) * (size + GUARD)
        status = device.pinned_array(len(streams), np.int32)
        status[:] = 99
        pixel = form.pixel_bytes
        decoder.decode(encoded, starts, lengths, targets, pixel, memory, status, stream)
        found = device.download(pixels, stream)
        stream.synchronize()
    del held, also
    assert (found[:, size:] == UNTOUCHED).all()
    assert (found[status != 0] == UNTOUCHED).all()
    tiles = found[:, :size].copy().view(form.dtype).reshape(-1, *form.shape)
    return status.copy(), tiles


FORMS = {
    "5/3": {},
    "9/7": {"lossy": True, "rates": (12,)},
    "no levels": {"levels": 0},
    "as many levels as there can be": {"levels": 6},
    "one column": {"size": (70, 1), "levels": 0},
    "one row, 9/7": {"size": (1, 70), "levels": 0, "lossy": True},
    "few rows": {"size": (5, 99), "levels": 2},
    "layers": {"rates": (60, 30, 10, 0)},
    "layers, 9/7, cut in any pass": {"rates": (90, 33, 21, 17), "lossy": True},
    **{f"{order} with precincts": {"progression": order} for order in PROGRESSIONS},
    "small precincts": {"precincts": [(16, 32), (32, 16)], "progression": "PCRL", "packets": 6},
    "wide code blocks": {"block": (1024, 4), "size": (20, 700), "levels": 3},
    "tall code blocks": {"block": (4, 1024), "size": (700, 20), "levels": 3},
    "smallest code blocks": {"block": (4, 4)},
    "SOP": {"packets": PACKET_STARTS},
    "EPH": {"packets": HEADER_ENDS},
    "bypass": {"style": BYPASS},
    "bypass, 9/7, layers": {"style": BYPASS, "lossy": True, "rates": (20, 4)},
    "reset": {"style": RESET},
    "termall": {"style": TERMINATE_ALL},
    "bypass, termall": {"style": BYPASS | TERMINATE_ALL},
    "vertically causal": {"style": CAUSAL},
    "predictable": {"style": PREDICTABLE},
    "segmentation symbols": {"style": SYMBOLS},
    "all but bypass": {"style": 62, "rates": (20, 5)},
    "region of interest": {"region": (1, 7)},
    "region of interest, 9/7": {"region": (0, 9), "lossy": True, "components": 1},
    "tile parts": {"parts": "R", "rates": (20, 0)},
    "PLT and TLM": {"options": ["PLT=YES", "TLM=YES"]},
    "offsets": {"offset": (37, 21), "tile": (5, 20)},
    "offsets, 9/7, precincts": {
        "offset": (1, 3),
        "precincts": [(32, 32)],
        "lossy": True,
        "progression": "RPCL",
    },
    "one component": {"components": 1},
    "two components": {"components": 2},
    "four components": {"components": 4, "lossy": True},
    "no transform": {"transform": False},
    "1 bit": {"bits": 1},
    "12 bits": {"bits": 12},
    "16 bits": {"bits": 16},
    "16 bits, 9/7": {"bits": 16, "lossy": True, "components": 1},
    "signed": {"signed": True},
    "signed 16 bits": {"bits": 16, "signed": True},
}
WITH_PRECINCTS = {"precincts": [(64, 64), (32, 64)], "rates": (20, 0)}


def stream_of(seed, path, size=(73, 91), components=3, **form):
    bits, signed = form.get("bits", 8), form.get("signed", False)
    if "progression" in form:
        form = WITH_PRECINCTS | form
    planes = [picture(seed + number, size, bits, signed=signed) for number in range(components)]
    return openjpeg.encode(planes, path, **form)


@pytest.mark.parametrize("form", FORMS)
def test_pixels_match_openjpeg(device, form, path):
    streams = [stream_of(seed, path, **FORMS[form]) for seed in (1, 11)]
    status, tiles = decoded(device, streams)
    other_status, others = decoded(device, streams, least=form_decoder.LONG_TO_READ)
    assert not status.any()
    assert not other_status.any()
    np.testing.assert_array_equal(tiles, others)
    for stream, pixels in zip(streams, tiles, strict=True):
        expected = np.stack(openjpeg.decode(stream, path), -1)
        # A GPU and a host may round a sum of floats differently.
        allowed = int(FORMS[form].get("lossy", False) and device.name != "host")
        assert np.abs(pixels.astype(int) - expected).max() <= allowed


def test_16_bits_with_an_irreversible_transform_are_within_one(device, path):
    stream = stream_of(1, path, bits=16, lossy=True)
    _, (pixels,) = decoded(device, [stream])
    expected = np.stack(openjpeg.decode(stream, path), -1)
    difference = np.abs(pixels.astype(int) - expected)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-3


@pytest.mark.parametrize("size", [(64, 80), (61, 77)])
@pytest.mark.parametrize("spacing", [(2, 1), (2, 2)])
def test_subsampled_chroma_matches_the_cpu(device, spacing, size, path):
    small = tuple(-(-length // by) for length, by in zip(size, spacing[::-1], strict=True))
    planes = [picture(1, size), picture(2, small), picture(3, small)]
    spans = [(1, 1), spacing, spacing]
    stream = openjpeg.encode(planes, path, spacing=spans, transform=False)
    _, (pixels,) = decoded(device, [stream])
    np.testing.assert_array_equal(pixels, imagecodecs.jpeg2k_decode(stream))


def with_tile_header(stream, component):
    """Add COC to the tile-part header, with the coding style that all components have."""
    parts = {marker: stream.index(marker) for marker in (b"\xff\x52", b"\xff\x5c", b"\xff\x90")}
    coding, quanta, tile = parts.values()
    coding, quanta = stream[coding:quanta], stream[quanta : stream.index(b"\xff\x64")]
    own = b"\xff\x53" + struct.pack(">HBB", len(coding) - 5, component, 0) + coding[9:]
    own += b"\xff\x5d" + struct.pack(">HB", len(quanta) - 1, component) + quanta[4:]
    length = int.from_bytes(stream[tile + 6 : tile + 10], "big") + len(own)
    head = stream[: tile + 6] + struct.pack(">I", length) + stream[tile + 10 : tile + 12]
    return head + own + stream[tile + 12 :]


def test_a_header_of_the_tile_part_is_part_of_the_form(device, path):
    plain = stream_of(1, path)
    streams = [with_tile_header(stream_of(seed, path), 1) for seed in (1, 2)]
    expected = [np.stack(openjpeg.decode(stream, path), -1) for stream in streams]
    status, tiles = decoded(device, [*streams, plain, with_tile_header(plain, 2)])
    assert status.tolist() == [0, 0, 1, 1]
    np.testing.assert_array_equal(tiles[:2], expected)


def test_a_thousand_code_blocks_in_one_batch(device, path):
    streams = [stream_of(seed, path, block=(8, 8), rates=(seed + 1,)) for seed in range(9)]
    status, tiles = decoded(device, streams)
    assert not status.any()
    for stream, pixels in zip(streams, tiles, strict=True):
        np.testing.assert_array_equal(pixels, np.stack(openjpeg.decode(stream, path), -1))


def test_threads_of_a_block_wait_for_each_other(host, monkeypatch, path):
    streams = [stream_of(seed, path, rates=(20, 4), lossy=True) for seed in (1, 2)]
    _, alone = decoded(host, streams)
    for count in (3, 32, 64):
        monkeypatch.setattr(host_cuda, "TOGETHER", count)
        status, tiles = decoded(host, streams)
        assert not status.any()
        np.testing.assert_array_equal(tiles, alone)


def test_threads_of_a_high_throughput_block_wait_for_each_other(host, monkeypatch):
    streams = [fast_stream(seed, (60, 133), 1, level=0.01) for seed in (1, 2)]
    _, alone = decoded(host, streams)
    for count in (3, 32):
        monkeypatch.setattr(host_cuda, "TOGETHER", count)
        status, tiles = decoded(host, streams)
        assert not status.any()
        np.testing.assert_array_equal(tiles, alone)


def test_they_can_be_timed(host, monkeypatch, tmp_path):
    machine = HostMachine()
    machine.device.compile_kernels = host.compile
    monkeypatch.setattr(runtime.default(), "devices", machine.devices())
    monkeypatch.setattr(benchmark, "ROUNDS", 1)
    make_slide(tmp_path / "slide.svs", 128, 128, 64, "jpeg2000")
    rows = benchmark.batches(tmp_path / "slide.svs", 6)
    decoders = ["ours", "nvJPEG2000", "imagecodecs", "nvImageCodec, CPU"]
    assert [row["decoder"] for row in rows] == decoders
    assert all(row["tiles"] == 6 and row["median_ms"] > 0 for row in rows)
    assert rows[0]["largest_difference"] == 0
    monkeypatch.setattr(benchmark, "PATCH", 64)
    found = benchmark.whole(tmp_path / "slide.svs")
    assert found["samples_that_differ"] == 0
    assert min(found["view_2048_to_host_ms"], found["patches_a_second"]) > 0


def test_active_engine(on, path):
    assert not on.worker.has_tried("jpeg2000")
    on.schedule(tiles_of([stream_of(1, path, size=(48, 64))])).wait()
    assert on.worker.has_tried("jpeg2000")
    assert ("jpeg2000", on.worker.active_engine("jpeg2000")) in ENGINES


@pytest.mark.parametrize(("lossy", "agrees"), [(False, False), (True, True)])
def test_lossless_slide_has_no_tolerance(on, lossy, agrees, path, monkeypatch):
    """If the kernels round differently, lossless slides are left to the CPU."""
    decode = Jpeg2000Engine.decode

    def rounded(self, form, encoded, starts, lengths, targets, *rest):
        decode(self, form, encoded, starts, lengths, targets, *rest)
        for target in targets.tolist():
            at(target, (1,), "uint8")[0] ^= 1

    monkeypatch.setattr(Jpeg2000Engine, "decode", rounded)
    on.schedule(tiles_of([stream_of(1, path, size=(48, 64), lossy=lossy, rates=(9,))])).wait()
    assert (on.verifier.reason is None) == agrees


# Forms that are refused


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"components": 5}, "5 components"),
        ({"bits": 17}, "more than 16 bits"),
        ({"region": (0, 5), "style": BYPASS}, "disagree"),
        ({"spacing": [(1, 1), (1, 1), (2, 2)], "small": True}, "different sizes"),
    ],
)
def test_forms_that_are_refused(form, reason, path):
    form = dict(form)
    if form.pop("small", False):
        planes = [picture(1, (40, 40)), picture(2, (40, 40)), picture(3, (20, 20))]
        stream = openjpeg.encode(planes, path, transform=False, **form)
    else:
        stream = stream_of(1, path, **form)
    assert reason in form_of_stream(memoryview(stream))


def test_several_tiles_are_refused(path):
    text = bytearray(stream_of(1, path))
    text[24:32] = struct.pack(">2I", 32, 32)
    assert "several tiles" in form_of_stream(memoryview(bytes(text)))


@pytest.mark.parametrize(
    ("marker", "reason"),
    [
        (0xFF50, "extensions"),
        (0xFF5F, "changes of progression"),
        (0xFF60, "packed packet headers"),
        (0xFF61, "packed packet headers"),
    ],
)
def test_extensions_are_refused_by_name(marker, reason, path):
    text = stream_of(1, path)
    tile = text.index(b"\xff\x90")
    segment = struct.pack(">HHH", marker, 4, 0)
    assert reason in form_of_stream(memoryview(text[:tile] + segment + text[tile:]))


@pytest.mark.parametrize("layers", [0x7FFF, 0xFFFF])
def test_more_layers_than_are_counted_are_refused(layers, path):
    text = bytearray(stream_of(1, path))
    struct.pack_into(">H", text, text.index(b"\xff\x52") + 6, layers)
    assert "more than 32766 layers" in form_of_stream(memoryview(bytes(text)))


@pytest.mark.parametrize(
    ("marker", "place", "value", "reason"),
    [
        (b"\xff\x51", 39, 4, "damaged"),
        (b"\xff\x51", 43, 6, "different depths"),
        (b"\xff\x51", 43, 0x87, "different depths"),
        (b"\xff\x52", 4, 8, "unsupported way"),
        (b"\xff\x52", 8, 2, "unsupported way"),
        (b"\xff\x52", 13, 2, "unsupported way"),
    ],
)
def test_headers_that_the_cpu_refuses_are_refused(marker, place, value, reason, path):
    """Missing components, different depths or signs; unknown packets, colors or wavelet."""
    text = bytearray(stream_of(1, path))
    text[text.index(marker) + place] = value
    with pytest.raises((imagecodecs.Jpeg2kError, NotImplementedError)):
        imagecodecs.jpeg2k_decode(bytes(text))
    assert reason in form_of_stream(memoryview(bytes(text)))


def test_any_main_header_is_a_form_or_refused(path):
    """No bytes raise an error or take long."""
    stream, chance = stream_of(1, path, style=TERMINATE_ALL, components=1), random.Random(1)
    main, head = stream.index(b"\xff\x90"), stream[: stream.index(b"\xff\x93") + 4]
    accepted = 0
    for _ in range(3000):
        changed = bytearray(head)
        for _ in range(chance.choice((1, 1, 2, 5))):
            changed[chance.randrange(2, main)] = chance.choice((0, 1, 255, chance.randrange(256)))
        found = form_of_stream(memoryview(bytes(changed)))
        if not isinstance(found, str):
            accepted += 1
            assert found.geometry.coefficients <= 1 << 28
            assert len(found.geometry.packets) > 1000 or listed_once(found)
    assert accepted > 100


def listed_once(form):
    """Return whether the last packets list each code block once: threads wait for each."""
    geometry = form.geometry
    counts = np.zeros(len(geometry.blocks), int)
    for first, count, layer in geometry.packets.tolist():
        for band in geometry.bands[first : first + count]:
            end = band["first"] + band["wide"] * band["high"]
            counts[band["first"] : end] += layer == form.header.layers - 1
    return (counts == 1).all()


# Damaged streams


def damaged(stream, chance):
    """Change, remove or add bytes of a code stream after its main header."""
    text = bytearray(stream)
    body = text.index(b"\xff\x93")
    at = chance.randrange(body, len(text))
    match chance.randrange(5):
        case 0:
            del text[at:]
        case 1:
            text[at] ^= 1 << chance.randrange(8)
        case 2:
            text[at:] = chance.randbytes(len(text) - at)
        case 3:
            text[at:at] = bytes(chance.choices((0, 255), k=chance.randrange(1, 9)))
        case 4:
            other = chance.randrange(2, len(text))
            text[at : at + 20] = text[other : other + 20]
    return bytes(text)


@pytest.mark.parametrize(
    "form", ["5/3", "layers, 9/7, cut in any pass", "termall", "bypass", "small precincts"]
)
def test_damaged_tiles_do_not_change_others(device, form, path):
    chance, whole = random.Random(form), stream_of(1, path, **FORMS[form])
    expected = np.stack(openjpeg.decode(whole, path), -1)
    kinds = set()
    for _ in range(12):
        streams = [whole, *(damaged(whole, chance) for _ in range(14)), whole]
        status, tiles = decoded(device, streams)
        kinds |= {*status.tolist()}
        assert status[0] == status[-1] == 0
        for pixels in tiles[[0, -1]]:
            assert np.abs(pixels.astype(int) - expected).max() <= 1
    assert len(kinds) > 2


def test_truncated_streams_are_refused(device, path):
    whole = stream_of(1, path)
    cuts = [whole, *(whole[:length] for length in range(2, len(whole) - 2, 97))]
    status, _ = decoded(device, cuts)
    assert status[0] == 0
    assert status[1:].all()


def test_last_packet_is_followed_by_the_end(device, path):
    whole = stream_of(1, path)
    length = whole.index(b"\xff\x90") + 6
    endless = whole[:length] + bytes(4) + whole[length + 4 :]
    taken = [whole, whole + b"more", endless]
    cut = [whole[:-2], whole[:-1], whole[:-2] + b"more", endless[:-2]]
    status, _ = decoded(device, taken + cut)
    readable = [openjpeg.decode(stream, path) is not None for stream in taken + cut]
    assert readable == [True] * len(taken) + [False] * len(cut)
    assert [wrong == 0 for wrong in status] == readable


def test_streams_of_another_form_are_refused(device, path):
    others = [stream_of(1, path, lossy=True), stream_of(1, path, levels=4), b"", b"\xff\x4f" * 9]
    status, _ = decoded(device, [stream_of(1, path), *others])
    assert status.tolist() == [0, 1, 1, 1, 2]


# As part of a device's decoder

# High throughput


def fast_stream(seed, size, components, *, level=None, resolutions=None):
    """A high-throughput stream; lossy if `level` is given."""
    planes = [picture(seed + number, size).astype(np.uint8) for number in range(components)]
    pixels = np.stack(planes, -1) if components > 1 else planes[0]
    options = {"level": level, "reversible": level is None, "resolutions": resolutions}
    return imagecodecs.htj2k_encode(pixels, **options)


@pytest.mark.parametrize("resolutions", [1, 3, None])
@pytest.mark.parametrize("level", [None, 0.1, 0.002])
@pytest.mark.parametrize("components", [1, 3])
def test_high_throughput_matches_openjpeg(device, components, level, resolutions):
    for size in [(73, 91), (1, 70), (70, 1), (5, 99), (256, 256)]:
        kind = {"level": level, "resolutions": resolutions}
        streams = [fast_stream(seed, size, components, **kind) for seed in (1, 11)]
        status, tiles = decoded(device, streams)
        assert not status.any()
        for stream, pixels in zip(streams, tiles, strict=True):
            expected = imagecodecs.jpeg2k_decode(stream).reshape(pixels.shape).astype(int)
            assert np.abs(pixels - expected).max() <= (level is not None)


def bits_of(stream):
    """Yield the bits of a packet header, without those that are stuffed."""
    previous = 0
    for byte in stream:
        yield from f"{byte:08b}"[previous == 255 :]
        previous = byte


def packed(bits):
    """Write a packet header."""
    found = bytearray()
    while bits:
        size = 7 if found[-1:] == b"\xff" else 8
        found.append(int(bits[:size].ljust(size, "0"), 2))
        bits = bits[size:]
    return bytes(found) + (b"\0" if found[-1:] == b"\xff" else b"")


def refined(stream, passes, segment, *, causal=False):
    """Add refinement passes to the first code block, the only one of LL, one bit plane lower."""
    start = stream.index(b"\xff\x93") + 2
    text = "".join(bits_of(stream[start : start + 9]))
    assert text[:2] == "11"
    zeros = text.index("1", 2) - 2
    wider = text.index("0", zeros + 4) - zeros - 4
    end = zeros + 5 + wider
    length = int(text[end : end + 3 + wider], 2)
    first = start + (end + 3 + wider + 7) // 8
    block, rest = stream[first : first + length], stream[first + length : -2]
    header = "11" + "0" * (zeros - 1) + "1" + {2: "10", 3: "1100"}[passes]
    header += "1" * 13 + "0" + f"{length:016b}" + f"{len(segment):0{14 + passes}b}"
    body = packed(header) + block + segment + rest
    head = bytearray(stream[:start])
    tile = head.index(b"\xff\x90")
    struct.pack_into(">I", head, tile + 6, start - tile + len(body))
    head[head.index(b"\xff\x52") + 12] |= CAUSAL * causal
    return bytes(head) + body + b"\xff\xd9"


def fast_streams():
    """Streams for `check_jpeg2000`."""
    plain = imagecodecs.htj2k_encode((96 + picture(3, (128, 96)) // 4).astype(np.uint8))
    segment = random.Random(1).choices(range(0x80), k=700)
    few = imagecodecs.htj2k_encode(np.full((120, 90), 77, np.uint8), resolutions=1)
    return {
        "lossless": fast_stream(1, (73, 91), 3),
        "9/7": fast_stream(1, (73, 91), 3, level=0.01),
        "one component": plain,
        "refined": refined(few, 3, bytes(segment)),
        "refined causally": refined(few, 2, bytes(segment), causal=True),
    }


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("passes", [2, 3])
def test_refinement_passes_match_openjpeg(device, passes, causal):
    """Any bytes are a valid segment, unless they contain markers."""
    chance = random.Random(passes)
    for size in [(128, 128), (26, 60), (4, 9), (14, 128)]:
        soft = (96 + picture(3, size) // 4).astype(np.uint8)
        plain = imagecodecs.htj2k_encode(soft, resolutions=1)
        streams = []
        for length in (0, 1, 2, 40, 900):
            segment = bytes(chance.choices((*range(0x80), 0xFE), k=length))
            streams.append(refined(plain, passes, segment, causal=causal))
        status, tiles = decoded(device, streams)
        assert not status.any()
        for stream, pixels in zip(streams, tiles, strict=True):
            expected = imagecodecs.jpeg2k_decode(stream)
            np.testing.assert_array_equal(pixels[..., 0], expected)
        assert 0 < expected.mean() < 255


@pytest.mark.parametrize("level", [None, 0.01])
def test_damaged_high_throughput_is_refused_or_decoded_alike(device, level):
    chance, whole = random.Random(7), fast_stream(1, (64, 80), 3, level=level)
    taken = 0
    for _ in range(12):
        streams = [whole, *(damaged(whole, chance) for _ in range(14)), whole]
        status, tiles = decoded(device, streams)
        assert status[0] == status[-1] == 0
        for stream, wrong, pixels in zip(streams, status, tiles, strict=True):
            if not wrong:
                expected = imagecodecs.jpeg2k_decode(stream).astype(int)
                assert np.abs(pixels - expected).max() <= (level is not None)
                taken += 1
    assert 30 < taken < 150


def test_high_throughput_with_other_code_blocks_is_refused():
    stream = fast_stream(1, (64, 80), 3)
    coding = stream.index(b"\xff\x52")
    for place, value, reason in (
        (12, 0xC0, "unsupported"),
        (12, 0x41, "unsupported"),
        (7, 2, "layers"),
    ):
        changed = bytearray(stream)
        changed[coding + place] = value
        assert reason in form_of_stream(memoryview(bytes(changed)))


@pytest.fixture
def on(host):
    on = OnDevice(HostDevice())
    on.device.compile_kernels = host.compile
    yield on
    on.close()


@pytest.fixture
def no_library(on):
    """Make nvImageCodec decode nothing."""
    on.decode_by(lambda decoder, streams, images: [False] * len(streams))


def tiles_of(streams, photometric=2, shape=(48, 64)):
    level = level_of(compression=33003, photometric=photometric, jpeg_color="stored", tile=shape)
    return [
        EncodedTile(level, 0, index, (memoryview(text),), 0) for index, text in enumerate(streams)
    ]


def apart(count, channels, planes, path, **form):
    """Return tiles with `channels` channels, each stored in `planes` code streams."""
    dtype = f"{'int' if form.get('signed') else 'uint'}{16 if form.get('bits', 8) > 8 else 8}"
    level = level_of(channels, planes=planes, compression=34712, jpeg_color="auto", dtype=dtype)
    form |= {"components": channels // planes, "size": (48, 64)}
    return [
        EncodedTile(level, 0, 0, tuple(map(memoryview, segments)), 7)
        for segments in (
            [stream_of(10 * seed + plane, path, **form) for plane in range(planes)]
            for seed in range(count)
        )
    ]


def by_cpu(tile):
    return decode_tile(tile, np.empty(tile.level.tile_bytes, np.uint8))


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("photometric", [2, 6])
def test_batch_with_several_forms(on, photometric, path):
    chroma = [picture(1, (48, 64)), *(picture(seed, (48, 32)) for seed in (2, 3))]
    streams = [
        *(stream_of(seed, path, size=(48, 64)) for seed in (1, 2)),
        stream_of(3, path, size=(48, 64), lossy=True, rates=(9,)),
        openjpeg.encode(chroma, path, spacing=[(1, 1), (2, 1), (2, 1)], transform=False),
        stream_of(4, path, size=(48, 64), transform=False),
    ]
    tiles = tiles_of(streams, photometric)
    scheduled = on.schedule(tiles)
    assert scheduled.wait() == {}
    assert scheduled.pending.on_cpu == 0
    for index, tile in enumerate(tiles):
        np.testing.assert_array_equal(scheduled.pixels(index), by_cpu(tile))


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize(
    ("channels", "planes", "form"),
    [
        (2, 1, {}),
        (4, 1, {"bits": 12}),
        (1, 1, {"bits": 16, "signed": True}),
        (3, 3, {"lossy": True, "rates": (9,)}),
        (5, 5, {"bits": 16}),
        (6, 2, {}),
    ],
)
def test_any_number_of_channels_is_decoded_by_the_kernels(on, channels, planes, form, path):
    tiles = apart(3, channels, planes, path, **form)
    scheduled = on.schedule(tiles)
    assert scheduled.wait() == {}
    assert scheduled.pending.on_cpu == 0
    for index, tile in enumerate(tiles):
        np.testing.assert_array_equal(scheduled.pixels(index), by_cpu(tile))


@pytest.mark.usefixtures("no_library")
def test_tile_with_a_damaged_plane_is_decoded_by_the_cpu(on, path):
    tiles = apart(4, 3, 3, path)
    first, second, third = tiles[1].segments
    tiles[1] = tiles[1]._replace(segments=(first, None, third))
    tiles[2] = tiles[2]._replace(segments=(first, second[: len(second) // 2], third))
    scheduled = on.schedule(tiles)
    assert sorted(scheduled.wait()) == [2]
    assert scheduled.pending.on_cpu == 2
    for index in (0, 1, 3):
        np.testing.assert_array_equal(scheduled.pixels(index), by_cpu(tiles[index]))


def test_without_kernels_the_cpu_decodes_what_the_library_does_not(on, path):
    on.device.compile_kernels = None
    tiles = apart(2, 4, 1, path)
    scheduled = on.schedule(tiles)
    assert scheduled.wait() == {}
    assert scheduled.pending.on_cpu == 2
    assert "cannot be compiled" in on.decoder.preparer(tiles[0].level)


def test_others_decode_what_the_kernels_refuse(on, path):
    good = stream_of(1, path, size=(48, 64))
    components = good.index(b"\xff\x51") + 39
    streams = [
        good,
        good[:200],
        b"nothing",
        good[:components] + b"\4" + good[components + 1 :],
        stream_of(2, path, size=(48, 64), style=1, region=(0, 3)),
    ]
    tiles = tiles_of(streams)
    scheduled = on.schedule(tiles)
    assert sorted(scheduled.wait()) == [1, 2, 3]
    for index in (0, 4):
        np.testing.assert_array_equal(scheduled.pixels(index), by_cpu(tiles[index]))
    assert on.verifier.reason is None


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("compression", [COMPRESSION.JPEG2000, HTJ2K])
def test_high_throughput_tiles_are_decoded_by_the_kernels(on, compression):
    level = level_of(3, compression=compression, jpeg_color="auto", tile=(48, 64))
    tiles = [
        EncodedTile(level, 0, seed, (memoryview(fast_stream(seed, (48, 64), 3)),), 0)
        for seed in range(3)
    ]
    scheduled = on.schedule(tiles)
    assert scheduled.wait() == {}
    assert scheduled.pending.on_cpu == 0
    for index, tile in enumerate(tiles):
        np.testing.assert_array_equal(scheduled.pixels(index), by_cpu(tile))


@pytest.mark.usefixtures("no_library")
def test_without_memory_the_cpu_decodes(on, path):
    tiles = tiles_of([stream_of(1, path, size=(48, 64))])
    scheduled = on.schedule(tiles, at_once=False)
    on.device.free = on.device.live
    assert scheduled.wait() == {}
    assert scheduled.pending.on_cpu == 1
    np.testing.assert_array_equal(scheduled.pixels(0), by_cpu(tiles[0]))


def test_batch_beyond_memory_is_decoded_in_parts(host, monkeypatch, path):
    monkeypatch.setattr("napari_wsigpu.gpu.device.scratch.MOST_MEMORY", 1 << 20)
    device = HostDevice()
    device.compile_kernels = host.compile
    engine = Jpeg2000Engine(device)
    streams = [stream_of(seed, path) for seed in range(7)]
    batch = joined(tiles_of(streams, shape=(73, 91)))
    status = np.full(7, 9, np.int32)
    address, memory = device.allocate(7 * 73 * 91 * 3)
    targets = address + np.arange(7) * 73 * 91 * 3
    encoded = np.frombuffer(batch.view, np.uint8)
    form = form_of_stream(memoryview(streams[0]))
    stream = device.new_stream()
    engine.decode(form, encoded, batch.starts[0], batch.lengths[0], targets, 3, status, stream)
    assert not status.any()
    for text, target in zip(streams, targets.tolist(), strict=True):
        pixels = device.download_tile(target, TileFormat(73, 91, 3, "uint8"), stream)
        np.testing.assert_array_equal(pixels, np.stack(openjpeg.decode(text, path), -1))
    del memory
    live = device.live
    engine.trim()
    assert device.live < live
