"""Where an OME-Zarr image lies, and how large its pixels are; what is not applied is said."""

import numpy as np
import pytest
import zarr

from napari_wsigpu import open_slide
from napari_wsigpu.viewer.layers.slide_layers import slide_layers
from tests.writers import zarrs

SCALE = {"type": "scale", "scale": [0.5, 0.25]}
SHIFT = {"type": "translation", "translation": [100, -200]}
MICROMETRES = [{"name": name, "type": "space", "unit": "micrometer"} for name in "yx"]


def write(folder, steps, of_image=(), axes=MICROMETRES, version="0.5", shape=(60, 80), **said):
    """Write one array, whose transformations and axes are given."""
    zarrs.write_array(folder / "0", np.zeros(shape, "uint8"))
    image = {"datasets": [{"path": "0", "coordinateTransformations": steps}], **said}
    if axes is not None:
        image["axes"] = axes
    if of_image:
        image["coordinateTransformations"] = [*of_image]
    zarrs.write_group(folder, {"multiscales": [image]})
    group = zarr.open_group(folder, mode="r+")
    group.attrs["ome"] = {**group.attrs["ome"], "version": version}
    return folder


def layer_of(folder):
    """Return a layer's scale and translation, and the slide's problems."""
    with open_slide(folder, "cpu") as slide:
        attributes = slide_layers(slide)[0][1]
        return attributes["scale"], attributes["translate"], slide.layout.problems


PLACES = {
    "a translation": ([SCALE, SHIFT], [], (0.5, 0.25), (100, -200)),
    "none": ([SCALE], [], (0.5, 0.25), (0, 0)),
    "one of the whole image": ([SCALE], [SHIFT], (0.5, 0.25), (100, -200)),
    "both": (
        [SCALE, SHIFT],
        [{"type": "scale", "scale": [2, 4]}, {"type": "translation", "translation": [1, 2]}],
        (1, 1),
        (201, -798),
    ),
    "a sequence": (
        [{"type": "sequence", "transformations": [SCALE, SHIFT]}],
        [],
        (0.5, 0.25),
        (100, -200),
    ),
    "an affine transformation": (
        [{"type": "affine", "affine": [[0.5, 0, 7], [0, 0.25, 9]]}],
        [],
        (0.5, 0.25),
        (7, 9),
    ),
}


@pytest.mark.parametrize(("steps", "of_image", "scale", "first"), PLACES.values(), ids=PLACES)
def test_layer_position(tmp_path, steps, of_image, scale, first):
    found = layer_of(write(tmp_path / "a.zarr", steps, of_image))
    assert found == (pytest.approx(scale), pytest.approx(first), ())


ROTATED = [[0, -0.5, 3], [0.5, 0, 4]]


@pytest.mark.parametrize(
    ("steps", "scale", "said"),
    [
        ([{"type": "affine", "affine": ROTATED}], (0.5, 0.5), "rotated"),
        ([SCALE, {"type": "rotation", "rotation": [[0, -1], [1, 0]]}], (0.5, 0.25), "rotated"),
        ([SCALE, {"type": "mapAxis", "mapAxis": [1, 0]}], (0.5, 0.25), "axes swapped"),
        ([{"type": "scale", "scale": [-0.5, 0.25]}, SHIFT], (0.5, 0.25), "mirrored"),
        ([{"type": "displacements", "path": "field"}], (1, 1), "is invalid"),
        ([{"type": "scale", "scale": [0, 0.25]}], (1, 1), "is invalid"),
        ([{"type": "scale", "scale": [0.5]}], (1, 1), "is invalid"),
    ],
)
def test_unapplied_transformations_are_reported(tmp_path, steps, scale, said):
    found, _, problems = layer_of(write(tmp_path / "a.zarr", steps))
    assert found == pytest.approx(scale)
    assert any(said in problem for problem in problems)


def test_coordinate_systems_of_version_0_6(tmp_path):
    steps = {"type": "sequence", "input": "0", "output": "physical"}
    further = {"type": "affine", "affine": ROTATED, "input": "physical", "output": "atlas"}
    systems = [
        {"name": "atlas", "axes": [{"name": name, "unit": "meter"} for name in "yx"]},
        {"name": "physical", "axes": MICROMETRES},
    ]
    path = write(
        *(tmp_path / "a.zarr", [{**steps, "transformations": [SCALE, SHIFT]}], [further]),
        **{"axes": None, "version": "0.6.dev1", "coordinateSystems": systems},
    )
    scale, first, problems = layer_of(path)
    assert (scale, first) == ((0.5, 0.25), (100, -200))
    [problem] = problems
    assert "1 more coordinate system" in problem


def test_unknown_version_is_reported(tmp_path):
    *_, problems = layer_of(write(tmp_path / "a.zarr", [SCALE], version="0.9"))
    assert any("'0.9'" in problem for problem in problems)


def test_stacks_keep_their_position(tmp_path):
    axes = [
        {"name": "t", "type": "time", "unit": "seconds"},
        {"name": "z", "type": "space", "unit": "microns"},
        *MICROMETRES,
    ]
    steps = [
        {"type": "scale", "scale": [10, 3, 0.5, 0.25]},
        {"type": "translation", "translation": [60, 12, 100, 200]},
    ]
    path = write(tmp_path / "a.zarr", steps, axes=axes, shape=(2, 3, 60, 80))
    scale, first, problems = layer_of(path)
    assert (scale, first) == ((10, 3, 0.5, 0.25), (60, 12, 100, 200))
    assert problems == ()


@pytest.mark.parametrize(
    ("unit", "size"),
    [
        ("micrometers", 0.5),
        ("Micrometre", 0.5),
        ("microns", 0.5),
        ("nanometers", 0.0005),
        ("millimetres", 500),
        ("\N{MICRO SIGN}m", 0.5),
        ("\N{GREEK SMALL LETTER MU}m", 0.5),
        ("inches", 12700),
        ("dogs", None),
    ],
)
def test_units(tmp_path, unit, size):
    axes = [{"name": name, "type": "space", "unit": unit} for name in "yx"]
    path = write(tmp_path / "a.zarr", [{"type": "scale", "scale": [0.5, 0.5]}, SHIFT], axes=axes)
    with open_slide(path, "cpu") as slide:
        assert slide.mpp == (None if size is None else pytest.approx((size, size)))
        named = f"unknown unit of length ({unit!r})"
        assert (size is None) == any(named in each for each in slide.layout.problems)
        # In pixels, where their size is not known.
        first = np.array([-200, 100]) * (size / 0.5 if size else 1 / 0.5)
        np.testing.assert_allclose(slide.layout.first, first)


def channels_of(folder, stated, count=3, dtype="uint16"):
    omero = {"omero": {"channels": stated}}
    zarrs.write_image(folder, [np.zeros((count, 60, 80), dtype)], more=omero)
    with open_slide(folder, "cpu") as slide:
        return slide.channels, slide.layout.problems


@pytest.mark.parametrize(
    ("stated", "color"),
    [
        ("FF0000", "#ff0000"),
        ("#00ff00", "#00ff00"),
        ("FF0000FF", "#ff0000"),
        ("FF00FF00", "#00ff00"),
        ("12345680", "#123456"),
        ("red", None),
        ("FF00", None),
    ],
)
def test_colors_of_channels(tmp_path, stated, color):
    said = [{"label": name, "color": stated} for name in ("DAPI", "CD3")]
    channels, problems = channels_of(tmp_path / "a.zarr", said, 2)
    assert [(channel.name, channel.color) for channel in channels] == [
        ("DAPI", color),
        ("CD3", color),
    ]
    assert (color is None) == any("invalid color" in problem for problem in problems)


@pytest.mark.parametrize(
    ("start", "end", "window"), [(5, 1, None), ("a", 9, None), (7, 7, None), (1, 5, (1.0, 5.0))]
)
def test_windows_of_channels(tmp_path, start, end, window):
    said = [{"label": "DAPI", "window": {"start": start, "end": end}}, {"label": "CD3"}]
    channels, problems = channels_of(tmp_path / "a.zarr", said, 2)
    assert [channel.window for channel in channels] == [window, None]
    assert any("invalid window" in problem for problem in problems) == (start in (5, "a"))


def test_unnamed_channels_get_default_names(tmp_path):
    said = [{"label": "DAPI", "color": "0000FF"}, {"label": "CD3", "color": "00FF00"}]
    channels, problems = channels_of(tmp_path / "a.zarr", said)
    assert [channel.name for channel in channels] == ["DAPI", "CD3", "channel 2"]
    assert [channel.color for channel in channels] == ["#0000ff", "#00ff00", None]
    assert problems == ("The metadata names 2 channel(s), but the image has 3.",)


def test_more_than_there_are_channels(tmp_path):
    said = [{"label": f"m{number}"} for number in range(5)]
    channels, problems = channels_of(tmp_path / "a.zarr", said)
    assert [channel.name for channel in channels] == ["m0", "m1", "m2"]
    assert problems == ("The metadata names 5 channel(s), but the image has 3.",)


@pytest.mark.parametrize(
    ("unit", "factor"),
    [
        ("parsec", 3.0856775814913673e22),
        ("yoctometer", 1e-18),
        ("mile", 1.609344e9),
        ("hectometer", 1e8),
    ],
)
def test_large_and_small_units(tmp_path, unit, factor):
    axes = [{"name": name, "type": "space", "unit": unit} for name in "yx"]
    steps = [{"type": "scale", "scale": [0.5 / factor, 0.25 / factor]}]
    with open_slide(write(tmp_path / "a.zarr", steps, axes=axes), "cpu") as slide:
        assert slide.mpp == pytest.approx((0.25, 0.5))
        assert slide.layout.problems == ()


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("translation", [3]),
        ("translation", [float("nan"), 3]),
        ("translation", [1e30, 3]),
        ("translation", [1e300, 3]),
        ("affine", [[1, 0], [0, 1]]),
        ("displacements", "field"),
    ],
)
def test_invalid_transformations_leave_the_scale(tmp_path, kind, values):
    steps = [SCALE, {"type": kind, kind: values}]
    scale, first, problems = layer_of(write(tmp_path / "a.zarr", steps))
    assert (scale, first) == ((0.5, 0.25), (0, 0))
    [problem] = problems
    assert (
        problem == f"A transformation of type {kind!r} is invalid or not supported and is ignored."
    )


def test_booleans_show_true_at_full_brightness(tmp_path):
    pixels = np.zeros((60, 80), bool)
    pixels[20:30, 20:60] = True
    zarrs.write_group(tmp_path / "a.zarr", zarrs.write_image(tmp_path / "a.zarr", [pixels], "yx"))
    zarrs.write_array(tmp_path / "b.zarr", pixels)
    for name in ("a.zarr", "b.zarr"):
        with open_slide(tmp_path / name, "cpu") as slide:
            np.testing.assert_array_equal(slide.levels[0][...].squeeze(), pixels)
            assert slide_layers(slide)[0][1]["contrast_limits"] == (0, 1)


@pytest.mark.parametrize(
    ("shift", "is_said"), [([0, 0], False), ([0.5, 0.5], False), ([50, 50], True)]
)
def test_levels_in_different_places(tmp_path, shift, is_said):
    levels = [np.zeros((60, 80), "uint8"), np.zeros((30, 40), "uint8")]
    ome = zarrs.write_image(tmp_path / "a.zarr", levels, "yx", pixel=1)
    steps = ome["multiscales"][0]["datasets"][1]["coordinateTransformations"]
    steps.append({"type": "translation", "translation": shift})
    zarrs.write_group(tmp_path / "a.zarr", ome)
    *_, problems = layer_of(tmp_path / "a.zarr")
    said = (
        "The position of the level of 40 x 30 pixels contradicts that of the finest level, with "
        "which it is aligned.",
    )
    assert problems == (said if is_said else ())
