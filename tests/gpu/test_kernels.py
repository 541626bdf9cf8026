"""The kernels of kernels.cu, compiled for the host, and on a GPU if there is one."""

import gc
import shutil
import struct
from types import SimpleNamespace

import imagecodecs
import numpy as np
import pytest
from PIL import Image

from napari_wsigpu.codecs.color import ColorProfile
from napari_wsigpu.codecs.jpeg import Stacking, header_length, read_header
from napari_wsigpu.display.compose import colors_of, compose, shades_of
from napari_wsigpu.gpu.device import cuda
from napari_wsigpu.gpu.device.interfaces import AVERAGED_TYPES, TileFormat
from napari_wsigpu.gpu.device.kernel_tables import JPEG_TILE, PASTE, PLANE, SCALED
from napari_wsigpu.model.composite import ChannelStyle, Composite
from napari_wsigpu.model.errors import DeviceError
from napari_wsigpu.native.tables import SHADES
from napari_wsigpu.reading.average import area_average, resample_area, source_span
from napari_wsigpu.reading.halving import EXACT_TYPES
from napari_wsigpu.slide import runtime
from tests.fakes.host_cuda import host_cuda_device
from tests.fakes.host_device import HostDevice, level_of
from tests.writers.icc import PROFILES

UNTOUCHED = 77
TYPES = ["uint8", "uint16", "float32"]


@pytest.fixture(scope="module", params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, tmp_path_factory):
    if request.param == "cuda":
        try:
            found = runtime.default().devices.worker(0).device
        except DeviceError as error:
            pytest.skip(str(error))
        yield found
        return
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    with pytest.MonkeyPatch.context() as patch:
        yield host_cuda_device(patch, tmp_path_factory.mktemp("kernels"), compiler)


@pytest.fixture
def stream(device):
    return device.new_stream()


class Memory:
    """Copies of arrays in device memory, one after another, and their addresses."""

    def __init__(self, device, stream, arrays):
        arrays = [np.ascontiguousarray(array) for array in arrays]
        sizes = [-(-array.nbytes // 16) * 16 for array in arrays]
        start, self._memory = device.allocate(max(1, sum(sizes)))
        self.addresses = start + np.cumsum([0, *sizes])[:-1]
        self._device, self._stream = device, stream
        for address, array in zip(self.addresses.tolist(), arrays, strict=True):
            device.upload(address, array, stream)
        stream.synchronize()

    def get(self, index, shape, dtype):
        tile = TileFormat(*shape, dtype)
        found = self._device.download_tile(int(self.addresses[index]), tile, self._stream)
        self._stream.synchronize()
        return found


def no_doubts(device, count):
    """Flags for `count` tiles in page-locked memory."""
    doubts = device.pinned_array(count, np.int32)
    doubts[:] = 0
    return doubts


def samples_of(rng, shape, dtype):
    if np.dtype(dtype).kind == "f":
        return rng.normal(0, 1000, shape).astype(dtype)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return rng.integers(low, high, shape, endpoint=True).astype(dtype)


def blank_pixels(device, stream, shape, dtype, skipped=0):
    """An array filled with UNTOUCHED, `skipped` samples into its memory."""
    size = int(np.prod(shape))
    pixels = device.empty((skipped + size,), dtype)
    device.fill(pixels, UNTOUCHED, stream)
    return pixels[skipped:].reshape(shape)


def on_host(device, stream, pixels):
    found = device.download(pixels, stream)
    stream.synchronize()
    return found


# Paste


def cut(rng, length):
    """Split a length at random positions."""
    edges = np.unique([0, length, *rng.integers(0, length + 1, 2)])
    return list(zip(edges[:-1].tolist(), np.diff(edges).tolist(), strict=True))


class Pasted:
    """Regions of random sizes, assembled from random parts of tiles."""

    def __init__(self, rng, tiles, step):
        count, height, width = tiles.shape[:3]
        most = [(size - 1) // by + 1 for size, by in zip((height, width), step, strict=True)]
        self.parts, self.size = [], 0
        for _ in range(6):
            high, wide = (int(rng.integers(1, 2 * size)) for size in most)
            for y, down in cut(rng, high):
                for x, across in cut(rng, wide):
                    if down > most[0] or across > most[1] or rng.random() < 0.1:
                        continue
                    ends = (down - 1) * step[0] + 1, (across - 1) * step[1] + 1
                    top, left = rng.integers(0, (height - ends[0] + 1, width - ends[1] + 1))
                    tile = int(rng.integers(count))
                    target = self.size + y * wide + x
                    self.parts.append((tile, int(top), int(left), target, wide, down, across))
            self.size += high * wide
        self.tiles, self.step = tiles, step

    def table(self, addresses):
        rows = np.zeros(len(self.parts), PASTE)
        for row, (tile, top, left, *rest) in zip(rows, self.parts, strict=True):
            within = np.ravel_multi_index((top, left), self.tiles.shape[1:3])
            source = addresses[tile] + within * self.tiles[0, 0, 0].nbytes
            for name, value in zip(PASTE.names, (source, *rest), strict=True):
                row[name] = value
        return rows

    def expected(self, change=lambda pixels: pixels):
        """The pixels of all regions, one after another."""
        pixels = np.full((self.size, self.tiles.shape[3]), UNTOUCHED, self.tiles.dtype)
        for tile, top, left, target, pitch, height, width in self.parts:
            part = self.tiles[tile, top :: self.step[0], left :: self.step[1]][:height, :width]
            for y, row in enumerate(change(part.copy())):
                pixels[target + y * pitch :][:width] = row
        return pixels


@pytest.mark.parametrize("step", [(1, 1), (2, 3), (5, 1), (1, 4)])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_paste(device, stream, channels, dtype, step):
    """With all kinds of offsets and alignments, all channels or one."""
    rng = np.random.default_rng(channels)
    twin = HostDevice()
    for number in range(12):
        tiles = samples_of(rng, (4, *rng.integers(1, 40, 2), channels), dtype)
        tile = TileFormat(*tiles.shape[1:], dtype)
        pasted = Pasted(rng, tiles, step)
        memory = Memory(device, stream, tiles)
        here = np.array([part.ctypes.data for part in tiles])
        channel = [None, *range(channels)][number % (channels + 1)]
        expected = pasted.expected()
        if channel is not None:
            expected = expected[:, channel]
        pixels = blank_pixels(device, stream, expected.shape, dtype, number % 5)
        table = pasted.table(memory.addresses)
        device.paste(table, tile, pixels, stream, channel=channel, step=step)
        np.testing.assert_array_equal(on_host(device, stream, pixels), expected)
        by_twin = np.full(expected.shape, UNTOUCHED, dtype)
        twin.paste(pasted.table(here), tile, by_twin, None, channel=channel, step=step)
        np.testing.assert_array_equal(by_twin, expected)


def test_a_tile_may_have_more_rows_than_a_grid(device, stream):
    height, width = 600_000, 3
    pixels = samples_of(np.random.default_rng(0), (height, width, 1), "uint8")
    memory = Memory(device, stream, [pixels])
    table = np.array([(memory.addresses[0], 0, width, height, width)], PASTE)
    found = blank_pixels(device, stream, pixels.shape, "uint8")
    device.paste(table, TileFormat(*pixels.shape, "uint8"), found, stream)
    np.testing.assert_array_equal(on_host(device, stream, found), pixels)


def test_parts_may_lie_beyond_what_32_bits_count(device, stream):
    """Positions beyond 2**31; only the memory of the parts exists."""
    far = 1 << 33
    pixels = samples_of(np.random.default_rng(0), (5, 7, 4), "uint8")
    memory = Memory(device, stream, [pixels])
    found = blank_pixels(device, stream, pixels.shape, "uint8")
    table = np.array([(memory.addresses[0], far, 7, 5, 7)], PASTE)
    sizes = 7, 4, 0, 4, 1, 1
    before = np.uint64((device.address(found) - 4 * far) % (1 << 64))
    arguments = (device.table(table, stream), *map(np.int32, sizes), before)
    device._launch("paste", (1, 5, 1), arguments, stream)
    np.testing.assert_array_equal(on_host(device, stream, found), pixels)


def test_paste_of_nothing(device, stream):
    pixels = blank_pixels(device, stream, (4, 5, 3), "uint8")
    tile = TileFormat(6, 10, 3, "uint8")
    device.paste(np.zeros(0, PASTE), tile, pixels, stream)
    device.paste_colors(np.zeros(0, PASTE), tile, pixels, device.empty((1,), "uint32"), stream)
    assert (on_host(device, stream, pixels) == UNTOUCHED).all()


@pytest.mark.parametrize("step", [(1, 1), (3, 2)])
@pytest.mark.parametrize("channels", [3, 4])
def test_paste_colors(device, stream, scanner_colours, channels, step):
    rng = np.random.default_rng(channels)
    colors = device.colors(scanner_colours)
    for number in range(8):
        tiles = samples_of(rng, (4, *rng.integers(1, 40, 2), channels), "uint8")
        tile = TileFormat(*tiles.shape[1:], "uint8")
        pasted = Pasted(rng, tiles, step)
        memory = Memory(device, stream, tiles)
        expected = pasted.expected(scanner_colours.recolored)
        pixels = blank_pixels(device, stream, expected.shape, "uint8", number % 5)
        rows = pasted.table(memory.addresses)
        device.paste_colors(rows, tile, pixels, colors, stream, step=step)
        np.testing.assert_array_equal(on_host(device, stream, pixels), expected)


def test_every_color_is_looked_up(device, stream, scanner_colours):
    pixels = np.arange(1 << 24, dtype="<u4").view(np.uint8).reshape(4096, 4096, 4)
    memory = Memory(device, stream, [pixels])
    found = blank_pixels(device, stream, pixels.shape, "uint8")
    rows = np.array([(memory.addresses[0], 0, 4096, 4096, 4096)], PASTE)
    tile = TileFormat(4096, 4096, 4, "uint8")
    device.paste_colors(rows, tile, found, device.colors(scanner_colours), stream)
    np.testing.assert_array_equal(on_host(device, stream, found), scanner_colours.recolored(pixels))


def test_color_table_is_uploaded_once_and_freed(device):
    table = ColorProfile(PROFILES["gamma"], "slide").table()
    colors = device.colors(table)
    assert device.colors(table) is colors
    kept = len(device._colors)
    del table
    gc.collect()
    assert len(device._colors) == kept - 1


# Paste at another scale


def scaled(memory, tile, parts):
    """A table of parts: (target, pitch, height, width, top, left, down, across)."""
    rows = np.zeros(len(parts), SCALED)
    for row, part in zip(rows, parts, strict=True):
        row["source"], row["rows"], row["columns"] = memory.addresses[0], *tile.shape[:2]
        for name, value in zip(
            ("target", "pitch", "height", "width", "top", "left", "down", "across"),
            part,
            strict=True,
        ):
            row[name] = value
    return rows


@pytest.mark.parametrize("ratios", [(1, 1), (2, 0.5), (0.3, 3.7), (1.01, 0.26)])
@pytest.mark.parametrize(
    ("channels", "dtype", "channel"),
    [(3, "uint8", None), (4, "uint8", None), (1, "uint8", 0), (3, "uint16", 2), (1, "float32", 0)],
)
def test_parts_are_drawn_at_another_scale(device, stream, ratios, channels, dtype, channel):
    rng = np.random.default_rng(channels)
    tile = samples_of(rng, (37, 300, channels), dtype)
    memory = Memory(device, stream, [tile])
    height, width, start = 45, 310, (1.5, -0.25)
    part = 2 * width + 7, width, height - 4, width - 9, *start, *ratios
    shape = (height, width, 4) if channel is None else (height, width)
    pixels = blank_pixels(device, stream, shape, dtype)
    kind = TileFormat(*tile.shape, dtype)
    device.paste_scaled(scaled(memory, tile, [part]), kind, pixels, stream, channel=channel)
    y, x = (
        np.clip(np.floor(begin + (np.arange(count) + 0.5) * ratio), 0, most - 1).astype(int)
        for begin, count, ratio, most in zip(start, part[2:4], ratios, tile.shape, strict=False)
    )
    drawn = tile[y[:, None], x]
    expected = np.full(shape, UNTOUCHED, dtype)
    if channel is None:
        opaque = np.full((*drawn.shape[:2], 1), 255, np.uint8)
        drawn = np.concatenate([drawn, opaque], axis=2)[..., :4]
        expected[2:-2, 7:-2] = drawn
    else:
        expected[2:-2, 7:-2] = drawn[..., channel]
    np.testing.assert_array_equal(on_host(device, stream, pixels), expected)


@pytest.mark.parametrize("channel", [None, 0])
def test_enlarged_8_bit_pixels_are_interpolated(device, stream, channel):
    channels = 1 if channel is not None else 3
    tile = samples_of(np.random.default_rng(2), (9, 13, channels), "uint8")
    memory = Memory(device, stream, [tile])
    height, width = 9 * 8, 13 * 8
    shape = (height, width, 4) if channel is None else (height, width)
    pixels = blank_pixels(device, stream, shape, "uint8")
    part = scaled(memory, tile, [(0, width, height, width, 0, 0, 1 / 8, 1 / 8)])
    device.paste_scaled(part, TileFormat(*tile.shape, "uint8"), pixels, stream, channel=channel)
    picture = Image.fromarray(tile if channel is None else tile[..., 0])
    expected = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))
    found = on_host(device, stream, pixels).astype(int)
    assert np.abs((found[..., :3] if channel is None else found) - expected).max() <= 1


def test_scaled_parts_with_colors(device, stream, scanner_colours):
    tile = samples_of(np.random.default_rng(3), (20, 30, 3), "uint8")
    memory = Memory(device, stream, [tile])
    pixels = blank_pixels(device, stream, (20, 30, 4), "uint8")
    part = scaled(memory, tile, [(0, 30, 20, 30, 0, 0, 1, 1)])
    kind = TileFormat(*tile.shape, "uint8")
    device.paste_scaled(part, kind, pixels, stream, colors=device.colors(scanner_colours))
    expected = scanner_colours.recolored(tile[None])[0]
    np.testing.assert_array_equal(on_host(device, stream, pixels)[..., :3], expected)


def test_no_scaled_parts_are_nothing(device, stream):
    pixels = blank_pixels(device, stream, (4, 5, 4), "uint8")
    device.paste_scaled(np.zeros(0, SCALED), TileFormat(6, 10, 3, "uint8"), pixels, stream)
    assert (on_host(device, stream, pixels) == UNTOUCHED).all()


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize(("dtype", "most"), [("uint8", 255), ("uint16", 65_535)])
def test_channels_are_composed_as_on_the_host(device, stream, dtype, most, inverted):
    rng = np.random.default_rng(most)
    stored = [samples_of(rng, (2, 9, 300, each), dtype) for each in (1, 1, 3)]
    styles = (
        ChannelStyle("narrow", "#ff8001", (most / 4, most / 3)),
        ChannelStyle("equal limits", "#00ff00", (most / 2, most / 2), 0.3),
        ChannelStyle("whole", "#2030ff", (0, most), 2.0),
    )
    colors = [colors_of(style, np.dtype(dtype).itemsize) for style in styles]
    memory = Memory(device, stream, [*(tile for each in stored for tile in each),
                                     *(table for table, _ in colors),
                                     *np.zeros((2, 9, 300, 3), np.uint8)])  # fmt: skip
    for step, count in ((1, 2), (3, 1)):  # channels apart, and one of three in a tile
        used = range(2) if step == 1 else range(2, 3)
        planes = np.zeros((2, count), PLANE)
        for column, index in enumerate(used):
            table, low = colors[index]
            planes["source"][:, column] = memory.addresses[2 * index : 2 * index + 2]
            planes["source"][:, column] += (step // 2) * np.dtype(dtype).itemsize
            planes["colors"][:, column] = memory.addresses[6 + index]
            planes["low"][:, column], planes["last"][:, column] = low, len(table) - 1
        shades = device.empty(SHADES + 1, "uint8")
        device.send(shades_of(inverted=inverted), shades, stream)
        tile = TileFormat(9, 300, step, dtype)
        device.compose(planes, tile, shades, memory.addresses[9:], stream)
        settings = Composite(tuple(styles[index] for index in used), inverted=inverted)
        for number in range(2):
            channels = [stored[index][number][..., step // 2] for index in used]
            found = memory.get(9 + number, (9, 300, 3), "uint8")
            np.testing.assert_array_equal(found, compose(channels, settings, (9, 300)))


def test_no_channels_are_composed_to_black(device, stream):
    memory = Memory(device, stream, [np.full((2, 4, 5, 3), UNTOUCHED, np.uint8)])
    shades = device.empty(SHADES + 1, "uint8")
    device.send(shades_of(inverted=False), shades, stream)
    targets = memory.addresses[0] + np.array([0, 60])
    device.compose(np.zeros((2, 0), PLANE), TileFormat(4, 5, 1, "uint8"), shades, targets, stream)
    assert not memory.get(0, (8, 5, 3), "uint8").any()


def test_device_memory_is_copied_within_the_device(device, stream):
    tile = samples_of(np.random.default_rng(4), (6, 7, 3), "uint8")
    memory = Memory(device, stream, [np.zeros_like(tile)])
    pixels = device.empty(tile.shape, "uint8")
    device.send(tile, pixels, stream)
    device.copy(int(memory.addresses[0]), pixels, stream)
    np.testing.assert_array_equal(memory.get(0, tile.shape, "uint8"), tile)


def test_send_waits_for_a_temporary_copy(device):
    waits = []
    stream = SimpleNamespace(ptr=0, synchronize=lambda: waits.append(device.new_stream()))
    tile = samples_of(np.random.default_rng(5), (6, 7, 3), "uint8")
    pixels = device.empty(tile.shape, "uint8")
    device.send(tile, pixels, stream)
    assert not waits
    device.send(tile[:, ::-1], pixels, stream)
    assert len(waits) == 1


# Raw segments


def raw_level(channels, planes, dtype, byte_order, tile):
    given = {"compression": 1, "dtype": dtype, "jpeg_color": "auto"}
    level = level_of(channels, planes=planes, tile=tile, **given)
    object.__setattr__(level.encoding, "byte_order", byte_order)
    return level


# Averages

SCALES = [(1.0, 1.0), (2.0, 2.0), (4.0, 4.0), (3.0, 2.0), (1.5, 2.25), (3.7, 1.0), (9.1, 13.3)]


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("dtype", AVERAGED_TYPES)
def test_averages_are_those_of_the_host(device, stream, dtype, scale):
    rng = np.random.default_rng(0)
    for channels, height, width in ((1, 40, 52), (3, 57, 31), (4, 16, 16)):
        finer = samples_of(rng, (2, height, width, channels), dtype)
        size = tuple(
            int(np.ceil(length / by - 1e-9))
            for length, by in zip((height, width), scale, strict=True)
        )
        given = device.empty(finer.shape, dtype)
        device.send(finer, given, stream)
        pixels = blank_pixels(device, stream, (2, *size, channels), dtype)
        device.average_area(given, pixels, scale, (0, 0), stream)
        found = on_host(device, stream, pixels)
        expected = resample_area(finer, size, scale)
        if dtype == "float32":
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-2)
        elif scale == (1.0, 1.0) or (scale[0] in (2.0, 4.0) and height % 4 == width % 4 == 0):
            np.testing.assert_array_equal(found, expected)
        else:
            assert abs(found.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("dtype", EXACT_TYPES)
def test_halves_are_those_of_computed_levels(device, stream, dtype):
    rng = np.random.default_rng(2)
    for height, width in ((8, 6), (7, 9), (1, 5), (4, 1)):
        finer = samples_of(rng, (height, width, 3), dtype)
        limits = np.iinfo(dtype)
        finer[: height // 2] = rng.choice([limits.min, limits.max], (height // 2, width, 3))
        given = device.empty((1, *finer.shape), dtype)
        device.send(finer[None], given, stream)
        pixels = blank_pixels(device, stream, (1, (height + 1) // 2, (width + 1) // 2, 3), dtype)
        device.average_area(given, pixels, (2.0, 2.0), (0, 0), stream)
        np.testing.assert_array_equal(on_host(device, stream, pixels)[0], area_average(finer, 2, 2))


@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_averages_of_a_part_are_those_of_the_whole(device, stream, scale):
    rng = np.random.default_rng(1)
    finer = samples_of(rng, (1, 157, 231, 3), "uint8")
    size = tuple(int(length / by) for length, by in zip(finer.shape[1:3], scale, strict=True))
    whole = resample_area(finer, size, scale)
    pixels = blank_pixels(device, stream, (1, *size, 3), "uint8")
    middle = [length // 3 for length in size]
    for y, high in ((0, middle[0]), (middle[0], size[0] - middle[0])):
        for x, wide in ((0, middle[1]), (middle[1], size[1] - middle[1])):
            (top, height), (left, width) = (
                source_span(first, count, by)
                for first, count, by in zip((y, x), (high, wide), scale, strict=True)
            )
            part = np.ascontiguousarray(finer[:, top : top + height, left : left + width])
            given = device.empty(part.shape, "uint8")
            device.send(part, given, stream)
            target = pixels[:, y : y + high, x : x + wide]
            device.average_area(given, target, scale, (y, x), stream)
            on_cpu = resample_area(part, (high, wide), scale, (y, x))
            np.testing.assert_array_equal(on_cpu, whole[:, y : y + high, x : x + wide])
    found = on_host(device, stream, pixels)
    assert abs(found.astype(int) - whole).max() <= 1


# Colors of JPEG


def by_libjpeg(ycbcr):
    """RGB as int, before it is clipped, with libjpeg's rounding."""
    y, cb, cr = np.moveaxis(ycbcr.astype(np.int64), -1, 0)
    cb, cr, half = cb - 128, cr - 128, 1 << 15
    red = (91881 * cr + half) >> 16
    green = (-22554 * cb - 46802 * cr + half) >> 16
    blue = (116130 * cb + half) >> 16
    return np.stack([y + red, y + green, y + blue], -1)


def test_ycbcr_to_rgb_of_every_chroma(device, stream):
    """For several values of luma, a tile each."""
    lumas = [0, 1, 16, 77, 128, 200, 254, 255]
    ycbcr = np.stack(np.meshgrid(lumas, np.arange(256), np.arange(256), indexing="ij"), -1)
    expected = np.clip(by_libjpeg(ycbcr), 0, 255).astype(np.uint8)
    ycbcr = ycbcr.astype(np.uint8)
    tile = TileFormat(256, 256, 3, "uint8")
    memory = Memory(device, stream, ycbcr)
    device.ycbcr_to_rgb(memory.addresses, tile, stream)
    for number, pixels in enumerate(expected):
        np.testing.assert_array_equal(memory.get(number, tile[:3], "uint8"), pixels)
    addresses = np.array([pixels.ctypes.data for pixels in ycbcr])
    HostDevice().ycbcr_to_rgb(addresses, tile, None)
    np.testing.assert_array_equal(ycbcr, expected)


SAMPLINGS = {"4:4:4": (1, 1), "4:2:2": (2, 1), "4:2:0": (2, 2)}


@pytest.mark.parametrize("to_rgb", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("size", [(64, 48), (16, 16), (37, 51), (2, 1)])
def test_planes_become_pixels(device, stream, size, sampling, to_rgb):
    height, width = size
    across, down = sampling
    small = -(-height // down), -(-width // across)
    tile = TileFormat(height, width, 3, "uint8")
    rng = np.random.default_rng(0)
    shapes = [size, small, small] * 5
    planes = [samples_of(rng, shape, "uint8") for shape in shapes]
    found = []
    for each in (device, HostDevice()):
        places = Memory(each, stream, planes)
        targets = Memory(each, stream, [np.zeros((height, width, 3), np.uint8)] * 5)
        tiles = np.zeros(5, JPEG_TILE)
        tiles["target"] = targets.addresses
        tiles["planes"] = places.addresses.reshape(5, 3)
        doubts = no_doubts(each, 5)
        doubts[:] = 0
        if each is not device:
            # The reference searches a scan even if it is empty.
            end = np.zeros(1, np.uint8)
            tiles["scan"] = end.ctypes.data
        each.merge_planes(tiles, tile, sampling, doubts, stream, to_rgb=to_rgb)
        stream.synchronize()
        assert not doubts.any()
        found.append([targets.get(number, tile[:3], "uint8") for number in range(5)])
    np.testing.assert_array_equal(*found)


# Doubtful JPEGs


def doubts_of(device, stream, plane, scan, length, marks):
    """Whether a gray tile of 16 x 16 pixels is doubtful; otherwise its pixels are the plane."""
    tile = TileFormat(16, 16, 1, "uint8")
    memory = Memory(device, stream, [plane, np.zeros_like(plane)])
    rows = np.zeros(1, JPEG_TILE)
    rows["planes"], rows["target"] = memory.addresses
    rows["scan"], rows["length"] = scan.ctypes.data, length
    rows["shades"], rows["quantum"], rows["codes"] = marks[:2], marks[2], marks[3:]
    doubts = no_doubts(device, 1)
    doubts[:] = 0
    device.merge_planes(rows, tile, (1, 1), doubts, stream, to_rgb=False)
    alone = no_doubts(device, 1)
    device.check_scans(rows, 16, alone, stream)
    stream.synchronize()
    np.testing.assert_array_equal(memory.get(1, tile[:3], "uint8")[..., 0], plane)
    assert bool(alone[0]) == bool(doubts[0])
    return bool(doubts[0])


@pytest.mark.parametrize("offset", [0, 1, 15, 16, 17])
def test_markers_in_scans_are_found(device, stream, offset):
    rng = np.random.default_rng(offset)
    length = 5000
    plane = np.full((16, 16), 128, np.uint8)
    marks = (0, 0, 8, *struct.unpack("<4q", bytes([2, *bytes(31)])))  # all codes have the symbol 0
    for place in [None, 0, 1, 14, 15, 16, 17, 4094, length - 2, length - 1]:
        room = device.pinned_array(offset + length + 100, np.uint8)
        room[:] = 255
        scan = room[offset : offset + length]
        scan[:] = rng.integers(0, 255, length)
        scan[3], scan[4] = 255, 0
        if place is not None:
            scan[place], scan[place + 1 : place + 2] = 255, 7
        assert doubts_of(device, stream, plane, scan, length, marks) == (place is not None), place


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("quality", [30, 85, 100])
def test_the_first_block_is_compared_with_its_code(device, stream, quality, optimize):
    rng = np.random.default_rng(quality)
    found = {True: 0, False: 0}
    for shade in range(1, 255, 3):
        pixels = np.clip(rng.normal(shade, 6, (16, 16)), 0, 255).astype(np.uint8)
        jpeg = imagecodecs.jpeg8_encode(pixels, level=quality, optimize=optimize)
        start = header_length(jpeg)
        marks = Stacking(jpeg[:start], read_header(jpeg[:start])).marks
        scan = device.pinned_array(len(jpeg) + 64, np.uint8)
        length = len(jpeg) - start - 2
        scan[: length + 2] = np.frombuffer(jpeg[start:], np.uint8)
        plane = imagecodecs.jpeg8_decode(jpeg)
        if not any(marks):
            continue
        assert not doubts_of(device, stream, plane, scan, length, marks)
        for apart in (-9, 9):
            other = plane.astype(int) + apart
            clipped = not ((other[:8, :8] > 0) & (other[:8, :8] < 255)).all()
            other = np.clip(other, 0, 255).astype(np.uint8)
            assert doubts_of(device, stream, other, scan, length, marks) != clipped
            found[clipped] += 1
    assert found[False]


def test_strips_are_checked(device, stream):
    tile = TileFormat(16, 64, 1, "uint8")
    shades = np.array([207, 128])[np.arange(64) // 8 % 2]
    far = np.where(np.arange(64) == 63, 128 - 4, shades)
    near = shades - 3
    strips = np.stack([shades, far, near, np.full(64, 128)]).astype(np.uint8)
    memory = Memory(device, stream, strips)
    planes = Memory(device, stream, [np.zeros((16, 64), np.uint8)] * 10)
    rows = np.zeros(5, JPEG_TILE)
    rows["target"], rows["planes"] = planes.addresses[:5], planes.addresses[5:, None]
    rows["strip"][:4] = memory.addresses
    rows["shades"] = 207, 128
    doubts = no_doubts(device, 5)
    doubts[:] = 0
    device.merge_planes(rows, tile, (1, 1), doubts, stream, to_rgb=False)
    alone = no_doubts(device, 5)
    device.check_scans(rows, 64, alone, stream)
    stream.synchronize()
    assert doubts.astype(bool).tolist() == [False, True, False, True, False]
    assert alone.astype(bool).tolist() == doubts.astype(bool).tolist()


def test_more_scans_than_a_grid_has_rows(device, stream, monkeypatch):
    monkeypatch.setattr(cuda, "MOST_BLOCKS", 3)
    strips = np.full((8, 16), 100, np.uint8)
    strips[[2, 3, 7]] = 0
    memory = Memory(device, stream, strips)
    rows = np.zeros(8, JPEG_TILE)
    rows["strip"], rows["shades"] = memory.addresses, 100
    doubts = no_doubts(device, 8)
    device.check_scans(rows, 16, doubts, stream)
    stream.synchronize()
    assert np.flatnonzero(doubts).tolist() == [2, 3, 7]
