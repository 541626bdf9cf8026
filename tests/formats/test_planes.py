"""Planes of vendors' files, compared with the libraries that write or read these."""

import numpy as np
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st

from napari_wsigpu import open_slide
from napari_wsigpu.model.errors import PlaneError, UnsupportedSlideError
from tests.writers import czis, dicomslides, ndpi, slides, tiffbytes, vsis

wsidicom, pydicom = pytest.importorskip("wsidicom"), pytest.importorskip("pydicom")

DEPTHS = (-2.0, -0.5, 1.0, 2.5)


def focal_planes(height=100, width=150):
    return [slides.picture(height, width) // (index + 1) for index in range(len(DEPTHS))]


def put_frames(dataset, planes):
    frames = [tile for plane in planes for tile in dicomslides.tiles_of(plane)]
    dataset.NumberOfFrames = len(frames)
    dataset.TotalPixelMatrixFocalPlanes = len(planes)
    dataset.PixelData = b"".join(tile.tobytes() for tile in frames)


def full(folder, name, planes, **options):
    dataset = dicomslides.instance(planes[0], "raw", **options)
    dataset.TotalPixelMatrixOriginSequence[0].ZOffsetInSlideCoordinateSystem = DEPTHS[0]
    measures = dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    measures.SpacingBetweenSlices = 0.0015
    put_frames(dataset, planes)
    dicomslides.save(folder / f"{name}.dcm", dataset)


def sparse(folder, name, planes, **options):
    """Frames of all planes, the highest first."""
    dataset = dicomslides.instance(planes[0], "raw", sparse=True, **options)
    groups = []
    for depth in DEPTHS[::-1]:
        for group in dicomslides.instance(planes[0], "raw", sparse=True, **options)[
            "PerFrameFunctionalGroupsSequence"
        ].value:
            group.PlanePositionSlideSequence[0].ZOffsetInSlideCoordinateSystem = depth
            groups.append(group)
    dataset.PerFrameFunctionalGroupsSequence = groups
    put_frames(dataset, planes[::-1])
    dicomslides.save(folder / f"{name}.dcm", dataset)


def files(folder, name, planes, **options):
    """A file a plane, whose names say nothing of their order."""
    for index, (depth, plane) in enumerate(zip(DEPTHS, planes, strict=True)):
        dataset = dicomslides.instance(plane, "raw", **options)
        dataset.TotalPixelMatrixOriginSequence[0].ZOffsetInSlideCoordinateSystem = depth
        dicomslides.save(folder / f"{name}{(index + 2) % 4}.dcm", dataset)


@pytest.mark.parametrize("write", [full, sparse, files])
def test_dicom(tmp_path, write):
    levels = [focal_planes(), [slides.average(plane, 2) for plane in focal_planes()]]
    for number, planes in enumerate(levels):
        side = 0.0005 * 2**number
        write(tmp_path, f"level {number} ", planes, spacing=(side, side))
    with open_slide(tmp_path) as slide, wsidicom.WsiDicom.open(tmp_path) as other:
        assert (slide.planes.sizes, slide.planes.z, slide.planes.z_spacing) == ({"z": 4}, 2, 1.5)
        assert slide.layout.problems == ()
        assert slide.level_count == 2
        for z, depth in enumerate(DEPTHS):
            for number, planes in enumerate(levels):
                found = slide.plane(z).levels[number][...]
                np.testing.assert_array_equal(found, planes[z])
                size = slide.level_dimensions[number]
                expected = np.asarray(other.read_region((0, 0), number, size, z=depth))
                np.testing.assert_array_equal(found, expected)


def test_a_dicom_file_that_holds_one_plane_shows_that(tmp_path):
    planes = focal_planes()
    files(tmp_path, "a", planes)
    for index in range(len(planes)):
        with open_slide(tmp_path / f"a{(index + 2) % 4}.dcm") as slide:
            assert slide.planes.z == index
            np.testing.assert_array_equal(slide.levels[0][...], planes[index])


@pytest.mark.parametrize("stated", [2, 4])
def test_dicom_files_of_a_plane_may_state_the_planes_of_all(tmp_path, stated):
    """Oracle: the planes that were written; wsidicom refuses such files."""
    planes = focal_planes()
    files(tmp_path, "a", planes, TotalPixelMatrixFocalPlanes=stated)
    with open_slide(tmp_path) as slide:
        assert (slide.planes.sizes, slide.planes.z_spacing) == ({"z": 4}, 1.5)
        assert slide.layout.problems == ()
        assert slide.metadata["dicom"]["TotalPixelMatrixFocalPlanes"] == stated
        for z, plane in enumerate(planes):
            np.testing.assert_array_equal(slide.plane(z).levels[0][...], plane)


def test_dicom_levels_without_all_planes_are_left_out(tmp_path):
    full(tmp_path, "a", focal_planes())
    small = slides.average(focal_planes()[2], 2)
    dicomslides.save(tmp_path / "b.dcm", dicomslides.instance(small, "raw"))
    with open_slide(tmp_path) as slide:
        assert (slide.level_count, slide.planes.size_z) == (1, 4)
        [problem] = slide.layout.problems
        assert "it has 1 focal plane(s) instead of 4" in problem


def test_dicom_frames_focused_separately_are_one_plane(tmp_path):
    pixels = focal_planes()[0]
    dataset = dicomslides.instance(pixels, "raw", sparse=True)
    for index, group in enumerate(dataset.PerFrameFunctionalGroupsSequence):
        group.PlanePositionSlideSequence[0].ZOffsetInSlideCoordinateSystem = index / 10
    with open_slide(dicomslides.save(tmp_path / "a.dcm", dataset)) as slide:
        assert slide.planes.names == ()
        np.testing.assert_array_equal(slide.levels[0][...], pixels)


def test_dicom_pictures_of_extended_depth_of_field_are_no_plane(tmp_path):
    full(tmp_path, "a", focal_planes())
    fused = np.maximum.reduce(focal_planes()) // 3
    dataset = dicomslides.instance(fused, "raw", ExtendedDepthOfField="YES")
    path = dicomslides.save(tmp_path / "b.dcm", dataset)
    with open_slide(tmp_path) as slide, open_slide(path) as other:
        assert (slide.planes.size_z, other.planes.size_z) == (4, 1)
        np.testing.assert_array_equal(slide.levels[0][...], focal_planes()[2])
        np.testing.assert_array_equal(other.levels[0][...], fused)
        assert "1 file(s) with extended depth of field" in slide.layout.problems[0]
        assert "1 file(s) without extended depth of field" in other.layout.problems[0]


@pytest.mark.parametrize(("unit", "spacing"), [(1, 1.5), (1e-3, None)])
def test_dicom_depths_that_contradict_their_distance(tmp_path, unit, spacing):
    sparse(tmp_path, "a", focal_planes())
    dataset = pydicom.dcmread(tmp_path / "a.dcm")
    for group in dataset.PerFrameFunctionalGroupsSequence:
        position = group.PlanePositionSlideSequence[0]
        position.ZOffsetInSlideCoordinateSystem = unit * position.ZOffsetInSlideCoordinateSystem
    measures = dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    measures.SpacingBetweenSlices = 0.0015
    with open_slide(dicomslides.save(tmp_path / "a.dcm", dataset)) as slide:
        assert slide.planes.z_spacing == spacing
        assert len(slide.layout.problems) == (spacing is None)


@pytest.mark.parametrize("by_level", [True, False], ids=["by level", "by plane"])
def test_ndpi(tmp_path, by_level):
    depths = [3000, 0, -3000, 6000]
    pictures = [(depth, step) for step in (1, 2) for depth in depths]
    if not by_level:
        pictures = [(depth, step) for depth in depths for step in (1, 2)]
    pages = []
    for depth, step in pictures:
        pixels = slides.picture(96, 192) // (2 + depth // 3000)
        pages.append(ndpi.level(np.ascontiguousarray(pixels[::step, ::step]), 6, plane=depth))
    path = tmp_path / "a.ndpi"
    ndpi.write(path, pages)
    with open_slide(path) as slide, tifffile.TiffFile(path) as file:
        assert (slide.planes.sizes, slide.planes.z, slide.planes.z_spacing) == ({"z": 4}, 1, 3.0)
        assert slide.layout.other_planes == 3
        for z, depth in enumerate(sorted(depths)):
            plane = slide.plane(z)
            stored = {level.shape[1]: level for level in plane.levels if not level.computed}
            for step in (1, 2):
                page = file.pages[pictures.index((depth, step))]
                found = stored[192 // step][...]
                np.testing.assert_array_equal(found, page.asarray())


ORDERS = st.permutations("ZTCM")
SIZES = st.fixed_dictionaries({axis: st.integers(1, 3) for axis in "ZTCM"})


@settings(max_examples=15, deadline=None)
@given(order=ORDERS, sizes=SIZES)
def test_czi(tmp_path_factory, order, sizes):
    """Mosaics of any order of planes are those that Zeiss' library reads."""
    czi = pytest.importorskip("pylibCZIrw.czi")
    path = tmp_path_factory.mktemp("czi") / "a.czi"
    random = np.random.default_rng(1)
    shape = [sizes[axis] for axis in order]
    with czi.create_czi(str(path)) as file:
        for place in np.ndindex(*shape):
            at = dict(zip(order, place, strict=True))
            pixels = random.integers(0, 60_000, (20, 30, 1), np.uint16)
            plane = {axis: at[axis] for axis in "ZTC"}
            file.write(pixels, location=(25 * at["M"], 3 * at["M"]), plane=plane)
        file.write_metadata("a", scale_x=0.25e-6, scale_y=0.25e-6, scale_z=1.25e-6)
    with open_slide(path, "cpu") as slide, czi.open_czi(str(path)) as other:
        assert (slide.planes.size_z, slide.planes.size_t) == (sizes["Z"], sizes["T"])
        assert slide.planes.z_spacing == 1.25
        for z, t in np.ndindex(sizes["Z"], sizes["T"]):
            found = slide.plane(z, t).levels[0][...]
            for c in range(sizes["C"]):
                expected = other.read(plane={"Z": z, "T": t, "C": c})[..., 0]
                np.testing.assert_array_equal(found[..., c], expected)


def test_czi_planes_of_different_extents(tmp_path):
    """A channel and a tile are there at one depth only; all planes are of the same size."""
    path = tmp_path / "a.czi"
    gray = slides.picture(40, 60, 1, "uint16")
    blocks = [czis.Block(gray // (z + 1), z=z, c=1) for z in range(3)]
    blocks += [czis.Block(gray // 7, z=1, c=0), czis.Block(gray // 9, x=60, z=1, c=1)]
    czis.write(path, blocks)
    with open_slide(path, "cpu") as slide:
        for z in range(3):
            expected = np.zeros((40, 120, 2), np.uint16)
            expected[:, :60, 1] = gray[..., 0] // (z + 1)
            if z == 1:
                expected[:, :60, 0], expected[:, 60:, 1] = gray[..., 0] // 7, gray[..., 0] // 9
            np.testing.assert_array_equal(slide.plane(z).levels[0][...], expected)


def test_a_plane_that_a_czi_lacks(tmp_path):
    path = tmp_path / "a.czi"
    czi = pytest.importorskip("pylibCZIrw.czi")
    with czi.create_czi(str(path)) as file:
        for z, t in ((0, 0), (2, 0), (1, 1)):
            file.write(np.full((20, 30, 1), 1 + z, np.uint8), plane={"Z": z, "T": t})
    with open_slide(path, "cpu") as slide:
        assert (slide.planes.z, slide.planes.t, slide.levels[0][0, 0, 0]) == (0, 0, 1)
        assert slide.plane(1, 1).levels[0][0, 0, 0] == 2
        with pytest.raises(PlaneError, match="no image at z = 1, t = 0"):
            slide.plane(1, 0)


INTERVAL = "<Positions><Interval><Start>0</Start><Increment>33.4</Increment></Interval></Positions>"
OFFSETS = "<Positions><List><Offsets>{}</Offsets></List></Positions>"


@pytest.mark.parametrize(
    ("positions", "step"),
    [
        (INTERVAL, 33.4),
        (OFFSETS.format("0 60.075 120.15"), 60.075),
        (OFFSETS.format("0 60 90"), None),
        (OFFSETS.format("soon later"), None),
    ],
)
def test_the_time_step_of_a_czi(tmp_path, positions, step):
    path = tmp_path / "a.czi"
    xml = f"<T>{positions}</T>"
    for tag in ("Dimensions", "Image", "Information", "Metadata", "ImageDocument"):
        xml = f"<{tag}>{xml}</{tag}>"
    czis.write(path, [czis.Block(slides.picture(20, 30))], xml)
    with open_slide(path, "cpu") as slide:
        assert slide.planes.time_step == step


@settings(max_examples=12, deadline=None)
@given(order=st.permutations((1, 2, 4)), sizes=st.tuples(*[st.integers(1, 3)] * 3))
def test_vsi(tmp_path_factory, order, sizes):
    """Coordinates of tiles are in the order that the tags say; slideio reads the same."""
    slideio = pytest.importorskip("slideio")
    path = tmp_path_factory.mktemp("vsi") / "a.vsi"
    count = dict(zip((1, 2, 4), sizes, strict=True))
    height, width, side = 40, 60, 32
    random = np.random.default_rng(3)
    stack = random.integers(0, 60_000, (*sizes, 64, 64), np.uint16)  # z, t, c
    tiles = []
    for place in np.ndindex(*(count[meaning] for meaning in order)):
        z, t, c = (place[order.index(meaning)] for meaning in (1, 2, 4))
        for y, x in np.ndindex(2, 2):
            part = stack[z, t, c, side * y : side * (y + 1), side * x : side * (x + 1)]
            tiles.append(vsis.Tile((x, y, *place, 0), part.tobytes()))
    options = {"compression": vsis.RAW, "samples": 1, "kind": 4, "color": 1}
    folder = path.parent / "_a_" / "stack1"
    vsis.ets(folder / "frame_t.ets", tiles, (side, side), **options)
    names = [f"channel {c}" for c in range(count[4])]
    frames = np.indices([count[meaning] for meaning in order[::-1]])
    times = 60.5 * frames[2 - order.index(2)].ravel() + 7
    vsis.vsi(path, vsis.image((width, height), order, names, times=times.tolist()))
    scene = slideio.open_slide(str(path), "VSI").get_scene(0)
    with open_slide(path, "cpu") as slide:
        assert (slide.planes.size_z, slide.planes.size_t) == (count[1], count[2])
        assert (scene.num_z_slices, scene.num_t_frames) == (count[1], count[2])
        assert slide.planes.z_spacing == 1.5
        assert slide.planes.time_step == (0.0605 if count[2] > 1 else None)
        for z, t in np.ndindex(count[1], count[2]):
            found = slide.plane(z, t).levels[0][...]
            expected = np.moveaxis(stack[z, t, :, :height, :width], 0, -1)
            np.testing.assert_array_equal(found, expected)
            block = scene.read_block(slices=(z, z + 1), frames=(t, t + 1))
            np.testing.assert_array_equal(found, np.asarray(block).reshape(found.shape))


def test_a_plane_that_a_vsi_lacks(tmp_path):
    path = tmp_path / "a.vsi"
    tiles = [
        vsis.Tile((0, 0, t, z, 0), np.full((32, 32), 10 * t + z, np.uint8).tobytes())
        for t, z in ((0, 0), (0, 1), (1, 0))
    ]
    options = {"compression": vsis.RAW, "samples": 1, "kind": 2, "color": 1}
    vsis.ets(tmp_path / "_a_" / "stack1" / "frame_t.ets", tiles, (32, 32), **options)
    vsis.vsi(path, vsis.image((30, 20), (2, 1)))
    with open_slide(path, "cpu") as slide:
        assert slide.planes.sizes == {"t": 2, "z": 2}
        assert [slide.plane(z, t).levels[0][0, 0] for z, t in ((0, 0), (1, 0), (0, 1))] == [
            0,
            1,
            10,
        ]
        with pytest.raises(PlaneError, match="no tiles at z = 1, t = 1"):
            slide.plane(1, 1)


MINISBLACK = {"photometric": "minisblack"}


@pytest.mark.parametrize(
    ("name", "axes", "options"),
    [
        ("a.tif", "ZYX", {}),  # samples of one page
        ("a.tif", "TZYX", {}),
        ("a.tif", "ZYX", {"truncate": True} | MINISBLACK),  # behind the first page
        ("a.tif", "TZCYX", MINISBLACK),
        ("a.tif", "TZCYX", {"imagej": True}),
        ("a.tif", "TZCYX", {"imagej": True, "truncate": True}),
        ("a.tif", "ZYXS", {"imagej": True, "truncate": True}),
        ("a.ome.tif", "ZYX", {}),
        ("a.ome.tif", "TZSYX", {"photometric": "rgb", "planarconfig": "separate"}),
        ("a.ome.tif", "TZYX", {"tile": (16, 16), "byteorder": ">"} | MINISBLACK),
    ],
)
def test_tiff_stacks_as_programs_write_them(tmp_path, name, axes, options):
    sizes = {"T": 2, "Z": 4, "C": 2, "S": 3, "Y": 40, "X": 50}
    shape = [sizes[axis] for axis in axes]
    dtype = np.uint8 if "S" in axes else np.uint16
    pixels = np.random.default_rng(0).integers(0, 255, shape, dtype)
    path = tmp_path / name
    tifffile.imwrite(path, pixels, metadata={"axes": axes}, **options)
    with open_slide(path, "cpu") as slide:
        assert slide.planes.sizes == {a.lower(): sizes[a] for a in axes if a in "TZ"}
        assert slide.layout.problems == ()
        for t, z in np.ndindex(slide.planes.size_t, slide.planes.size_z):
            at = tuple({"T": t, "Z": z}.get(axis, slice(None)) for axis in axes)
            expected = pixels[at]
            if axes[-3] in "CS" or axes[-1] == "S":
                expected = np.moveaxis(expected, 0, -1) if axes[-1] == "X" else expected
            else:
                expected = expected[..., None]
            np.testing.assert_array_equal(slide.plane(z, t).levels[0][...], expected)


def write_like_vips(path, planes, axis, steps, bigtiff=False):
    """Write a page per plane, with reduced ones in its SubIFDs, and ImageJ's description.

    `steps` lists the reductions of each plane.
    """
    options = {"compression": 8, "tile": (32, 48)}
    said = f"ImageJ=\nhyperstack=true\nimages={len(planes)}\n{axis}={len(planes)}\n"
    gray = {} if planes[0].shape[-1] == 3 else {"photometric": 1}
    pages = []
    for plane, own in zip(planes, steps, strict=True):
        subifds = [
            tiffbytes.page(
                plane[::step, ::step], tiffbytes.deflate, subfile_type=1, **options, **gray
            )
            for step in own
        ]
        pages.append(
            tiffbytes.page(
                plane, tiffbytes.deflate, description=said, subifds=subifds, **options, **gray
            )
        )
    return tiffbytes.write(path, pages, bigtiff=bigtiff)


@pytest.mark.parametrize("bigtiff", [False, True])
@pytest.mark.parametrize(
    ("axis", "samples"), [("channels", 1), ("slices", 1), ("frames", 1), ("slices", 3)]
)
def test_levels_in_the_subifds_of_imagej_pages(tmp_path, axis, samples, bigtiff):
    planes = [slides.picture(120, 150, samples) // (index + 1) for index in range(3)]
    path = write_like_vips(tmp_path / "a.tif", planes, axis, [(2, 4)] * 3, bigtiff)
    with open_slide(path, "cpu") as slide, tifffile.TiffFile(path) as file:
        assert file.series[0].kind == "imagej"
        stored = [[page, *page.pages] for page in (each.aspage() for each in file.pages)]
        pixels = [[page.asarray().reshape(*page.shape[:2], samples) for page in p] for p in stored]
        assert slide.layout.problems == ()
        assert slide.level_count == 3
        if axis == "channels":
            for number, level in enumerate(slide.levels):
                expected = np.concatenate([levels[number] for levels in pixels], axis=-1)
                np.testing.assert_array_equal(level[...], expected)
            return
        for index, levels in enumerate(pixels):
            at = {"z": index} if axis == "slices" else {"t": index}
            for level, expected in zip(slide.plane(**at).levels, levels, strict=True):
                np.testing.assert_array_equal(level[...], expected)


@pytest.mark.parametrize(
    ("steps", "count", "problems"),
    [
        ([(2, 4), (2, 4), (2,)], 1, 0),  # a page lacks a level
        ([(1, 2), (1, 2), (1, 2)], 2, 0),  # a copy of the page is no level
        ([(2, 4), (2, 5), (2, 4)], 2, 1),  # levels of different sizes
    ],
)
def test_unusable_subifds_of_imagej_pages(tmp_path, steps, count, problems):
    planes = [slides.picture(120, 150, 1)] * 3
    path = write_like_vips(tmp_path / "a.tif", planes, "channels", steps)
    with open_slide(path, "cpu") as slide:
        assert slide.level_count == count
        np.testing.assert_array_equal(slide.levels[0][...], np.concatenate(planes, axis=-1))
        assert len(slide.layout.problems) == problems
        assert all("A level is left out" in text for text in slide.layout.problems)


@pytest.mark.parametrize(("unit", "size"), [("um", 1), ("micron", 1), ("nm", 1e-3), ("dogs", None)])
def test_the_scale_of_imagej(tmp_path, unit, size):
    path = tmp_path / "a.tif"
    metadata = {"axes": "TZYX", "unit": unit, "spacing": 1.5, "finterval": 2.5}
    pixels = np.zeros((2, 3, 20, 30), np.uint16)
    tifffile.imwrite(path, pixels, imagej=True, metadata=metadata, resolution=(4, 2))
    with open_slide(path, "cpu") as slide:
        assert slide.planes.time_step == 2.5
        assert slide.planes.z_spacing == (size and pytest.approx(1.5 * size))
        assert slide.mpp == (size and pytest.approx((0.25 * size, 0.5 * size)))


@pytest.mark.parametrize(
    ("stated", "declared"),
    [
        ("images=99", 99),
        ("images=99\nslices=99", 99),
        ("images=20\nchannels=3\nslices=9", 27),
        ("images=10\nslices=10", 10),
        ("images=20\nslices=20", None),
        ("images=20\nchannels=2\nframes=10", None),
    ],
)
@pytest.mark.parametrize("contiguous", [False, True])
def test_imagej_with_another_number_of_planes(tmp_path, stated, declared, contiguous):
    path = tmp_path / "a.tif"
    pixels = np.arange(20 * 64 * 80, dtype=np.uint16).reshape(20, 64, 80)
    description = f"ImageJ=1.53t\n{stated}\n"
    with tifffile.TiffWriter(path) as file:
        for index, plane in enumerate(pixels):
            text = None if index else description
            file.write(plane, contiguous=contiguous, metadata=None, description=text)
    if declared == 10 and not contiguous:
        with pytest.raises(UnsupportedSlideError, match="holds 20 pages, but its axes declare 10"):
            open_slide(path, "cpu")
        return
    with open_slide(path, "cpu") as slide:
        expected = f"ImageJ's description declares {declared} planes, but the file holds 20."
        assert slide.layout.problems[:1] == ((expected,) if declared else ())


def test_stack_with_fewer_pages_than_declared(tmp_path):
    path = tmp_path / "a.tif"
    pixels = np.zeros((4, 20, 30), np.uint16)
    tifffile.imwrite(path, pixels, metadata={"axes": "ZYX"}, truncate=True, **MINISBLACK)
    content = path.read_bytes()
    assert content.count(b'"shape": [4, 20, 30]') == 1
    path.write_bytes(content.replace(b'"shape": [4,', b'"shape": [9,'))
    with open_slide(path, "cpu") as slide:
        assert slide.planes.size_z == 1
        [problem] = slide.layout.problems
        assert (
            problem
            == "The shape in the description (JSON) contradicts the pages; the pages are used."
        )


@pytest.mark.parametrize(
    ("times", "unit", "step"),
    [((7, 67, 127), "s", 60), ((0, 250, 500), "ms", 0.25), ((0, 1, 5), "s", None), ((), "s", None)],
)
def test_the_time_step_of_ome_is_that_of_its_planes(tmp_path, times, unit, step):
    path = tmp_path / "a.ome.tif"
    taken = [time + c / 10 for time in times for c in range(2)]
    metadata = {"axes": "TCYX"}
    if times:
        metadata["Plane"] = {"DeltaT": taken, "DeltaTUnit": [unit] * len(taken)}
    pixels = np.zeros((3, 2, 20, 30), np.uint8)
    tifffile.imwrite(path, pixels, metadata=metadata, ome=True, **MINISBLACK)
    with open_slide(path, "cpu") as slide:
        assert slide.planes.time_step == (step and pytest.approx(step))


@pytest.mark.parametrize("cut", [3, 6, 14])
def test_dicom_planes_of_a_concatenation(tmp_path, cut):
    """Its parts end anywhere: in a plane, or with one."""
    planes = focal_planes()
    count = len(dicomslides.tiles_of(planes[0]))
    frames = [tile for plane in planes for tile in dicomslides.tiles_of(plane)]
    for number, (first, past) in enumerate(((0, cut), (cut, len(frames))), 1):
        dataset = dicomslides.instance(planes[0], "raw", part=(0, count, number))
        measures = dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
        measures.SpacingBetweenSlices = 0.0015
        dataset.ConcatenationFrameOffsetNumber = first
        dataset.InConcatenationTotalNumber = 2
        dataset.NumberOfFrames = past - first
        dataset.TotalPixelMatrixFocalPlanes = len(planes)
        dataset.PixelData = b"".join(tile.tobytes() for tile in frames[first:past])
        dicomslides.save(tmp_path / f"{number}.dcm", dataset)
    with open_slide(tmp_path) as slide:
        assert (slide.planes.size_z, slide.layout.problems) == (4, ())
        for z, plane in enumerate(planes):
            np.testing.assert_array_equal(slide.plane(z).levels[0][...], plane)
