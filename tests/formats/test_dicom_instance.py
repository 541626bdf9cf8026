"""DICOM slides against OpenSlide, wsidicom and the pixels that were written."""

import importlib
import json
import math
import os
import pickle
import re
import shutil
import tracemalloc
import zlib
from functools import partial

import numpy as np
import openslide
import pytest

from napari_wsigpu import Slide, open_slide
from napari_wsigpu.compat.cucim import CuImage, CuImageOpenError
from napari_wsigpu.formats.describe import describe, describe_source
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    NotASlideError,
    SlideChangedError,
    SlideError,
    TileError,
    UnsupportedSlideError,
)
from napari_wsigpu.model.layout import SlideFile
from napari_wsigpu.storage.file_source import FileSource
from tests import oracles
from tests.writers import slides

INSTALL = 'the packages for DICOM are not installed: pip install "napari-wsigpu[dicom]"'
pydicom = pytest.importorskip("pydicom", reason=INSTALL)
wsidicom = pytest.importorskip("wsidicom", reason=INSTALL)

from wsidicom.file import OffsetTableType  # noqa: E402

from tests.writers import dicomslides  # noqa: E402

PIXELS = slides.picture(300, 500)
GRAY = slides.picture(300, 500, 1)
OPENSLIDES = [kind for kind in dicomslides.KINDS if "gray" not in kind and kind != "jpeg-ls"]
LOSSLESS = ["raw", "raw gray", "jpeg-ls", "jpeg-ls gray", "jpeg 2000 rct"]


def picture(kind):
    return GRAY if "gray" in kind else PIXELS


def save(path, pixels=PIXELS, *arguments, **options):
    return dicomslides.save(path, dicomslides.instance(pixels, *arguments, **options))


def whole(slide, level=0):
    return slide.levels[level][...]


def wsidicom_levels(folder):
    with wsidicom.WsiDicom.open(folder) as slide:
        found = [
            np.asarray(slide.read_region((0, 0), level.level, level.size.to_tuple()))
            for level in slide.pyramid
        ]
    return [pixels.reshape(*pixels.shape[:2], -1) for pixels in found]


class TestPixels:
    @pytest.mark.parametrize("table", ["basic", "extended", "none"])
    @pytest.mark.parametrize("kind", dicomslides.KINDS)
    def test_levels(self, tmp_path, kind, table):
        written = dicomslides.write_slide(tmp_path, picture(kind), kind=kind, table=table)
        expected = wsidicom_levels(tmp_path)
        with open_slide(tmp_path / "7.dcm") as slide:
            assert slide.level_count == len(written) == len(expected)
            for level in range(slide.level_count):
                np.testing.assert_array_equal(whole(slide, level), expected[level])
                if kind in LOSSLESS:
                    np.testing.assert_array_equal(whole(slide, level), written[level])

    @pytest.mark.parametrize("kind", OPENSLIDES)
    def test_as_openslide_reads_them(self, tmp_path, kind):
        dicomslides.write_slide(tmp_path, PIXELS, kind=kind)
        path = tmp_path / "9.dcm"
        with open_slide(path) as slide:
            found = slide.level_dimensions, slide.level_downsamples
            assert found == oracles.openslide_shape(path)
            for level in range(slide.level_count):
                np.testing.assert_array_equal(
                    whole(slide, level), oracles.openslide_level(path, level)
                )

    def test_uint16(self, tmp_path):
        pixels = slides.picture(90, 130, 1, "uint16")
        with open_slide(save(tmp_path / "a.dcm", pixels, "raw gray")) as slide:
            assert slide.levels[0].dtype == np.uint16
            np.testing.assert_array_equal(whole(slide), pixels)

    def test_a_folder_is_its_slide(self, tmp_path):
        written = dicomslides.write_slide(tmp_path, PIXELS, kind="raw")
        with open_slide(tmp_path) as slide:
            assert slide.path == str(tmp_path)
            np.testing.assert_array_equal(whole(slide, 2), written[2])

    @pytest.mark.parametrize("kind", OPENSLIDES)
    def test_by_a_device(self, tmp_path, host_gpu, kind):
        dicomslides.write_slide(tmp_path, PIXELS, kind=kind)
        path = tmp_path / "9.dcm"
        with open_slide(path, device="cpu") as slide:
            expected = [whole(slide, level) for level in range(3)]
        with open_slide(path, device="cuda") as slide:
            for level in range(3):
                difference = whole(slide, level).astype(int) - expected[level]
                assert abs(difference).max() <= 3
            by_device = slide.stats()["decoded"].get("nvimagecodec", 0)
        assert (by_device > 0) == (kind != "raw")


class TestWrittenByWsidicom:
    @pytest.fixture
    def save_again(self, tmp_path):
        dicomslides.write_slide(tmp_path / "first", PIXELS)
        folder = tmp_path / "second"

        def save_again(**options):
            with wsidicom.WsiDicom.open(tmp_path / "first") as slide:
                slide.save(folder, **options)
            return folder

        return save_again

    def check(self, folder, files):
        expected = wsidicom_levels(folder)
        with open_slide(folder) as slide:
            assert slide.layout.problems == ()
            assert len(slide.layout.files) == files
            assert slide.mpp == (0.25, 0.5)
            for level, pixels in enumerate(expected):
                np.testing.assert_array_equal(whole(slide, level), pixels)

    @pytest.mark.parametrize("table", ["BASIC", "EXTENDED", "EMPTY"])
    def test_lists_of_frames(self, save_again, table):
        self.check(save_again(offset_table=OffsetTableType[table]), files=3)

    def test_concatenations(self, save_again):
        parts = wsidicom.ConcatenationByFrames(9)
        self.check(save_again(concatenation=parts), files=5 + 2 + 1)


class TestSparse:
    MISSING = (0, 7, 13, 39)

    def expected(self):
        pixels = PIXELS.copy()
        for index in self.MISSING:
            y, x = (64 * place for place in divmod(index, 8))
            pixels[y : y + 64, x : x + 64] = 255
        return pixels

    @pytest.mark.parametrize("kind", ["raw", "jpeg 2000 rct"])
    def test_missing_tiles_are_background(self, tmp_path, kind):
        path = save(tmp_path / "a.dcm", PIXELS, kind, sparse=True, missing=self.MISSING)
        with open_slide(path) as slide:
            np.testing.assert_array_equal(whole(slide), self.expected())
            assert slide.layout.problems == ()
            assert slide.stats()["failed"] == 0
        np.testing.assert_array_equal(wsidicom_levels(tmp_path)[0], self.expected())

    def test_frames_in_any_order(self, tmp_path):
        dataset = dicomslides.instance(PIXELS, "raw", sparse=True)
        order = np.random.default_rng(0).permutation(dataset.NumberOfFrames)
        groups = list(dataset.PerFrameFunctionalGroupsSequence)
        frames = np.frombuffer(dataset.PixelData, np.uint8).reshape(len(order), -1)
        dataset.PerFrameFunctionalGroupsSequence = [groups[index] for index in order]
        dataset.PixelData = frames[order].tobytes()
        with open_slide(dicomslides.save(tmp_path / "a.dcm", dataset)) as slide:
            np.testing.assert_array_equal(whole(slide), PIXELS)

    def test_frames_off_the_grid(self, tmp_path):
        dataset = dicomslides.instance(PIXELS, "raw", sparse=True)
        place = dataset.PerFrameFunctionalGroupsSequence[3].PlanePositionSlideSequence[0]
        place.ColumnPositionInTotalImagePixelMatrix += 5
        path = dicomslides.save(tmp_path / "a.dcm", dataset)
        with pytest.raises(UnsupportedSlideError, match="regular grid"):
            open_slide(path)

    def test_frames_outside_of_the_image(self, tmp_path):
        dataset = dicomslides.instance(PIXELS, "raw", sparse=True)
        place = dataset.PerFrameFunctionalGroupsSequence[0].PlanePositionSlideSequence[0]
        place.ColumnPositionInTotalImagePixelMatrix += 64 * 1000
        with open_slide(dicomslides.save(tmp_path / "a.dcm", dataset)) as slide:
            assert "1 frames of 'a.dcm' lie outside" in slide.layout.problems[0]
            expected = PIXELS.copy()
            expected[:64, :64] = 255
            np.testing.assert_array_equal(whole(slide), expected)


class TestSeveralFilesALevel:
    @pytest.mark.parametrize("sparse", [False, True])
    @pytest.mark.parametrize("kind", ["raw", "jpeg ycbcr"])
    def test_a_concatenation(self, tmp_path, kind, sparse, host_gpu):
        for number, (first, past) in enumerate([(0, 11), (11, 27), (27, 40)], start=1):
            part = (first, past, number)
            save(tmp_path / f"{9 - number}.dcm", PIXELS, kind, part=part, sparse=sparse)
        for device in ("cpu", "cuda"):
            with open_slide(tmp_path / "8.dcm", device=device) as slide:
                assert len(slide.layout.files) == 3
                found = whole(slide)
                assert slide.layout.problems == ()
            if kind == "raw":
                np.testing.assert_array_equal(found, PIXELS)
            else:
                expected = oracles.openslide_level(tmp_path / "8.dcm")
                assert abs(found.astype(int) - expected).max() <= 3

    def test_frames_at_one_position_are_reported(self, tmp_path):
        dataset = dicomslides.instance(PIXELS, "raw", sparse=True)
        first, second = dataset.PerFrameFunctionalGroupsSequence[:2]
        second.PlanePositionSlideSequence = first.PlanePositionSlideSequence
        with open_slide(dicomslides.save(tmp_path / "a.dcm", dataset)) as slide:
            assert "Later frames of 'a.dcm' hide 1 at" in " ".join(slide.layout.problems)

    def test_lost_part_is_reported(self, tmp_path):
        total = {"InConcatenationTotalNumber": 2}
        save(tmp_path / "a.dcm", PIXELS, "raw", part=(0, 16, 1), **total)
        with open_slide(tmp_path) as slide:
            assert [text.split(" of ")[0] for text in slide.layout.problems] == [
                "1",
                "24",
            ]
            np.testing.assert_array_equal(whole(slide)[:128], PIXELS[:128])
            assert (whole(slide)[128:] == 255).all()

    def test_optical_paths_are_channels(self, tmp_path):
        planes = [slides.picture(100, 150, 1), 255 - slides.picture(100, 150, 1)]
        for index, name in enumerate(["DAPI", "CD3"]):
            path = dicomslides.item(OpticalPathIdentifier=str(index), OpticalPathDescription=name)
            save(tmp_path / f"{index}.dcm", planes[index], "raw gray", OpticalPathSequence=[path])
        with open_slide(tmp_path) as slide:
            assert [channel.name for channel in slide.channels] == ["DAPI", "CD3"]
            np.testing.assert_array_equal(whole(slide), np.concatenate(planes, axis=2))

    def test_optical_paths_and_focal_planes_of_one_file(self, tmp_path):
        planes = [slides.picture(100, 150, 1) // (index + 1) for index in range(4)]
        dataset = dicomslides.instance(planes[0], "raw gray")
        dataset.OpticalPathSequence = [
            dicomslides.item(OpticalPathIdentifier=name) for name in "AB"
        ]
        dataset.NumberOfOpticalPaths = dataset.TotalPixelMatrixFocalPlanes = 2
        measures = dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
        measures.SpacingBetweenSlices = 0.002
        frames = [tile for plane in planes for tile in dicomslides.tiles_of(plane)]
        dataset.NumberOfFrames = len(frames)
        dataset.PixelData = b"".join(tile.tobytes() for tile in frames)
        with open_slide(dicomslides.save(tmp_path / "a.dcm", dataset)) as slide:
            assert slide.layout.other_planes == 1
            for z in range(2):
                expected = np.concatenate([planes[z], planes[2 + z]], axis=2)
                np.testing.assert_array_equal(whole(slide.plane(z)), expected)
            assert (slide.planes.z, slide.planes.z_spacing) == (1, 2)

    def test_copies_of_a_file_are_one(self, tmp_path):
        written = dicomslides.write_slide(tmp_path, PIXELS, kind="raw")
        shutil.copy(tmp_path / "9.dcm", tmp_path / "1.dcm")
        for name in ("1.dcm", "9.dcm"):
            with open_slide(tmp_path / name) as slide:
                assert slide.level_count == 3
                np.testing.assert_array_equal(whole(slide), written[0])

    def test_files_of_another_series(self, tmp_path):
        dicomslides.write_slide(tmp_path, PIXELS, kind="raw")
        save(tmp_path / "a.dcm", PIXELS[:90], "raw", SeriesInstanceUID="1.2.3")
        with open_slide(tmp_path) as slide:
            assert slide.level_count == 3
            assert slide.layout.problems[0].startswith("The folder holds 1 more DICOM series")
        with open_slide(tmp_path / "a.dcm") as slide:
            assert slide.level_dimensions == ((500, 90),)
            assert slide.layout.problems == ()

    def test_other_files_are_left_alone(self, tmp_path):
        dicomslides.write_slide(tmp_path, PIXELS, kind="raw")
        (tmp_path / "notes.txt").write_text("DICM")
        (tmp_path / "folder.dcm").mkdir()
        (tmp_path / "DICOMDIR").write_bytes(bytes(128) + b"DICM" + bytes(99))
        assert describe(tmp_path).problems == ()


class TestMetadata:
    @pytest.fixture
    def slide(self, tmp_path):
        dicomslides.write_slide(tmp_path, PIXELS, BarcodeValue=None)
        label, overview, thumbnail = (slides.picture(50, 40 + step) for step in range(3))
        save(tmp_path / "l.dcm", label, "raw", flavor="LABEL", BarcodeValue="S24-0001")
        save(tmp_path / "o.dcm", overview, "raw", flavor="OVERVIEW")
        save(tmp_path / "t.dcm", thumbnail, "raw", flavor="THUMBNAIL")
        with open_slide(tmp_path / "9.dcm") as slide:
            yield slide

    def test_normalised(self, slide):
        properties = oracles.openslide_properties(slide.path)
        assert slide.vendor == properties[openslide.PROPERTY_NAME_VENDOR] == "dicom"
        for found, name in (
            (slide.mpp[0], openslide.PROPERTY_NAME_MPP_X),
            (slide.mpp[1], openslide.PROPERTY_NAME_MPP_Y),
            (slide.objective, openslide.PROPERTY_NAME_OBJECTIVE_POWER),
        ):
            assert math.isclose(found, float(properties[name]), rel_tol=1e-9)
        assert slide.mpp == (0.25, 0.5)
        assert slide.layout.scanner == "Acme Scan 9"
        assert slide.layout.scan_date == "2024-02-29T13:14:15.500000"
        assert slide.layout.barcode == "S24-0001"
        assert slide.layout.problems == ()

    def test_every_property_that_openslide_has(self, slide):
        properties = oracles.openslide_properties(slide.path)
        named = {name: text for name, text in properties.items() if name.startswith("dicom.")}
        assert len(named) > 40
        for name, text in named.items():
            found = slide.metadata
            for part in re.findall(r"\w+", name):
                found = found[int(part) if part.isdigit() else part]
            if isinstance(found, int | float):
                assert math.isclose(found, float(text), rel_tol=1e-6), name
            else:
                assert found == text, name

    def test_it_is_json(self, slide):
        text = json.dumps(slide.metadata, allow_nan=False)
        assert "Müller^Ada" in json.loads(text)["dicom"]["PatientName"]
        assert "PixelData" not in text
        assert "ICCProfile" not in text

    def test_icc_profiles(self, slide):
        assert slide.icc_profile == dicomslides.ICC
        with openslide.OpenSlide(slide.path) as other:
            assert other.color_profile.tobytes() == slide.icc_profile

    def test_associated_images(self, slide):
        with openslide.OpenSlide(slide.path) as other:
            assert set(other.associated_images) == {"label", "macro"} | {"thumbnail"}
            assert set(slide.associated_images) == set(other.associated_images)
        for step, name in enumerate(("label", "macro", "thumbnail")):
            expected = slides.picture(50, 40 + step)
            np.testing.assert_array_equal(slide.associated_images[name].read(), expected)
            offset, length = slide.layout.associated[step].icc
            profile = slide._source.read([(offset, length)])[0]
            assert bytes(profile) == dicomslides.ICC

    def test_slide_without_metadata(self, tmp_path):
        absent = (
            "SharedFunctionalGroupsSequence",
            "OpticalPathSequence",
            "Manufacturer",
            "ManufacturerModelName",
            "AcquisitionDateTime",
            "BarcodeValue",
            "DimensionOrganizationType",
            "ImagedVolumeWidth",
            "ImagedVolumeHeight",
        )
        save(tmp_path / "a.dcm", PIXELS[:64, :64], "raw", **dict.fromkeys(absent))
        with open_slide(tmp_path) as slide:
            found = slide.metadata
            names = ("scanner", "objective", "mpp", "scan_date", "barcode")
            assert [found[name] for name in names] == [None] * 5
            assert slide.icc_profile is None
            np.testing.assert_array_equal(whole(slide), PIXELS[:64, :64])

    def test_missing_required_attribute(self, tmp_path):
        path = save(tmp_path / "a.dcm", PIXELS, "jpeg rgb", ImageType=None)
        with pytest.raises(UnsupportedSlideError, match=r"a\.dcm' lacks ImageType, which a DICOM"):
            open_slide(path)

    def test_unsupported_image_type(self, tmp_path):
        kind = ["ORIGINAL", "PRIMARY", "PROBE", "NONE"]
        path = save(tmp_path / "a.dcm", PIXELS, "jpeg rgb", ImageType=kind)
        with pytest.raises(UnsupportedSlideError, match="has the image type 'PROBE'"):
            open_slide(path)

    @pytest.mark.parametrize("spacing", [(0, 0.001), (-0.5, 0.5), (0.5,), "NaN", "1E999", "wide"])
    def test_impossible_spacing(self, tmp_path, spacing):
        path = save(tmp_path / "a.dcm", PIXELS, "raw", spacing=(0.12345678, 0.87654321))
        texts = [spacing] * 2 if isinstance(spacing, str) else [str(value) for value in spacing]
        old, new = b"0.12345678\\0.87654321", "\\".join(texts).encode()
        content = path.read_bytes()
        assert content.count(old) == 1
        path.write_bytes(content.replace(old, new.ljust(len(old))))
        with open_slide(path) as slide:
            # The size of the whole image says it, too.
            assert slide.mpp == pytest.approx((876.54321, 123.45678))
            *_, problem = slide.layout.problems
            assert problem == "'a.dcm' has an impossible pixel spacing, which is ignored."
            np.testing.assert_array_equal(whole(slide), PIXELS)

    def test_level_of_another_image_is_left_out(self, tmp_path):
        dicomslides.write_slide(tmp_path, PIXELS, kind="raw")
        save(tmp_path / "a.dcm", PIXELS[:90], "raw")
        save(tmp_path / "b.dcm", GRAY[::4, ::4], "raw gray", TotalPixelMatrixFocalPlanes=None)
        layout = describe(tmp_path)
        assert len(layout.levels) == 3
        assert [text.split(" pixels")[0] for text in layout.problems][:1] == [
            "The level of 500 x 90"
        ]

    def test_levels_of_another_pyramid_are_left_out(self, tmp_path):
        dicomslides.write_slide(tmp_path, PIXELS, kind="raw", PyramidUID="1.2.3")
        save(tmp_path / "a.dcm", PIXELS[::3, ::3], "raw", PyramidUID="1.2.4")
        save(tmp_path / "l.dcm", PIXELS[:50, :50], "raw", flavor="LABEL")
        layout = describe(tmp_path / "8.dcm")
        assert [level.width for level in layout.levels] == [500, 250, 125]
        assert [item.name for item in layout.associated] == ["label"]

    def test_a_long_text_is_left_out(self, tmp_path):
        save(tmp_path / "a.dcm", PIXELS, "raw", LabelText="x" * 70_000)
        layout = describe(tmp_path)
        assert layout.problems == ("The attribute (2200,0002) is too long and is left out.",)
        assert "LabelText" not in layout.metadata["dicom"]


def test_named_file_takes_precedence_over_duplicates(tmp_path):
    pictures = {"a.dcm": PIXELS, "b.dcm": PIXELS[::-1].copy()}
    for name, pixels in pictures.items():
        dicomslides.save(tmp_path / name, dicomslides.instance(pixels, "raw"))
    for name, pixels in pictures.items():
        with open_slide(tmp_path / name) as slide:
            np.testing.assert_array_equal(whole(slide, 0), pixels)
            [problem] = slide.layout.problems
            assert problem.startswith("Another file is left out")
    with open_slide(tmp_path) as slide:
        np.testing.assert_array_equal(whole(slide, 0), PIXELS)
        assert len(slide.layout.problems) == 1


def test_pickled_and_rebuilt(tmp_path):
    written = dicomslides.write_slide(tmp_path, PIXELS, kind="raw")
    with open_slide(tmp_path) as slide, pickle.loads(pickle.dumps(slide)) as twin:
        assert isinstance(twin, Slide)
        np.testing.assert_array_equal(whole(twin, 1), written[1])
        with pytest.raises(AttributeError):
            slide.layout.files = ()


def test_leaves_no_handle(tmp_path, leaves_nothing):
    dicomslides.write_slide(tmp_path, PIXELS)
    with open_slide(tmp_path) as slide:
        whole(slide)


def test_cucim_opens_tiff_only(tmp_path, leaves_nothing):
    dicomslides.write_slide(tmp_path, PIXELS)
    with pytest.raises(CuImageOpenError, match="It is not a TIFF file"):
        CuImage(tmp_path / "9.dcm")


def test_a_changed_file_is_noticed(tmp_path):
    dicomslides.write_slide(tmp_path, PIXELS, kind="raw")
    with open_slide(tmp_path / "9.dcm") as slide:
        os.utime(tmp_path / "8.dcm", ns=(0, 0))
        whole(slide)
        with pytest.raises(SlideChangedError, match=r"8\.dcm"):
            whole(slide, 1)


class TestRefused:
    def test_another_kind_of_dicom(self, tmp_path):
        dataset = pydicom.dcmread(pydicom.data.get_testdata_file("CT_small.dcm"))
        dataset.save_as(tmp_path / "ct.dcm")
        with pytest.raises(
            NotASlideError, match=r"ct\.dcm' is a DICOM file, but not a whole-slide"
        ):
            open_slide(tmp_path / "ct.dcm")

    @pytest.mark.parametrize("options", [{"table": "basic"}, {"table": "none"}])
    def test_fragments(self, tmp_path, options):
        save(tmp_path / "a.dcm", PIXELS, "jpeg ycbcr", fragments=2, **options)
        with pytest.raises((UnsupportedSlideError, CorruptSlideError), match="fragment"):
            open_slide(tmp_path / "a.dcm")

    @pytest.mark.parametrize("photometric", ["YBR_FULL", "PALETTE COLOR", "HSV"])
    def test_colours(self, tmp_path, photometric):
        save(tmp_path / "a.dcm", PIXELS, "raw", PhotometricInterpretation=photometric)
        with pytest.raises(UnsupportedSlideError, match=r"a\.dcm"):
            open_slide(tmp_path / "a.dcm")

    @pytest.mark.parametrize(
        ("kind", "written", "claimed"),
        [
            ("jpeg ycbcr", b"1.2.840.10008.1.2.4.50", b"1.2.840.10008.1.2.4.57"),
        ],
        ids=["lossless JPEG"],
    )
    def test_transfer_syntaxes(self, tmp_path, kind, written, claimed):
        path = save(tmp_path / "a.dcm", PIXELS, kind)
        content = path.read_bytes()
        assert content.count(written) == 1
        path.write_bytes(content.replace(written, claimed))
        with pytest.raises(UnsupportedSlideError, match=r"its transfer syntax, .*, is not supp"):
            open_slide(path)

    def test_a_deflated_header_is_not_inflated(self, tmp_path, monkeypatch):
        dataset = dicomslides.instance(PIXELS, "raw")
        dataset.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
        path = dicomslides.save(tmp_path / "a.dcm", dataset)
        monkeypatch.setattr(zlib, "decompress", lambda *_: pytest.fail("was inflated"))
        with pytest.raises(UnsupportedSlideError, match="Deflated"):
            open_slide(path)

    def test_only_a_label(self, tmp_path):
        save(tmp_path / "a.dcm", PIXELS, "raw", flavor="LABEL")
        with pytest.raises(UnsupportedSlideError, match="None of its files is a level"):
            open_slide(tmp_path / "a.dcm")

    def test_a_bad_level_is_left_out(self, tmp_path):
        dicomslides.write_slide(tmp_path, PIXELS, kind="raw")
        path = tmp_path / "8.dcm"
        path.write_bytes(path.read_bytes()[:700])
        with open_slide(tmp_path / "9.dcm") as slide:
            assert slide.level_count == 2
            assert slide.layout.problems == (
                "Another file is truncated: its 700 bytes end before its first frame; "
                "get a fresh copy of it.",
            )


class TestHostile:
    """Claims that no file keeps; memory, time and the sentence are checked by the probe."""

    @pytest.fixture
    def run_probe(self):
        pytest.importorskip("resource", reason="memory can't be limited on this system")
        return importlib.import_module("tests.test_bad_input").run_probe

    def test_cut_frames_fail_by_name(self, tmp_path):
        path = save(tmp_path / "a.dcm", PIXELS, "raw")
        path.write_bytes(path.read_bytes()[:-100_000])
        with open_slide(path) as slide:
            assert "is truncated" in slide.layout.problems[0]
            np.testing.assert_array_equal(whole_rows(slide, 192), PIXELS[:192])
            with pytest.raises(TileError, match="level 0, row 3, column 7"):
                whole(slide)

    @pytest.mark.parametrize(("kind", "value"), [("OB", b"ab" * 8), ("UL", [2, 3])])
    def test_invalid_counts(self, tmp_path, kind, value):
        """The parser would multiply them by the number of tiles."""
        dataset = dicomslides.instance(PIXELS[:90, :90])
        dataset.add_new("TotalPixelMatrixFocalPlanes", kind, value)
        with pytest.raises(
            CorruptSlideError, match="value of TotalPixelMatrixFocalPlanes is impossible"
        ):
            open_slide(dicomslides.save(tmp_path / "a.dcm", dataset))

    def test_claims(self, tmp_path, run_probe):
        claims = {
            "huge": {"TotalPixelMatrixColumns": 2**32 - 1, "TotalPixelMatrixRows": 2**32 - 1},
            "tiles": {"Rows": 65535, "Columns": 65535},
            "nothing": {"TotalPixelMatrixRows": 0},
            "no tile": {"Rows": 0},
            "frames": {"NumberOfFrames": 2**31 - 1},
            "negative": {"NumberOfFrames": -5},
            "paths": {"NumberOfOpticalPaths": 2**31},
            "planes": {"TotalPixelMatrixFocalPlanes": 2**31},
            "bits": {"BitsAllocated": 64, "BitsStored": 64},
            "samples": {"SamplesPerPixel": 60_000},
            "long": {"LabelText": "x" * 20_000_000},
        }
        for kind in ("raw", "jpeg ycbcr"):
            for sparse in (False, True):
                for name, values in claims.items():
                    file = tmp_path / f"{kind} {sparse} {name}" / "a.dcm"
                    file.parent.mkdir()
                    save(file, PIXELS[:90, :90], kind, sparse=sparse, **values)
        lines = run_probe(*tmp_path.glob("*/a.dcm"))
        assert len(lines) == 4 * len(claims)

    def test_damaged_lists_of_frames_and_cuts_anywhere(self, tmp_path, run_probe):
        for table in ("basic", "extended", "none"):
            content = save(tmp_path / "a.dcm", PIXELS[:90, :90], table=table).read_bytes()
            begin = content.index(b"\xe0\x7f\x10\x00OB")
            if table == "extended":
                begin = content.index(b"\xe0\x7f\x01\x00OV")
            rng = np.random.default_rng(1)
            for index in range(12):
                damaged = bytearray(content)
                for place in begin + rng.integers(0, 140, 1 + index % 3):
                    damaged[place] = rng.choice([0, 1, 127, 255])
                (tmp_path / f"{table} {index}").mkdir()
                (tmp_path / f"{table} {index}" / "a.dcm").write_bytes(damaged)
        content = save(tmp_path / "a.dcm", PIXELS[:90, :90]).read_bytes()
        for length in range(140, len(content), len(content) // 40):
            (tmp_path / f"{length}").mkdir()
            (tmp_path / f"{length}" / "a.dcm").write_bytes(content[:length])
        assert len(run_probe(*tmp_path.glob("*/a.dcm"))) >= 36 + 40

    def test_deeply_nested(self, tmp_path):
        dataset = dicomslides.item(CodeMeaning="x")
        for _ in range(40):
            dataset = dicomslides.item(ContentSequence=[dataset])
        save(tmp_path / "a.dcm", PIXELS, "raw", ContentSequence=[dataset])
        text = json.dumps(describe(tmp_path).metadata)
        assert 10 < text.count("ContentSequence") < 20


def whole_rows(slide, height):
    return slide.read_region((0, 0), (slide.dimensions[0], height))


@pytest.mark.parametrize("lost", [2, 100, 0.5])
@pytest.mark.parametrize("fill", [b"", b"\0\0"])
def test_a_jpeg_ls_frame_that_ends_early_is_refused(tmp_path, monkeypatch, lost, fill):
    """CharLS looks for the rest of some for ever."""
    syntax, photometric, encode = dicomslides.KINDS["jpeg-ls"]

    def cut(tile):
        data = encode(tile)
        return data[: -lost if isinstance(lost, int) else -int(lost * len(data))] + fill

    monkeypatch.setitem(dicomslides.KINDS, "jpeg-ls", (syntax, photometric, cut))
    dicomslides.save(tmp_path / "a.dcm", dicomslides.instance(slides.picture(64, 64), "jpeg-ls"))
    with open_slide(tmp_path) as slide, pytest.raises(TileError, match="truncated"):
        slide.levels[0][...]


@pytest.mark.parametrize("served", [False, True])
def test_a_text_longer_than_the_file_takes_no_memory(tmp_path, served):
    """pydicom asks for as many bytes as a value is said to have."""
    path = tmp_path / "a.dcm"
    dicomslides.save(path, dicomslides.instance(slides.picture(64, 64)))
    data = bytearray(path.read_bytes())
    place = data.index(b"\x20\x00\x0d\x00UI")  # the study's number
    data[place + 4 : place + 12] = b"UT\0\0" + (1 << 30).to_bytes(4, "little")
    path.write_bytes(data)
    file = SlideFile.of(str(path), path.stat())
    source = FileSource(file)
    read = partial(describe_source, source, file.size) if served else describe
    tracemalloc.start()
    try:
        with pytest.raises(SlideError, match=r"truncated|damaged"):
            read(path.name if served else path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
        source.close()
