"""Transfer syntaxes and photometric interpretations of DICOM, against wsidicom and pydicom."""

import io

import numpy as np
import pytest
from PIL import Image
from pydicom import dcmread
from pydicom.pixels import apply_color_lut, pixel_array
from pydicom.uid import JPEGBaseline8Bit, RLELossless
from wsidicom import WsiDicom

from napari_wsigpu import convert, open_slide
from napari_wsigpu.model.errors import CorruptSlideError, TileError, UnsupportedSlideError
from tests.writers import dicomslides, slides

PIXELS = slides.picture(300, 500)
GRAY = slides.picture(300, 500, 1)
SIDE = dicomslides.SIDE
LOSSY = "jpeg xl lossy", "jpeg xl of jpeg"


def save(folder, pixels, kind="raw", name="a.dcm", **options):
    return dicomslides.save(folder / name, dicomslides.instance(pixels, kind, **options))


def read(path):
    with open_slide(path, device="cpu") as slide:
        assert slide.layout.problems == ()
        return slide.levels[0][...]


def by_wsidicom(folder):
    with WsiDicom.open(folder) as oracle:
        found = np.asarray(oracle.read_region((0, 0), 0, oracle.size.to_tuple()))
    return found.reshape(*found.shape[:2], -1)


def by_pydicom(path, shape):
    """Decode the frames with pydicom, and join them."""
    frames = pixel_array(path)
    return joined(frames.reshape(len(frames), SIDE, SIDE, -1), shape)


def joined(frames, shape):
    rows, columns = -(-shape[0] // SIDE), -(-shape[1] // SIDE)
    grid = frames.reshape(rows, columns, SIDE, SIDE, -1).swapaxes(1, 2)
    return grid.reshape(rows * SIDE, columns * SIDE, -1)[: shape[0], : shape[1]]


@pytest.mark.parametrize("kind", dicomslides.FURTHER)
def test_transfer_syntaxes(tmp_path, kind):
    pixels = GRAY if "gray" in kind else PIXELS
    found = read(save(tmp_path, pixels, kind))
    if kind not in LOSSY:
        np.testing.assert_array_equal(found, pixels)
        if kind != "htj2k rpcl":  # wsidicom doesn't read it with the colour transform
            np.testing.assert_array_equal(found, by_wsidicom(tmp_path))
    else:  # nor these photometric interpretations
        (tmp_path / "jpeg").mkdir()
        jpeg = read(save(tmp_path / "jpeg", pixels, "jpeg ycbcr")).astype(int)
        assert abs(found - jpeg).mean() < (1 if kind == "jpeg xl of jpeg" else 6)


@pytest.mark.parametrize("kind", ["rle gray", "htj2k gray", "jpeg xl gray", "raw gray"])
def test_16_bits(tmp_path, kind):
    pixels = slides.picture(90, 130, 1, "uint16")
    path = save(tmp_path, pixels, kind)
    np.testing.assert_array_equal(read(path), pixels)
    expected = by_pydicom(path, pixels.shape) if kind == "rle gray" else by_wsidicom(tmp_path)
    np.testing.assert_array_equal(expected, pixels)


def test_rle_of_ycbcr(tmp_path):
    path = save(tmp_path, PIXELS, "rle", PhotometricInterpretation="YBR_FULL")
    expected = by_pydicom(path, PIXELS.shape)  # converts to RGB
    assert abs(read(path).astype(int) - expected).max() <= 1


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:0"])
@pytest.mark.filterwarnings("ignore:The .0028,0004. 'Photometric Interpretation' value is 'RGB'")
def test_jfif_files_are_ycbcr_even_if_labeled_rgb(tmp_path, monkeypatch, subsampling):
    def jfif(tile):
        file = io.BytesIO()
        Image.fromarray(tile).save(file, "jpeg", quality=90, subsampling=subsampling)
        return file.getvalue()

    monkeypatch.setitem(dicomslides.KINDS, "jfif", (JPEGBaseline8Bit, "RGB", jfif))
    path = save(tmp_path, PIXELS, "jfif")
    found = read(path).astype(int)
    assert abs(found - by_pydicom(path, PIXELS.shape)).mean() < 1
    assert abs(found - PIXELS).mean() < 6


@pytest.mark.parametrize("kind", ["raw gray", "rle gray", "jpeg gray"])
def test_monochrome1_is_shown_inverted(tmp_path, kind):
    path = save(tmp_path, GRAY, kind, PhotometricInterpretation="MONOCHROME1")
    with open_slide(path, device="cpu") as slide:
        assert slide.layout.levels[0].encoding.white_is_zero
        stored = slide.levels[0][...]
    convert(path, tmp_path / "shown.png")
    with Image.open(tmp_path / "shown.png") as shown:
        np.testing.assert_array_equal(np.asarray(shown), 255 - stored[..., 0])
    np.testing.assert_array_equal(stored, by_pydicom(path, GRAY.shape))


def palette(bits=8, first=0, entries=256):
    rng = np.random.default_rng(3)
    attributes = {}
    for color in ("Red", "Green", "Blue"):
        values = rng.integers(0, 1 << bits, entries).astype(f"u{bits // 8}")
        attributes[f"{color}PaletteColorLookupTableDescriptor"] = [entries % 65536, first, bits]
        attributes[f"{color}PaletteColorLookupTableData"] = values.tobytes()
    return attributes | {"PhotometricInterpretation": "PALETTE COLOR"}


@pytest.mark.parametrize("kind", ["raw gray", "rle gray", "jpeg-ls gray", "htj2k gray"])
@pytest.mark.parametrize("table", [{}, {"bits": 16}, {"first": 20, "entries": 100}])
def test_palette(tmp_path, kind, table):
    path = save(tmp_path, GRAY, kind, **palette(**table))
    dataset = dcmread(path)
    expected = apply_color_lut(GRAY[..., 0], dataset)
    if table.get("bits") == 16:
        expected = expected >> 8
    with open_slide(path, device="cpu") as slide:
        assert slide.layout.rgb
        np.testing.assert_array_equal(slide.levels[0][...], expected)
        convert(path, tmp_path / "copy.tif")
    np.testing.assert_array_equal(read(tmp_path / "copy.tif"), expected)


def test_palette_without_a_table(tmp_path):
    path = save(tmp_path, GRAY, "raw gray", PhotometricInterpretation="PALETTE COLOR")
    with pytest.raises(CorruptSlideError, match=r"a\.dcm"):
        open_slide(path)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("sparse", [False, True])
def test_samples_stored_plane_by_plane(tmp_path, monkeypatch, dtype, sparse):
    monkeypatch.setitem(
        dicomslides.FURTHER, "raw planar", (*dicomslides.KINDS["raw"][:2], dicomslides.planar)
    )
    pixels = slides.picture(300, 500, 3, dtype)
    path = save(tmp_path, pixels, "raw planar", sparse=sparse, PlanarConfiguration=1)
    np.testing.assert_array_equal(read(path), pixels)
    np.testing.assert_array_equal(by_pydicom(path, pixels.shape), pixels)
    with open_slide(path) as slide:
        assert slide.layout.rgb


def test_encapsulated_frames_ignore_the_planar_configuration(tmp_path):
    """RLE always stores planes, and the other compressions say it themselves (PS3.5, 8.2)."""
    for index, kind in enumerate(("rle", "jpeg rgb", "jpeg-ls", "htj2k")):
        found = read(save(tmp_path, PIXELS, kind, f"{index}.dcm", SeriesInstanceUID=f"1.{index}"))
        options = {"PlanarConfiguration": 1, "SeriesInstanceUID": f"2.{index}"}
        again = read(save(tmp_path, PIXELS, kind, f"{index} planar.dcm", **options))
        np.testing.assert_array_equal(again, found)


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        ("raw gray", {"PixelRepresentation": 1}),
        ("raw", {"PhotometricInterpretation": "YBR_FULL"}),
        ("jpeg gray", palette()),
        ("jpeg xl gray", {"PhotometricInterpretation": "XYB"}),
        ("rle", {"PhotometricInterpretation": "YBR_ICT"}),
    ],
)
def test_unsupported_samples_are_refused_at_opening(tmp_path, kind, attributes):
    path = save(tmp_path, GRAY if "gray" in kind else PIXELS, kind, **attributes)
    with pytest.raises(UnsupportedSlideError, match=r"a\.dcm' can't be decoded: .* not supported"):
        open_slide(path)


def test_wrong_number_of_frames_is_quoted_whole(tmp_path):
    path = save(tmp_path, PIXELS, "raw", NumberOfFrames=2**31 - 1)
    with pytest.raises(CorruptSlideError, match=r"number of frames 2147483647 for .*FULL\); get"):
        open_slide(path)


def test_unusual_allocation_is_named(tmp_path):
    path = save(tmp_path, PIXELS, "raw", BitsAllocated=12)
    with pytest.raises(UnsupportedSlideError, match=r"8 of 12 bits .* use 8 or 16 bits"):
        open_slide(path)


@pytest.mark.parametrize("kind", ["rle", "rle gray", "htj2k", "jpeg xl"])
def test_damaged_frames_raise_tile_errors(tmp_path, kind):
    pixels = GRAY if "gray" in kind else PIXELS
    content = save(tmp_path, pixels[:64, :64], kind).read_bytes()
    start = content.index(b"\xe0\x7f\x10\x00O") + 12 + 12 + 8
    rng = np.random.default_rng(1)
    outcomes = set()
    for number in range(60):
        damaged = bytearray(content)
        for place in start + rng.integers(0, 70 if number % 2 else len(content) - start - 8, 3):
            damaged[place] = rng.integers(0, 256)
        path = tmp_path / "b" / "b.dcm"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(damaged)
        try:
            read(path)
            outcomes.add("read")
        except TileError:
            outcomes.add("refused")
    assert "refused" in outcomes


def test_rle_header_that_claims_other_segments(tmp_path, monkeypatch):
    def wrong(tile):
        return dicomslides.rle(tile[..., :1])

    monkeypatch.setitem(dicomslides.FURTHER, "rle", (RLELossless, "RGB", wrong))
    with pytest.raises(TileError, match="1 RLE segments"):
        read(save(tmp_path, PIXELS, "rle"))
