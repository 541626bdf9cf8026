import gc
import io
import threading
import weakref

import imagecodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from napari_wsigpu.codecs import color
from napari_wsigpu.codecs.color import ColorProfile, ColorTable, EmbeddedProfile
from napari_wsigpu.model.errors import RegionError, SlideClosedError, UnsupportedSlideError
from tests.fakes.host_device import level_of
from tests.writers.icc import ADOBE, PROFILES, SRGB, changed, stain, swapped, table_profile

ROWS = {"Adobe RGB": 1, "tables": 7}  # from the first to the last
EVERY = np.arange(1 << 24, dtype="<u4").view(np.uint8).reshape(4096, 4096, 4)[..., :3]


def by_imagecodecs(pixels, profile, intent=0):
    """Convert all pixels with LittleCMS, as one image."""
    return imagecodecs.cms_transform(
        np.ascontiguousarray(pixels[..., :3]),
        profile,
        SRGB,
        colorspace="rgb",
        outcolorspace="rgb",
        intent=intent,
    )


def by_pillow(pixels, profile):
    """Convert with another build of LittleCMS, as in OpenSlide's documentation."""
    opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    intent = ImageCms.getDefaultIntent(opened)
    srgb = ImageCms.createProfile("sRGB")
    transform = ImageCms.buildTransform(opened, srgb, "RGB", "RGB", intent)
    return np.asarray(ImageCms.applyTransform(Image.fromarray(pixels), transform))


def some_pixels(*shape):
    return np.random.default_rng(shape).integers(0, 256, shape).astype(np.uint8)


def table_of(profile):
    return ColorProfile(profile, "slide").table()


def embedded(data, *, level=None, rgb=True, place=(0, 1)):
    return EmbeddedProfile("'slide.svs'", level or level_of(), place, lambda place: data, rgb=rgb)


@pytest.fixture(scope="module", autouse=True)
def kept():
    """Tables that all tests share."""
    return [table_of(PROFILES[name]) for name in ("Adobe RGB", "table")]


class TestTable:
    @pytest.mark.parametrize("name", PROFILES)
    def test_colours(self, name):
        """They equal those of LittleCMS, and differ from another version's by at most 1."""
        profile = PROFILES[name]
        rows = np.s_[:: ROWS.get(name, 31)]
        stored = np.ascontiguousarray(EVERY[rows])
        found = table_of(profile).colors.view(np.uint8).reshape(4096, 4096, 4)[rows]
        assert not found[..., 3].any()
        found = found[..., :3]
        intent = int(name == "tables")
        np.testing.assert_array_equal(found, by_imagecodecs(stored, profile, intent))
        some = np.s_[::31] if name in ROWS else np.s_[:]
        other = by_pillow(np.ascontiguousarray(stored[some]), profile)
        assert (np.maximum(found[some], other) - np.minimum(found[some], other)).max() <= 1
        assert (found == stored).all() == (name == "sRGB")

    @pytest.mark.parametrize(
        "shape", [(1, 1, 3), (1, 2, 3), (37, 53, 3), (700, 800, 3), (37, 53, 4), (0, 5, 3)]
    )
    def test_pixels(self, shape):
        pixels = some_pixels(*shape)
        expected = pixels.copy()
        if pixels.size:
            expected[..., :3] = by_imagecodecs(pixels, ADOBE)
        np.testing.assert_array_equal(table_of(ADOBE).recolored(pixels), expected)

    def test_non_contiguous_pixels(self):
        memory = some_pixels(40, 50, 3)
        before = memory.copy()
        found = table_of(ADOBE).recolored(memory[3:20, 5:40])
        np.testing.assert_array_equal(found, by_imagecodecs(before[3:20, 5:40], ADOBE))
        np.testing.assert_array_equal(memory, before)

    def test_background(self):
        table = table_of(PROFILES["table"])
        expected = by_imagecodecs(np.full((1, 1, 3), 200, np.uint8), PROFILES["table"])[0, 0]
        assert len(set(expected.tolist())) > 1
        assert table.background(200, 3).tolist() == expected.tolist()
        assert table.background(200, 4).tolist() == [*expected.tolist(), 200]

    def test_slides_of_one_scanner_share_it(self):
        table = table_of(ADOBE)
        assert table_of(bytes(bytearray(ADOBE))) is table
        assert table_of(PROFILES["table"]) is not table

    def test_unused_table_is_freed(self):
        table = weakref.ref(table_of(PROFILES["gamma"]))
        gc.collect()
        assert table() is None


class TestIntent:
    @pytest.mark.parametrize(("intent", "used"), [(0, 0), (1, 1), (2, 2), (3, 3), (77, 1)])
    def test_intent_is_that_of_the_profile(self, intent, used):
        profile = table_profile(stain, swapped, intent=intent)
        pixels = some_pixels(20, 30, 3)
        found = ColorProfile(profile, "slide").convert(pixels)
        np.testing.assert_array_equal(found, by_imagecodecs(pixels, profile, used))

    def test_it_matters(self):
        pixels = some_pixels(20, 30, 3)
        first, second = (
            ColorProfile(table_profile(stain, swapped, intent=intent), "slide").convert(pixels)
            for intent in (0, 1)
        )
        assert (first != second).any()


HOSTILE = {
    "nothing": b"",
    "zeros": bytes(3000),
    "cut": ADOBE[:300],
    "cut header": ADOBE[:100],
    "header alone": changed(ADOBE[:132], 0, (132).to_bytes(4, "big")),
    "huge by its header": changed(ADOBE, 0, b"\xff\xff\xff\xff"),
    "no signature": changed(ADOBE, 36, b"nope"),
    "no tags": changed(ADOBE, 128, bytes(4)),
    "billions of tags": changed(ADOBE, 128, b"\xff\xff\xff\xff"),
    "tags elsewhere": changed(ADOBE, 136, b"\xff\xff\xff\x00" * 20),
    "CMYK": changed(ADOBE, 16, b"CMYK"),
    "gray": imagecodecs.cms_profile("gray", whitepoint=(0.3457, 0.3585), gamma=2.2),
    "Lab": imagecodecs.cms_profile("lab4", whitepoint=(0.3457, 0.3585)),
    "a link of devices": changed(ADOBE, 12, b"link"),
    "names of colours": changed(ADOBE, 12, b"nmcl"),
    "an abstract one": changed(ADOBE, 12, b"abst"),
    "letters that are none": changed(ADOBE, 12, b"\xff\0\x80\n\xff\xff\xff\xff"),
}


class TestRefusal:
    @pytest.mark.parametrize("kind", HOSTILE)
    def test_hostile_profiles(self, kind):
        with pytest.raises(UnsupportedSlideError) as caught:
            embedded(HOSTILE[kind]).profile()
        sentence = str(caught.value)
        assert sentence.startswith(
            "'slide.svs' can't be converted to sRGB, because its ICC profile"
        )
        assert sentence.endswith("; use its stored colors.")
        assert sentence.isprintable()

    def test_a_huge_profile_is_not_read(self):
        def read(place):
            raise AssertionError

        huge = EmbeddedProfile("'slide.svs'", level_of(), (0, 1 << 40), read, rgb=True)
        with pytest.raises(UnsupportedSlideError, match="larger than 32 MiB"):
            huge.profile()

    @settings(max_examples=150)
    @given(
        name=st.sampled_from(["Adobe RGB", "table"]),
        changes=st.lists(
            st.tuples(st.integers(0, 900), st.binary(min_size=1, max_size=8)),
            min_size=1,
            max_size=6,
        ),
        length=st.integers(0, 5000),
    )
    def test_any_profile_is_applied_or_refused(self, name, changes, length):
        data = PROFILES[name]
        for place, new in changes:
            data = changed(data, place, new)
        try:
            profile = embedded(data[:length]).profile()
        except UnsupportedSlideError:
            return
        assert profile.convert(some_pixels(4, 5, 3)).shape == (4, 5, 3)

    @pytest.mark.parametrize(
        "options",
        [
            {"rgb": False},
            {"level": level_of(dtype="uint16")},
            {"level": level_of(1)},
            {"level": level_of(5)},
        ],
    )
    def test_other_pixels(self, options):
        with pytest.raises(UnsupportedSlideError, match="pixels are not 8-bit RGB"):
            embedded(ADOBE, **options).profile()

    def test_no_profile(self):
        with pytest.raises(UnsupportedSlideError, match="it has no ICC profile"):
            embedded(ADOBE, place=None).profile()

    def test_unknown_colour_space(self):
        with pytest.raises(RegionError, match=r"'cmyk'.*'stored' or 'srgb'"):
            embedded(ADOBE).table("cmyk")

    def test_unreadable_file_is_not_a_damaged_profile(self):
        def read(place):
            raise SlideClosedError("closed")

        with pytest.raises(SlideClosedError):
            EmbeddedProfile("slide", level_of(), (0, 9), read, rgb=True).profile()


class TestEmbedded:
    def test_stored_colours_need_no_table(self):
        assert embedded(b"").table("stored") is None

    def test_a_small_picture_needs_no_table(self, monkeypatch):
        monkeypatch.setattr(color, "ColorTable", None)
        pixels = some_pixels(9, 8, 4)
        found = embedded(ADOBE).converted(pixels)
        np.testing.assert_array_equal(found[..., :3], by_imagecodecs(pixels, ADOBE))
        np.testing.assert_array_equal(found[..., 3], pixels[..., 3])

    def test_many_threads_make_one_table(self, monkeypatch):
        made = []

        class Counted(ColorTable):
            def __init__(self, convert):
                made.append(1)
                super().__init__(convert)

        monkeypatch.setattr(color, "ColorTable", Counted)
        profiles = [embedded(PROFILES["gamma"]) for _ in range(3)]
        found = []
        threads = [
            threading.Thread(target=lambda each=each: found.append(each.table("srgb")))
            for each in profiles * 3
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 1
        assert len({id(table) for table in found}) == 1

    def test_release(self):
        profile = embedded(PROFILES["gamma"])
        table = weakref.ref(profile.table("srgb"))
        profile.release()
        gc.collect()
        assert table() is None
        assert profile.table("srgb") is not None
