"""RGB of an engine that rounds exactly becomes libjpeg's, where the table says how."""

from fractions import Fraction

import imagecodecs
import numpy as np
import pytest

from napari_wsigpu.codecs.rounding import correction_table, differing_pairs

CB, CR = (chroma.ravel() for chroma in np.mgrid[-128:128, -128:128])


def libjpeg():
    """The same with the integers of libjpeg-turbo's jdcolor.c."""

    def fix(x):
        return int(x * 65536 + 0.5)

    red = (fix(1.402) * CR + 32768) >> 16
    green = (-fix(0.34414) * CB - fix(0.71414) * CR + 32768) >> 16
    blue = (fix(1.772) * CB + 32768) >> 16
    return red, green, blue


def exact():
    """Red, green and blue relative to luma, by ITU-T T.871 in exact arithmetic.

    Halves are rounded as libjpeg does: only in a few pairs is there any, and nothing says how.
    """
    by_blue = Fraction(114, 1000) * Fraction(1772, 1000) / Fraction(587, 1000)
    by_red = Fraction(299, 1000) * Fraction(1402, 1000) / Fraction(587, 1000)
    scale = by_blue.denominator * by_red.denominator
    green = -int(by_blue * scale) * CB - int(by_red * scale) * CR
    parts = [(1402 * CR, 1000), (green, scale), (1772 * CB, 1000)]
    return [
        np.where((2 * value) % (2 * unit) == unit, half, (2 * value + unit) // (2 * unit))
        for (value, unit), half in zip(parts, libjpeg(), strict=True)
    ]


def test_libjpeg_is_modelled_rightly():
    """Flat pictures, so that neither the transform nor the subsampling has a say."""
    rng = np.random.default_rng(0)
    differing = np.flatnonzero(exact()[1] != libjpeg()[1])
    chosen = np.concatenate([differing, rng.choice(len(CB), 200)])
    seen = 0
    for index in chosen:
        for luma in (40, 128, 200):
            ycc = np.empty((8, 8, 3), np.uint8)
            ycc[...] = luma, CB[index] + 128, CR[index] + 128
            options = {"colorspace": "YCBCR", "outcolorspace": "YCBCR", "subsampling": "444"}
            data = imagecodecs.jpeg8_encode(ycc, level=100, **options)
            stored = imagecodecs.jpeg8_decode(data, colorspace="YCBCR", outcolorspace="YCBCR")
            if (stored != ycc).any():
                continue
            pixel = imagecodecs.jpeg8_decode(data, colorspace="YCBCR", outcolorspace="RGB")[0, 0]
            model = [np.clip(luma + part[index], 0, 255) for part in libjpeg()]
            assert pixel.tolist() == model
            seen += 1
    assert seen > len(chosen)


def test_only_green_differs_and_by_one():
    for mine, theirs in zip(exact()[::2], libjpeg()[::2], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert set(np.unique(libjpeg()[1] - exact()[1])) <= {-1, 0, 1}


def test_the_pairs_are_those_that_differ():
    differs = exact()[1] != libjpeg()[1]
    parts = (exact()[0], exact()[2], exact()[1], libjpeg()[1])
    expected = {tuple(row) for row in np.stack(parts, -1)[differs].tolist()}
    assert {tuple(row) for row in differing_pairs().tolist()} == expected
    assert len(differing_pairs()) == len(expected) == 43


def keys():
    red, green, blue = exact()
    return red - green + 256, blue - green + 256


def test_no_two_pairs_share_a_key():
    rows, columns = keys()
    shown = (rows >= 0) & (rows < 512) & (columns >= 0) & (columns < 512)
    found = 512 * rows[shown] + columns[shown]
    assert len(np.unique(found)) == len(found)


@pytest.mark.parametrize("luma", [1, 16, 100, 128, 177, 240, 254])
def test_the_table_turns_exact_rgb_into_libjpegs(luma):
    mine, theirs = (np.stack(model(), -1) + luma for model in (exact, libjpeg))
    unclipped = ((mine > 0) & (mine < 255)).all(-1)
    mine, theirs = mine[unclipped], theirs[unclipped]
    assert len(mine)
    red, green, blue = mine.T
    mine[:, 1] += correction_table()[red - green + 256, blue - green + 256]
    np.testing.assert_array_equal(mine, theirs)


def test_every_pair_that_can_be_seen_unclipped_is_corrected():
    """Of all lumas together; otherwise the test above could pass with an empty table."""
    differs = exact()[1] != libjpeg()[1]
    parts = np.stack(exact(), -1)[differs]
    seen = parts.max(-1) - parts.min(-1) < 254
    assert seen.any()
    rows, columns = (key[differs][seen] for key in keys())
    assert correction_table()[rows, columns].all()


def test_the_table_changes_nothing_else():
    differs = exact()[1] != libjpeg()[1]
    rows, columns = keys()
    shown = (rows >= 0) & (rows < 512) & (columns >= 0) & (columns < 512)
    assert not correction_table()[rows[shown & ~differs], columns[shown & ~differs]].any()
    assert np.count_nonzero(correction_table()) == np.count_nonzero(shown & differs)
    assert correction_table().shape == (512, 512)
    assert correction_table().dtype == np.int8
