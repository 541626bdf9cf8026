import struct
from contextlib import suppress

import imagecodecs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_wsigpu import convert, open_slide
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    SlideError,
    TileError,
    UnsupportedSlideError,
)
from napari_wsigpu.model.privacy import masked
from tests.conftest import SHARED_SLIDES
from tests.writers import czis, slides
from tests.writers.czis import Block

czi = pytest.importorskip("pylibCZIrw.czi")

REAL = sorted((SHARED_SLIDES / "found").glob("*.czi"))
COLOR, GRAY = slides.picture(150, 230), slides.picture(150, 230, 1, "uint16")


def zeiss_level(path, slide, index, channel):
    """Decode a level as Zeiss' library does; (height, width) for one channel, or RGB."""
    with czi.open_czi(str(path)) as other:
        boxes = other.total_bounding_box
        plane = {"C": channel, "T": boxes.get("T", (0, 1))[0]}
        if "Z" in boxes:
            first, end = boxes["Z"]
            plane["Z"] = first + (end - first) // 2
        white = (1.0,) * 3 if slide.layout.rgb else (0.0,) * 3
        zoom = 1 / slide.level_downsamples[index]
        pixels = other.read(plane=plane, zoom=zoom, background_pixel=white)
    return pixels[..., ::-1] if slide.layout.rgb else pixels[..., 0]


def check(path):
    random = np.random.default_rng(7)
    with open_slide(path, "cpu") as slide:
        assert slide.vendor == "zeiss"
        for index, level in enumerate(slide.levels):
            for channel in range(max(1, len(slide.channels))):
                expected = zeiss_level(path, slide, index, channel)
                found = level[...] if slide.layout.rgb else level[..., channel]
                height, width = expected.shape[:2]  # Zeiss' library rounds sizes down
                np.testing.assert_array_equal(found[:height, :width], expected)
                for _ in range(10):
                    y, x = (int(random.integers(0, side)) for side in expected.shape[:2])
                    part = expected[y : y + 40, x : x + 50]
                    step = slide.level_downsamples[index]
                    size = part.shape[1::-1]
                    read = slide.read_region((int(x * step), int(y * step)), size, index)
                    read = read if slide.layout.rgb else read[..., channel]
                    np.testing.assert_array_equal(read, part)


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_files(path):
    check(path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "slide.czi"


COMPRESSIONS = (
    "uncompressed:",
    "zstd0:",
    "zstd1:",
    "zstd1:ExplicitLevel=1;PreProcess=HiLoByteUnpack",
)


@pytest.mark.parametrize("pixels", [COLOR, GRAY, GRAY.astype("uint8")], ids=["rgb", "16", "8"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_compressions(path, pixels, compression):
    with czi.create_czi(str(path), compression_options=compression) as file:
        file.write(np.ascontiguousarray(pixels[..., ::-1]), location=(-30, 7))
    check(path)
    with open_slide(path, "cpu") as slide:
        np.testing.assert_array_equal(slide.levels[0][...], pixels)


@pytest.mark.parametrize("pixels", [COLOR, GRAY, GRAY.astype("uint8")], ids=["rgb", "16", "8"])
def test_jpeg_xr(path, pixels):
    data = imagecodecs.jpegxr_encode(pixels, level=1.0)
    # Zeiss' software gives the pixel format that is blue first: the last byte of its GUID.
    red_first = bytes.fromhex("24c3dd6f034efe4bb1853d77768dc90d")
    data = data.replace(red_first, red_first[:-1] + b"\x0c")
    czis.write(path, [Block(pixels, compression=4, data=data)])
    check(path)


def test_overlapping_tiles_of_scenes_and_channels(path):
    random = np.random.default_rng(4)
    with czi.create_czi(str(path), compression_options="zstd1:") as file:
        for scene in range(2):
            for m in range(6):
                size = random.integers(20, 60, 2).tolist()
                x, y = 35 * (m % 3) + 300 * scene, 30 * (m // 3) - 5 * scene
                for channel in range(3):
                    pixels = random.integers(0, 60_000, (*size, 1), np.uint16)
                    file.write(pixels, location=(x, y), plane={"C": channel}, scene=scene)
        names = {0: "DAPI", 1: "Cy3", 2: "Cy5"}
        file.write_metadata("a document", names, scale_x=0.25e-6, scale_y=0.5e-6)
    check(path)
    with open_slide(path, "cpu") as slide:
        assert [channel.name for channel in slide.channels] == [*names.values()]
        assert slide.mpp == (0.25, 0.5)


def stored(pixels, **place):
    """Compress a block: as it is, by zstd, or by zstd after a header of zstd1."""
    kind = place.pop("kind")
    data = pixels.tobytes() if kind == 0 else bytes(imagecodecs.zstd_encode(pixels.tobytes()))
    if kind == 6:
        data = b"\1" + data
    return Block(pixels, compression=kind, data=data, **place)


def noise(random, height, width, dtype="uint16"):
    return random.integers(1, np.iinfo(dtype).max, (height, width, 1), dtype)


CHANNELS = {
    "shifted": lambda c, y, x: (y - 5 * c, x + 7 * c, 0),
    "one lacks a tile": lambda c, y, x: None if (c, y, x) == (1, 40, 50) else (y, x, 0),
    "one has a single tile": lambda c, y, x: None if c == 1 and (y or x) else (y, x, 0),
    "other compressions": lambda c, y, x: (y, x, (0, 5, 6)[c]),
    "tiles of other compressions": lambda c, y, x: (y, x, (0, 5, 6)[(c + x // 50) % 3]),
    "overlapping ones of others": lambda c, y, x: (y * 3 // 4, x // 2, (0, 5)[(x // 50) % 2]),
    "the last one shifted": lambda c, y, x: (y, x + 9 * (c == 2), 0),
}


@pytest.mark.parametrize("place", CHANNELS.values(), ids=CHANNELS)
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_channels_with_other_layouts(path, place, dtype):
    random, blocks = np.random.default_rng(11), []
    for channel in range(3):
        corners = [(y, x) for y in (0, 40, 80) for x in (0, 50, 100)]
        for m, corner in enumerate(corners):
            found = place(channel, *corner)
            if found is not None:
                y, x, kind = found
                # Each channel numbers its tiles by itself, from above or from below.
                number = len(corners) - m if channel == 1 else m + 20 * channel
                pixels = noise(random, 40, 50, dtype)
                blocks.append(stored(pixels, x=x, y=y, m=number, c=channel, kind=kind))
    czis.write(path, blocks)
    check(path)


def test_channels_on_grids_of_their_own(path):
    random = np.random.default_rng(12)
    blocks = [
        stored(noise(random, side, side + 3), x=x, y=y, m=m, c=channel, kind=0)
        for channel, side in enumerate((30, 64, 41, 41))
        for m, (y, x) in enumerate((y, x) for y in range(0, 160, 25) for x in range(0, 200, 28))
    ]
    czis.write(path, blocks)
    check(path)


def test_fractions_of_pixels_agree_on_all_paths(path, host_gpu):
    random = np.random.default_rng(13)
    blocks = [
        stored(noise(random, 90, 110), x=9 * c, y=4 * c, c=c, kind=(0, 6)[c % 2]) for c in range(4)
    ]
    czis.write(path, blocks)
    expected = np.zeros((102, 137, 4), np.uint16)
    for c, block in enumerate(blocks):
        expected[4 * c : 4 * c + 90, 9 * c : 9 * c + 110, c] = block.pixels[..., 0]
    for device in ("cpu", "cuda"):
        with open_slide(path, device) as slide:
            np.testing.assert_array_equal(slide.levels[0][...], expected)
            for channel in range(4):
                found = slide.levels[0][5:60:3, 2:100:2, channel]
                np.testing.assert_array_equal(found, expected[5:60:3, 2:100:2, channel])
            places = [(0, 0), (20, 30), (90, 80)]
            batches = np.concatenate(list(slide.read_regions(places, (40, 20), batch_size=2)))
            for (x, y), found in zip(places, batches, strict=True):
                part = np.zeros((20, 40, 4), np.uint16)
                inside = expected[y : y + 20, x : x + 40]
                part[: len(inside), : inside.shape[1]] = inside
                np.testing.assert_array_equal(found, part)
            on_device = slide.read_region((20, 30), (40, 20), device="cuda")
            np.testing.assert_array_equal(on_device, expected[30:50, 20:60])


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_level_that_lacks_a_channel_is_computed(path, lacking):
    random = np.random.default_rng(14)
    blocks = [stored(noise(random, 200, 240), c=c, kind=0) for c in range(2)]
    half = noise(random, 100, 120)
    blocks.append(stored(half, scale=2, c=1 - lacking, kind=0))
    czis.write(path, blocks)
    with open_slide(path, "cpu") as slide:
        assert len(slide.levels) == 1
    check(path)


def test_middle_plane_is_shown_and_stated(path):
    with czi.create_czi(str(path)) as file:
        for z in range(5):
            for t in range(2):
                file.write(np.full((20, 30, 1), 10 * z + t, np.uint8), plane={"Z": z, "T": t})
    check(path)
    with open_slide(path, "cpu") as slide:
        assert slide.levels[0][0, 0, 0] == 20
        assert slide.layout.other_planes == 9


def pyramid(*, holes=False, dtype="uint8", channels=3):
    """Subblocks of two levels of 256 x 320 pixels, in tiles of 64 and a larger one."""
    base = slides.picture(256, 320, channels, dtype)
    blocks = [
        Block(base[y : y + 64, x : x + 64], x + 100, y - 60, m=number)
        for number, (y, x) in enumerate(
            (y, x) for y in range(0, 256, 64) for x in range(0, 320, 64)
        )
    ]
    half = base[::2, ::2]
    blocks += [Block(half[:, :100], 100, -60, 2), Block(half[:, 100:], 300, -60, 2)]
    if holes:
        del blocks[-1]
    return base, blocks


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_pyramid(path, dtype, channels):
    base, blocks = pyramid(dtype=dtype, channels=channels)
    czis.write(path, blocks)
    check(path)
    with open_slide(path, "cpu") as slide:
        assert slide.level_downsamples == (1, 2)
        np.testing.assert_array_equal(slide.levels[0][...], base)
        np.testing.assert_array_equal(slide.levels[1][...], base[::2, ::2])
        np.testing.assert_array_equal(
            slide.levels[1][5:90:3, 60:140:2], base[::2, ::2][5:90:3, 60:140:2]
        )


def test_a_level_with_holes_is_left_out(path):
    _, blocks = pyramid(holes=True)
    czis.write(path, blocks)
    with open_slide(path, "cpu") as slide:
        assert slide.level_count == 1


def test_jpegs(path):
    """These are decoded as they are stored, and in batches by a GPU."""
    pixels = slides.picture(64, 96)
    data = imagecodecs.jpeg8_encode(pixels, level=95)
    blocks = [Block(pixels, x, compression=1, data=data, m=x) for x in (0, 96, 192)]
    czis.write(path, blocks)
    with open_slide(path, "cpu") as slide:
        expected = np.tile(imagecodecs.jpeg8_decode(data), (1, 3, 1))
        np.testing.assert_array_equal(slide.levels[0][...], expected)


def test_a_gpu(path, host_gpu):
    pixels = slides.picture(64, 96)
    data = imagecodecs.jpeg8_encode(pixels, level=95)
    raw = [Block(pixels, x, 100, m=x) for x in (0, 90)]
    czis.write(path, [Block(pixels, x, compression=1, data=data, m=x) for x in (0, 96)] + raw)
    with open_slide(path, "cpu") as slide, open_slide(path, "cuda") as by_gpu:
        expected = slide.levels[0][...].astype(int)
        assert np.abs(expected - by_gpu.levels[0][...]).max() <= 2
        np.testing.assert_array_equal(expected[100:], by_gpu.levels[0][100:])
        on_device = by_gpu.read_region((0, 0), slide.dimensions, 0, "cuda")
        assert np.abs(expected - on_device).max() <= 2


def test_a_converted_copy(path, tmp_path):
    base, blocks = pyramid()
    czis.write(path, blocks)
    with open_slide(path) as slide:
        convert(slide, tmp_path / "copy.tif", compression="deflate")
    with open_slide(tmp_path / "copy.tif") as copy:
        np.testing.assert_array_equal(copy.levels[0][...], base)


XML = """<ImageDocument><Metadata><Information><User><DisplayName>Dr Who</DisplayName></User>
<Image><AcquisitionDateAndTime>2020-01-02T03:04:05</AcquisitionDateAndTime></Image>
<Instrument><Microscopes><Microscope Name="Axioscan 7"/></Microscopes>
<Objectives><Objective><NominalMagnification>20</NominalMagnification></Objective></Objectives>
</Instrument></Information><Scaling><Items>
<Distance Id="X"><Value>2.5e-07</Value></Distance><Distance Id="Y"><Value>2.6e-07</Value></Distance>
</Items></Scaling></Metadata></ImageDocument>"""


def test_fields(path):
    czis.write(path, pyramid()[1], XML)
    with open_slide(path, "cpu") as slide:
        assert slide.mpp == (0.25, 0.26)
        assert slide.objective == 20
        assert slide.metadata["scanner"] == "Axioscan 7"
        assert slide.metadata["scan_date"] == "2020-01-02T03:04:05"
        assert "Dr Who" in str(slide.metadata)
        assert "Dr Who" not in str(masked(slide.metadata))


def test_unsupported_pixel_types(path):
    czis.write(path, [Block(np.zeros((9, 9, 1), "complex64"))])
    with pytest.raises(UnsupportedSlideError, match="unsupported type"):
        open_slide(path)
    czis.write(path, [Block(np.zeros((9, 9, 1), "uint8"), compression=77)])
    with pytest.raises(UnsupportedSlideError, match=r"code 77"):
        open_slide(path)


def test_a_cut_off_file(path):
    czis.write(path, pyramid()[1])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptSlideError, match="truncated"):
        open_slide(path)


def test_lost_image_leaves_others_intact(path):
    base, blocks = pyramid()
    czis.write(path, blocks[:20])
    data = bytearray(path.read_bytes())
    second = data.index(b"ZISRAWSUBBLOCK", data.index(b"ZISRAWSUBBLOCK") + 1)
    data[second + 40 : second + 48] = struct.pack("<q", 1 << 40)
    path.write_bytes(data)
    with open_slide(path, "cpu") as slide:
        assert "1 image(s) are missing" in slide.layout.problems[0]
        np.testing.assert_array_equal(slide.levels[0][:64, :64], base[:64, :64])
        with pytest.raises(TileError):
            slide.levels[0][:64, 64:80]


@given(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=8), st.booleans())
def test_damage(tmp_path_factory, place, data, early):
    path = tmp_path_factory.getbasetemp() / "damaged.czi"
    czis.write(path, pyramid()[1][:3], XML)
    content = bytearray(path.read_bytes())
    directory = content.index(b"ZISRAWDIRECTORY")
    place = place % 120 if early else directory + place % (len(content) - directory)
    content[place : place + len(data)] = data
    path.write_bytes(content)
    with suppress(SlideError), open_slide(path, "cpu") as slide, suppress(TileError):
        slide.read_region((0, 0), (64, 64))


def test_a_head_alone(path):
    path.write_bytes(b"ZISRAWFILE\0\0\0\0\0\0")
    with pytest.raises(CorruptSlideError, match="truncated") as caught:
        open_slide(path)
    assert str(caught.value).count(str(path)) == 1


@pytest.mark.parametrize("number", [-2, 7])
def test_channels_of_numbers_that_are_not_listed(tmp_path, number):
    path = tmp_path / "a.czi"
    channel = "<Channel Id='a' Name='DAPI'/>"
    settings = f"<DisplaySetting><Channels>{channel}</Channels></DisplaySetting>"
    xml = f"<ImageDocument><Metadata>{settings}</Metadata></ImageDocument>"
    pixels = slides.picture(40, 50, 1, "uint16")
    czis.write(path, [Block(pixels, c=number)], xml)
    with open_slide(path) as slide:
        assert [each.name for each in slide.channels] == ["channel 0"]
        np.testing.assert_array_equal(slide.read_region((0, 0), (50, 40)), pixels)
