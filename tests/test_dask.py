"""Levels as Dask arrays, in two worker processes."""

import gc
import importlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from napari_wsigpu import Slide, open_slide
from napari_wsigpu.gpu.device import driver
from napari_wsigpu.gpu.transfer.device_tiles import NO_TILE
from napari_wsigpu.model.errors import LevelError, RegionError, SlideChangedError, TileError
from napari_wsigpu.model.layout import TileGrid
from napari_wsigpu.reading.dask_level import CHUNK_BYTES, DaskLevel
from napari_wsigpu.slide import runtime
from tests.fakes.host_device import HostDevice
from tests.writers import slides, stacks

dask = pytest.importorskip("dask", reason="dask is not installed")
distributed = pytest.importorskip("distributed", reason="distributed is not installed")

SHAPE = (203, 331, 3)
FULL = Path("/dev/full")
EXAMPLE = Path(__file__).parents[1] / "examples" / "tissue_and_stain.py"


@pytest.fixture(scope="module")
def example():
    """The example; workers that start later can import it, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE.parent)
        yield importlib.import_module(EXAMPLE.stem)


@pytest.fixture(scope="module")
def client(example):
    with (
        dask.config.set(example.SETTINGS),  # at rest it costs little
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit=0, dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def here():
    """Close what tasks opened in this process."""
    yield
    runtime.default().open_slides.close()
    assert len(runtime.default().open_slides) == 0


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "slide.tif"
    pixels = slides.picture(*SHAPE)
    slides.write_pyramid(path, pixels, (2,), tile=(32, 48))
    return path, pixels


def on_worker():
    names = [thread.name for thread in threading.enumerate()]
    return len(runtime.default().open_slides), [name for name in names if name.startswith("wsigpu")]


class TestCluster:
    def test_pixels_are_the_files_and_a_worker_opens_the_slide_once(self, client, file):
        path, pixels = file
        with open_slide(path) as slide:
            fine, coarse = (level.to_dask(1) for level in slide.levels)
        before = client.run(on_worker)
        found, half, red = client.gather(
            client.compute([fine, coarse, fine[..., 0] + coarse[0, 0, 0]])
        )
        np.testing.assert_array_equal(found, pixels)
        np.testing.assert_array_equal(half, pixels[::2, ::2])
        np.testing.assert_array_equal(red, pixels[..., 0] + pixels[0, 0, 0])
        after = client.run(on_worker)
        assert all(after[worker][0] == before[worker][0] + 1 for worker in after)

    def test_workers_of_one_thread_start_none_for_decoding(self, client, file):
        path, pixels = file
        with open_slide(path) as slide:
            array = slide.levels[0].to_dask(3)
        np.testing.assert_array_equal(client.compute(array).result(), pixels)
        assert all(names == [] for _, names in client.run(on_worker).values())

    def test_a_tile_that_cannot_be_decoded(self, client, tmp_path):
        path = tmp_path / "slide.svs"
        slides.write_aperio(path, slides.picture(100, 150))
        with open_slide(path) as slide:
            grid = slide.layout.levels[0].grid
            place, length = int(grid.offsets[0, 1, 1]), int(grid.byte_counts[0, 1, 1])
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes(length))
        with open_slide(path) as slide:
            array = slide.levels[0].to_dask(1)
        with pytest.raises(
            TileError, match=r"level 0, row 1, column 1 of .* could not be"
        ) as caught:
            client.compute(array).result()
        assert [name for name, _ in caught.value.failures] == ["level 0, row 1, column 1"]

    def test_a_file_that_changed_meanwhile(self, client, file):
        path, pixels = file
        with open_slide(path) as slide:
            array = slide.levels[0].to_dask()
        path.write_bytes(path.read_bytes() + b"\0")
        with pytest.raises(SlideChangedError, match="open the slide again"):
            client.compute(array).result()
        with open_slide(path) as slide:
            again = slide.levels[0].to_dask()
        np.testing.assert_array_equal(client.compute(again).result(), pixels)

    def test_after_a_worker_died(self, client, file):
        path, pixels = file
        with open_slide(path) as slide:
            array = slide.levels[0].to_dask(2)
        np.testing.assert_array_equal(client.compute(array).result(), pixels)
        first, *_ = client.nthreads()
        assert client.restart_workers([first]) == {first: "OK"}
        np.testing.assert_array_equal(client.compute(array).result(), pixels)


class TestStacks:
    @pytest.fixture(params=["TZCYX", "CTZYX", "zarr"])
    def saved(self, request, tmp_path):
        pixels = stacks.stack()
        return stacks.save(tmp_path, request.param, pixels), np.moveaxis(pixels, 2, -1)

    def test_axes_of_planes_come_first(self, saved):
        path, pixels = saved
        with open_slide(path, "cpu") as slide, dask.config.set(scheduler="synchronous"):
            array = slide.to_dask(tiles=1)
            assert (array.shape, array.chunksize[:2]) == (pixels.shape, (1, 1))
            assert slide.stats()["tiles_asked"] == 0
            np.testing.assert_array_equal(array.compute(), pixels)
            for key in (
                np.s_[1, 3],
                np.s_[:, -1, 5:40:3, ::-2],
                np.s_[::-1, 1:4:2, 7, :, 1],
                np.s_[1:1, :, :4],
            ):
                np.testing.assert_array_equal(array[key].compute(), pixels[key])
            np.testing.assert_array_equal(array.max(axis=1).compute(), pixels.max(axis=1))
            coarse = slide.to_dask(1)
            np.testing.assert_array_equal(coarse.compute(), pixels[:, :, ::2, ::2])
            assert coarse.name != array.name != slide.levels[0].to_dask(1).name

    def test_in_other_processes(self, client, saved):
        path, pixels = saved
        with open_slide(path) as slide:
            array = slide.to_dask()
        np.testing.assert_array_equal(client.compute(array).result(), pixels)

    def test_a_slide_without_planes(self, file):
        path, pixels = file
        with open_slide(path, "cpu") as slide:
            assert slide.to_dask().name == slide.levels[0].to_dask().name
            np.testing.assert_array_equal(slide.to_dask(), pixels)
            with pytest.raises(LevelError):
                slide.to_dask(2)


class TestArrays:
    def test_nothing_is_decoded_for_them(self, file):
        with open_slide(file[0]) as slide:
            array = slide.levels[0].to_dask()[10:20]
            assert type(array._meta) is np.ndarray
            assert (array._meta.shape, array.dtype) == ((0, 0, 0), np.uint8)
            assert slide.stats()["tiles_asked"] == 0

    def test_the_same_pixels_have_the_same_name(self, file):
        path, _ = file

        def names():
            with open_slide(path, "cpu") as slide:
                channel = slide.level_array(0, 1)
                arrays = [*slide.levels, channel, slide.level_array(0, tolerant=True)]
                return [array.to_dask().name for array in arrays]

        first = names()
        assert len(set(first)) == len(first) == 4
        assert names() == first
        os.utime(path, (1, 1))
        assert not set(names()) & set(first)

    def test_the_same_name_in_another_process(self, file):
        code = (
            "import sys, napari_wsigpu\n"
            "with napari_wsigpu.open_slide(sys.argv[1], 'cpu') as slide:\n"
            "    print(slide.levels[0].to_dask().name)\n"
        )
        command = [sys.executable, "-c", code, file[0]]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        with open_slide(file[0], "cpu") as slide:
            assert slide.levels[0].to_dask().name == done.stdout.strip()

    def test_indexes_that_levels_do_not_take(self, file):
        path, pixels = file
        with open_slide(path) as slide:
            array = slide.levels[0].to_dask(1)
            with dask.config.set(scheduler="synchronous"):
                np.testing.assert_array_equal(array[[3, 100, 5]].compute(), pixels[[3, 100, 5]])
                mask = pixels[:, 0, 0] > 99
                np.testing.assert_array_equal(array[mask].compute(), pixels[mask])
                np.testing.assert_array_equal(array[7:90][::-2, 4].compute(), pixels[7:90][::-2, 4])

    @pytest.mark.parametrize("tiles", [0, -1, 1.5, "2"])
    def test_numbers_of_tiles_that_cannot_be(self, file, tiles):
        with (
            open_slide(file[0]) as slide,
            pytest.raises(RegionError, match=r"tiles is .* whole number >= 1"),
        ):
            slide.levels[0].to_dask(tiles)

    @pytest.mark.parametrize(
        ("shape", "tile", "expected"),
        [
            ((65536, 65536), (256, 256), (3328, 3328)),
            ((65536, 65536), (512, 512), (3584, 3072)),
            ((40000, 50000), (8, 50000), (216, 50000)),
            ((50000, 300), (256, 256), (37120, 300)),
            ((50000, 50000), (50000, 50000), (50000, 50000)),
            ((100, 90), (256, 256), (100, 90)),
        ],
    )
    def test_chunks_are_whole_tiles_of_some_megabytes(self, file, shape, tile, expected):
        with open_slide(file[0]) as slide:
            layout = with_level(slide.layout, shape, tile)
        array = Slide(layout).levels[0].to_dask()
        assert array.chunksize == (*expected, 3)
        assert all(
            size % side == 0 or size == extent
            for size, side, extent in zip(expected, tile, shape, strict=True)
        )
        assert np.prod(array.chunksize) <= max(CHUNK_BYTES, 3 * np.prod(np.minimum(tile, shape)))

    def test_the_layout_travels_once_not_with_every_task(self, file):
        with open_slide(file[0]) as slide:
            layout = with_level(slide.layout, (65536, 65536), (256, 256))
        array = Slide(layout).levels[0].to_dask(4)
        graph = dict(dask.optimize(array)[0].dask)
        sizes = sorted(len(pickle.dumps(task)) for task in graph.values())
        assert len(sizes) == 64 * 64 + 1
        assert sizes[-2] < 1000
        assert sizes[-1] < 16 * 65536 / 2

    def test_an_array_outlives_its_slide_in_other_processes_only(self, file, here):
        path, pixels = file
        with open_slide(path) as slide:
            array = slide.levels[0].to_dask()
            copy = pickle.loads(pickle.dumps(array))
        assert copy.name == array.name
        np.testing.assert_array_equal(copy.compute(scheduler="synchronous"), pixels)
        with pytest.raises(ValueError, match="was closed; open the slide again"):
            array.compute(scheduler="synchronous")

    def test_a_number_of_threads_goes_along(self, file, here):
        path, pixels = file
        with open_slide(path, threads=3) as slide:
            level = pickle.loads(pickle.dumps(DaskLevel(slide.levels[0], "cpu")))
            np.testing.assert_array_equal(level[...], pixels)
        assert sum("wsigpu-decode" in item.name for item in threading.enumerate()) in (1, 2)

    @pytest.mark.parametrize(
        ("key", "channel", "kept"),
        [
            (np.s_[:], None, 0),
            (np.s_[32:96, 48:144], None, 0),
            (np.s_[30:97, 48:144], None, 4),
            (np.s_[:64:2, :96], None, 4),
            (np.s_[:64, :96], 1, 4),
        ],
    )
    def test_tiles_that_a_task_reads_whole_are_not_kept_elsewhere(
        self, file, here, key, channel, kept
    ):
        path, pixels = file
        with open_slide(path, "cpu") as slide:
            level = DaskLevel(slide.level_array(0, channel), "cpu")
            elsewhere = pickle.loads(pickle.dumps(level))
            expected = pixels[key] if channel is None else pixels[..., channel][key]
            before = runtime.default().tiles.used
            np.testing.assert_array_equal(elsewhere[key], expected)
            assert (runtime.default().tiles.used - before) // (32 * 48 * 3) == kept
            np.testing.assert_array_equal(elsewhere[key], expected)
            np.testing.assert_array_equal(level[key], expected)
            shown = DaskLevel(slide.level_array(0, channel, tolerant=True), "cpu")
            np.testing.assert_array_equal(shown[key], expected)
            assert runtime.default().tiles.used > before

    def test_tolerant_levels_and_colours_stay_so(self, file, here):
        path, pixels = file
        with open_slide(path) as slide:
            grid = slide.layout.levels[0].grid
        with path.open("r+b") as opened:
            opened.seek(int(grid.offsets[0, 0, 0]))
            opened.write(bytes(int(grid.byte_counts[0, 0, 0])))
        with open_slide(path) as slide:
            array = slide.level_array(0, tolerant=True).to_dask()
            background = slide.layout.background
        found = pickle.loads(pickle.dumps(array)).compute(scheduler="synchronous")
        assert (found[:32, :48] == background).all()
        np.testing.assert_array_equal(found[32:], pixels[32:])


def with_level(layout, shape, tile):
    """Return a layout whose finest level has another size; the file lacks its tiles."""
    rows, columns = (-(-extent // side) for extent, side in zip(shape, tile, strict=True))
    counts = np.random.default_rng(0).integers(4000, 30000, (1, rows, columns))
    offsets = (counts.cumsum() - counts.ravel()).reshape(counts.shape)
    grid = TileGrid(*tile, offsets, counts)
    level = replace(layout.levels[0], height=shape[0], width=shape[1], grid=grid)
    return replace(layout, levels=(level,))


def tiles_on_device():
    pools = runtime.default().devices.tiles(HostDevice())._pools.values()
    return sum(np.count_nonzero(pool.owners[:, 0] != NO_TILE) for pool in pools)


class TestDevices:
    """With host memory in the place of a GPU's."""

    def test_chunks_lie_on_the_device(self, file, host_gpu):
        path, pixels = file
        with open_slide(path, "cuda") as slide:
            array = slide.levels[0].to_dask(2, device="cuda")
            assert array._meta.shape == (0, 0, 0)
            np.testing.assert_array_equal(array.compute(scheduler="synchronous"), pixels)
            channel = slide.level_array(1, 2).to_dask(1, device="cuda")
            assert channel._meta.shape == (0, 0)
            expected = pixels[::2, ::2, 2]
            np.testing.assert_array_equal(channel.compute(scheduler="synchronous"), expected)

    @pytest.mark.parametrize(
        "key",
        [
            np.s_[...],
            np.s_[3:100:7, 50:2:-3],
            np.s_[-1, ::-1, 1:],
            np.s_[5, 6, 2],
            np.s_[7:7, 9:30],
            np.s_[:, 330, ::-2],
        ],
    )
    def test_indexing_is_numpys(self, file, host_gpu, key):
        path, pixels = file
        with open_slide(path, "cuda") as slide:
            found = slide.levels[0].read(key, "cuda")
            assert found.shape == pixels[key].shape
            np.testing.assert_array_equal(found, pixels[key])
            if len(key if isinstance(key, tuple) else (key,)) < 3:
                channel = slide.level_array(0, 1).read(key, "cuda")
                np.testing.assert_array_equal(channel, pixels[..., 1][key])

    @pytest.mark.parametrize(
        ("key", "channel", "kept"),
        [
            (np.s_[:], None, 0),
            (np.s_[192:, 288:], None, 0),
            (np.s_[32:96, 48:144], None, 0),
            (np.s_[30:97, 48:144], None, 4),
            (np.s_[32:96, 47:145], None, 4),
            (np.s_[:64:2, :96], None, 4),
            (np.s_[:64, :96], 1, 4),
        ],
    )
    def test_tiles_that_a_task_reads_whole_are_not_kept_there(
        self, file, here, host_gpu, key, channel, kept
    ):
        path, pixels = file
        with open_slide(path, "cuda") as slide:
            level = DaskLevel(slide.level_array(0, channel), "cuda")
            elsewhere = pickle.loads(pickle.dumps(level))
            expected = pixels[key] if channel is None else pixels[..., channel][key]
            for _ in range(2):
                np.testing.assert_array_equal(elsewhere[key], expected)
                assert tiles_on_device() == kept
            np.testing.assert_array_equal(level[key], expected)
            assert tiles_on_device() > kept

    @pytest.mark.parametrize(
        ("own", "wanted", "expected"),
        [("auto", "cuda", "cuda"), ("auto", "cpu", "auto"), ("cpu", "cuda", "cpu")],
    )
    def test_what_decodes_in_other_processes(self, file, host_gpu, own, wanted, expected):
        with open_slide(file[0], own) as slide, slide.opener(wanted)() as other:
            assert other.device == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two slides of stained discs on glass, and a file that is none."""
    folder = tmp_path_factory.mktemp("slides")
    for number in range(2):
        slides.write_aperio(
            folder / f"{number}.svs", stained(400 + 90 * number, 610), tile=(48, 64)
        )
    (folder / "notes.txt").write_text("no slide")
    return folder


def stained(height, width):
    """Glass with a disc of tissue, noisy."""
    y, x = np.mgrid[:height, :width]
    disc = (y - height / 2) ** 2 + (x - width / 3) ** 2 < (height / 3) ** 2
    pixels = np.where(disc[..., None], (150, 80, 160), (241, 240, 243))
    noise = np.random.default_rng(height).integers(-9, 10, pixels.shape)
    return (pixels + noise).clip(0, 255).astype(np.uint8)


def alone(example, folder):
    with (
        open_slide(folder / "0.svs", "cpu") as first,
        open_slide(folder / "1.svs", "cpu") as second,
    ):
        return list(example.sweep([first, second], tiles=2))


class TestExample:
    def test_two_workers_find_what_one_process_finds(self, client, example, folder):
        expected = alone(example, folder)
        assert [len(record["tiles"]["row"]) > 10 for record in expected] == [True, True]
        with (
            open_slide(folder / "0.svs", "cpu") as first,
            open_slide(folder / "1.svs", "cpu") as second,
        ):
            found = list(example.sweep([first, second], client, tiles=2))
        assert sorted(found, key=lambda record: record["path"]) == expected

    def test_as_a_script(self, example, folder, tmp_path):
        out = tmp_path / "out.json"
        command = [sys.executable, EXAMPLE, folder, "--workers", "1", "--json", out]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        assert "Skipped: " in done.stderr
        assert "notes.txt" in done.stderr
        assert "2/2 " in done.stderr
        expected = alone(example, folder)
        assert json.loads(out.read_text()) == json.loads(json.dumps(expected))

    @pytest.mark.parametrize(
        ("given", "sentence"),
        [
            (["{}/missing"], "'{}/missing' can't be read ("),
            (["{}/0.svs"], "'{}/0.svs' can't be read ("),
            (["{}/empty"], "'{}/empty' contains no 8-bit RGB slide"),
            (["{}", "--scheduler", "127.0.0.1:9"], "No scheduler answers at '127.0.0.1:9'"),
            (["{}", "--scheduler", "x://a"], "No scheduler answers at 'x://a'"),
            (["{}", "--cuda"], "Leave out --cuda: 'cuda:0' can't be used because this machine"),
            (["{}", "--json", "{}/missing/a.json"], "'{}/missing/a.json' can't be written ("),
            (["{}", "--json", "{}"], "'{}' can't be written ("),
        ],
    )
    def test_what_can_not_be_is_said(
        self, example, folder, monkeypatch, capsys, fresh_runtime, given, sentence
    ):
        (folder / "empty").mkdir(exist_ok=True)
        words = [word.format(folder) for word in given]
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *words])
        monkeypatch.setattr(driver, "driver_available", lambda: False)
        with dask.config.set({"distributed.comm.timeouts.connect": "0.2s"}):
            assert example.main() == 1
        # A client that found no scheduler takes a lock when it is collected; it would wait forever
        # if that happened while another client starts.
        gc.collect()
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.splitlines()[-1].startswith(sentence.format(folder))
        assert "1/2 " not in printed.err

    @pytest.mark.parametrize("workers", ["-1", "many"])
    def test_workers_that_make_no_sense(self, example, folder, monkeypatch, capsys, workers):
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(folder), "--workers", workers])
        monkeypatch.setattr(example, "run", lambda given: 0)
        with pytest.raises(SystemExit):
            example.main()
        assert f"{workers} is not a whole number" in capsys.readouterr().err

    @pytest.mark.skipif(not FULL.exists(), reason="the system has no full disk to write to")
    def test_a_disk_that_is_full_in_the_end(self, example, folder, monkeypatch, capsys):
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(folder), "--json", str(FULL)])
        assert example.main() == 1
        *_, done, refusal = capsys.readouterr().err.splitlines()
        assert done.startswith("2/2 ")
        assert refusal.startswith(f"'{FULL}' can't be written (No space left")

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_damaged_slide_among_others(
        self, request, example, folder, tmp_path, monkeypatch, capsys, workers
    ):
        slides_of, out = tmp_path / "slides", tmp_path / "out.json"
        shutil.copytree(folder, slides_of)
        with open_slide(slides_of / "0.svs") as slide:
            grid = slide.layout.levels[0].grid
        with (slides_of / "0.svs").open("r+b") as file:
            for offset, count in zip(grid.offsets.flat, grid.byte_counts.flat, strict=True):
                file.seek(int(offset))
                file.write(bytes(int(count)))
        words = [str(EXAMPLE), str(slides_of), "--json", str(out)]
        if workers:
            client = request.getfixturevalue("client")
            words += ["--scheduler", client.scheduler.address]
        monkeypatch.setattr(sys, "argv", words)
        assert example.main() == 1
        bad, good = json.loads(out.read_text())
        assert set(bad) == {"path", "error"}
        assert bad["error"].startswith("The tile at level 0, row ")
        assert good["tiles"] == alone(example, folder)[1]["tiles"]
        lines = capsys.readouterr().err.splitlines()
        assert any(" 0.svs: The tile at level 0, row " in line for line in lines)
        assert any(" 1.svs: " in line and "% tissue" in line for line in lines)

    def test_otsus_threshold_parts_with_the_least_variance_within(self, example):
        rng = np.random.default_rng(0)
        values = np.concatenate([rng.normal(60, 9, 3000), rng.normal(150, 20, 900)])
        values = values.clip(0, 255).astype(np.uint8)
        within = [
            np.inf
            if not 0 < (values <= cut).sum() < values.size
            else values[values <= cut].var() * (values <= cut).sum()
            + values[values > cut].var() * (values > cut).sum()
            for cut in range(255)
        ]
        assert example.otsu(np.bincount(values, minlength=256)) == int(np.argmin(within))

    def test_otsus_threshold_of_a_single_value(self, example):
        assert example.find_tissue(np.full((5, 6, 3), 240, np.uint8)).mask.sum() in (0, 30)

    def test_stains_are_ruifroks(self, example):
        """Pixels that are made of known densities."""
        rng = np.random.default_rng(1)
        amounts = rng.uniform(0.1, 0.6, (50, 70, 2))
        colors = np.array([[0.65, 0.704, 0.286], [0.072, 0.99, 0.105]])
        colors /= np.linalg.norm(colors, axis=1, keepdims=True)
        pixels = np.round(255 * 10 ** -(amounts @ colors)).astype(np.uint8)
        found = example.measure_stains(pixels, (32, 48))
        assert found.shape == (2, 2, 4)
        for row, column in np.ndindex(2, 2):
            tile = amounts[row * 32 : row * 32 + 32, column * 48 : column * 48 + 48]
            expected = np.stack([tile.mean((0, 1)), tile.std((0, 1))], -1).ravel()
            np.testing.assert_allclose(found[row, column], expected, atol=2e-3)

    def test_tiles_of_tissue(self, example, folder):
        with open_slide(folder / "0.svs", "cpu") as slide:
            height, width = slide.levels[0].shape[:2]
            mask = np.zeros((height // 4, width // 4), bool)
            mask[24:36, 32:80] = True
            wanted = example.tiles_of_tissue(mask, slide)
        assert wanted.shape == (-(-height // 48), -(-width // 64))
        expected = np.zeros_like(wanted)
        expected[2, 2:5] = True
        np.testing.assert_array_equal(wanted, expected)

    def test_each_worker_of_a_gpu_cluster_sees_one(self, example, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-4a,5")
        with (
            dask.config.set(example.SETTINGS),
            example.start_gpu_cluster(2, memory_limit=0) as cluster,
            distributed.Client(cluster) as client,
        ):
            client.wait_for_workers(2)
            seen = client.run(os.getenv, "CUDA_VISIBLE_DEVICES")
            assert sorted(seen.values()) == ["3", "GPU-4a"]
            assert set(client.nthreads().values()) == {1}
