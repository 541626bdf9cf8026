"""Each patch is yielded once, with its pixels, in a reproducible order."""

import json
import multiprocessing
import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_wsigpu import datasets, open_slide
from napari_wsigpu.datasets import Order, PatchBatches, Patches
from napari_wsigpu.datasets.batches import PatchReader
from napari_wsigpu.model.errors import RegionError, SlideNotFoundError, TileError
from napari_wsigpu.reading import tile_schedule
from tests.writers import slides


@pytest.fixture
def patches(two_slides):
    return Patches.grid(two_slides, 48, mpp=0.998)


def pixels_of(patches, index):
    with open_slide(patches.paths[patches.slides[index]]) as slide:
        return slide.read_region(
            patches.locations[index], patches.size, patches.level, mpp=patches.mpp
        )


def indices_of(batches):
    return [index for batch in batches for index in batch.indices.tolist()]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pixels(patches, shuffle, device, request):
    if device != "cpu":
        request.getfixturevalue("host_gpu")
    batches = PatchBatches(patches, Order(7, shuffle), device)
    seen = []
    for pixels, indices in batches:
        assert pixels.shape == (len(indices), 48, 48, 3)
        for picture, index in zip(pixels, indices.tolist(), strict=True):
            np.testing.assert_array_equal(picture, pixels_of(patches, index))
        seen += indices.tolist()
    assert sorted(seen) == list(range(len(patches)))
    assert (seen != sorted(seen)) == shuffle
    batches.close()


@pytest.mark.parametrize("shuffle", [False, True])
def test_pixels_of_planes(two_stacks, shuffle):
    paths, stacks = two_stacks
    patches = Patches.grid(paths, 40, z="all", t="all")
    batches = PatchBatches(patches, Order(9, shuffle))
    seen = []
    for pixels, indices in batches:
        for picture, index in zip(pixels, indices.tolist(), strict=True):
            (x, y), (z, t) = patches.locations[index], patches.planes[index]
            expected = np.zeros_like(picture)
            inside = stacks[patches.slides[index]][t, z, :, y : y + 40, x : x + 40]
            expected[: inside.shape[1], : inside.shape[2]] = np.moveaxis(inside, 0, -1)
            np.testing.assert_array_equal(picture, expected)
        seen += indices.tolist()
    assert sorted(seen) == list(range(len(patches)))
    batches.close()


@pytest.mark.parametrize("shuffle", [False, True])
def test_tiles_of_later_patches_stay_cached(patches, shuffle, monkeypatch):
    opened = []
    monkeypatch.setattr(
        datasets.batches,
        "open_slide",
        lambda *a, **b: opened.append(open_slide(*a, **b)) or opened[-1],
    )
    monkeypatch.setattr(datasets.batches, "READERS_ON_HOST", 1)
    monkeypatch.setattr(datasets.batches, "default_threads", lambda: 2)
    batches = PatchBatches(patches, Order(7, shuffle))
    assert sum(len(indices) for _, indices in batches) == len(patches)
    decoded = sum(slide.stats()["decoded"]["cpu"] for slide in opened)
    grids = [slide.layout.levels[1].grid for slide in opened]
    assert decoded == sum(grid.rows * grid.columns for grid in grids)
    assert opened[0].runtime.tiles.used == 0
    batches.close()


@pytest.mark.parametrize(("name", "most"), [("schedules.STRETCH", 5), ("MAX_ACCESSES", 3)])
def test_long_epochs_use_several_schedules(patches, monkeypatch, name, most):
    module = datasets.schedules if name.startswith("schedules") else tile_schedule
    monkeypatch.setattr(module, name.rpartition(".")[2], most)
    for pixels, indices in PatchBatches(patches, Order(7, shuffle=True)):
        for picture, index in zip(pixels, indices.tolist(), strict=True):
            np.testing.assert_array_equal(picture, pixels_of(patches, index))


@pytest.mark.usefixtures("leaves_nothing")
def test_abandoned_iterator_leaves_nothing(patches):
    batches = PatchBatches(patches, Order(3))
    iterator = iter(batches)
    next(iterator)
    iterator.close()
    batches.close()


orders = st.builds(
    Order,
    batch_size=st.integers(1, 9),
    shuffle=st.booleans(),
    seed=st.integers(0, 9),
    slides_at_once=st.integers(1, 4),
)
tables = st.lists(st.integers(0, 6), min_size=1, max_size=6).map(
    lambda counts: Patches.at({str(i): [(0, 0)] * count for i, count in enumerate(counts)}, 8)
)


@given(tables, orders, st.integers(1, 5), st.integers(0, 3))
def test_shards_cover_everything_once(patches, order, shards, epoch):
    indices = order.indices(patches, epoch)
    seen = []
    for shard in range(shards):
        part = order.part(shard, shards)
        numbers = part.batches(patches)
        assert part.checksum(patches, part.indices(patches, epoch)) == order.checksum(
            patches, indices
        )
        for number in numbers:
            batch = order.batch(patches, indices, number)
            assert 0 < len(batch) <= order.batch_size
            assert (np.diff(patches.slides[batch]) >= 0).all()
            seen += batch.tolist()
    assert sorted(seen) == list(range(len(patches)))


@given(tables, st.integers(1, 5), st.integers(1, 5))
def test_drop_last_gives_equal_full_batches(patches, batch_size, shards):
    order = Order(batch_size, drop_last=True)
    counts = {len(order.part(shard, shards).batches(patches)) for shard in range(shards)}
    assert counts == {len(patches) // batch_size // shards}


def test_few_slides_at_once():
    patches = Patches.at({str(i): [(0, 0)] * 10 for i in range(20)}, 8)
    order = Order(10, shuffle=True, slides_at_once=4)
    for epoch in (0, 1):
        indices = order.indices(patches, epoch)
        groups = [set(patches.slides[indices[i : i + 40]].tolist()) for i in range(0, 200, 40)]
        assert [len(group) for group in groups] == [4] * 5
    assert not np.array_equal(order.indices(patches, 0), order.indices(patches, 1))


@pytest.mark.parametrize("after", [0, 1, 3, "all"])
def test_epoch_continues_from_saved_state(patches, after):
    order = Order(4, shuffle=True, seed=3)
    first = PatchBatches(patches, order)
    list(first)
    expected = [indices_of(first), indices_of(first)]
    assert first.epoch == 3

    killed = PatchBatches(patches, order)
    killed.epoch = 1
    seen = []
    for number, batch in enumerate(killed):
        if number == after:
            break
        seen += batch.indices.tolist()
        state = json.loads(json.dumps(killed.state_dict()))
    if after == 0:
        killed = PatchBatches(patches, order)
        killed.epoch, state = 1, None
        state = killed.state_dict()

    resumed = PatchBatches(patches, order)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert seen + indices_of(resumed) == expected[0]
    # The next epoch is complete.
    assert indices_of(resumed) == expected[1]
    for batches in (first, killed, resumed):
        batches.close()


def test_new_iterator_restarts_the_epoch(patches):
    batches = PatchBatches(patches, Order(4))
    for _ in batches:
        break
    assert batches.state_dict()["batches"] == 1
    assert indices_of(batches) == list(range(len(patches)))
    batches.close()


def test_newest_iterator_counts(patches):
    batches = PatchBatches(patches, Order(4))
    older = iter(batches)
    next(older)
    newer = iter(batches)
    next(newer)
    list(older)
    assert (batches.epoch, batches.state_dict()["batches"]) == (0, 1)
    list(newer)
    assert (batches.epoch, batches.state_dict()["batches"]) == (1, 0)
    batches.close()


def test_epoch_set_during_iteration_comes_next(patches):
    batches = PatchBatches(patches, Order(4, shuffle=True))
    for _ in batches:
        batches.epoch = 5
    expected = PatchBatches(patches, batches.order)
    expected.epoch = 5
    assert batches.state_dict() == expected.state_dict()
    assert indices_of(batches) == indices_of(expected)
    expected.close()
    assert batches.epoch == 6
    batches.close()


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (Order(4, shuffle=True, seed=4), "checksum"),
        (Order(5, shuffle=True, seed=3), "batch_size"),
        (Order(4, shuffle=True, seed=3, shard=1, shards=2), "shard"),
    ],
)
def test_states_of_other_datasets_are_refused(patches, other, name):
    state = PatchBatches(patches, Order(4, shuffle=True, seed=3)).state_dict()
    with pytest.raises(RegionError, match=f"its {name} is"):
        PatchBatches(patches, other).load_state_dict(state)
    with pytest.raises(RegionError, match="its epoch is None"):
        PatchBatches(patches, other).load_state_dict({})


def test_slides_are_opened_when_needed_and_closed(tmp_path, handles_of):
    paths = [tmp_path / f"{number}.svs" for number in range(5)]
    for path in paths:
        slides.write_aperio(path, slides.picture(60, 60), (), thumbnail=False, associated=())
    patches = Patches.at({path: [(0, 0), (5, 5)] for path in paths}, 30)
    reader = PatchReader(patches, open_slides=2, threads=1)
    for index in range(0, 10, 2):
        reader.read(np.array([index, index + 1]))
        open_now = [number for number, path in enumerate(paths) if handles_of(path)]
        assert open_now == list(range(max(0, index // 2 - 1), index // 2 + 1))
    reader.close()
    assert not any(handles_of(path) for path in paths)


def _read(reader, index, queue):
    queue.put((reader.read(np.array([index])), os.getpid()))


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_other_processes(patches, way):
    if way not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {way} here")
    reader = PatchReader(patches, threads=1)
    expected = reader.read(np.array([5]))
    context = multiprocessing.get_context(way)
    queue = context.Queue()
    process = context.Process(target=_read, args=(reader, 5, queue))
    process.start()
    pixels, number = queue.get(timeout=60)
    process.join(60)
    np.testing.assert_array_equal(pixels, expected)
    assert number != os.getpid()
    reader.close()


def test_readers_are_pickled_without_slides(patches):
    reader = PatchReader(patches)
    before = len(pickle.dumps(reader))
    reader.read(np.array([0]))
    assert len(pickle.dumps(reader)) == before
    reader.close()


def test_slides_that_differ(two_slides, tmp_path):
    gray = tmp_path / "gray.tif"
    slides.write_pyramid(gray, slides.picture(100, 100, 1), (2,))
    patches = Patches.at({two_slides[0]: [(0, 0)], gray: [(0, 0)]}, 30)
    with pytest.raises(RegionError, match=r"gray.*has 1 channels.*put these slides"):
        list(PatchBatches(patches, Order(2)))


def test_failures_reach_the_caller(two_slides, tmp_path):
    damaged = tmp_path / "damaged.svs"
    slides.write_aperio(damaged, slides.picture(60, 60), (), encode=lambda tile: b"damaged")
    patches = Patches.at({two_slides[0]: [(0, 0)], damaged: [(3, 4)]}, 30)
    batches = iter(PatchBatches(patches, Order(1)))
    assert next(batches).indices.tolist() == [0]
    with pytest.raises(TileError, match=r"damaged.svs.*region at \(3, 4\)"):
        next(batches)
    missing = Patches.at({tmp_path / "none.svs": [(0, 0)]}, 30)
    with pytest.raises(SlideNotFoundError, match=r"none\.svs"):
        list(PatchBatches(missing, Order(1)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"slides_at_once": 1.5}, "slides_at_once is 1.5"),
        ({"shard": 2, "shards": 2}, "Shard 2 is out of range for 2 shards"),
    ],
)
def test_invalid_orders(options, sentence):
    with pytest.raises(RegionError, match=sentence):
        Order(**options)


def test_caller_allocates_memory(patches):
    given = []

    def empty(shape, dtype):
        given.append(np.zeros(shape, dtype))
        return ("mine", len(given) - 1), given[-1]

    for (name, number), indices in PatchBatches(patches, Order(7), empty=empty):
        assert name == "mine"
        np.testing.assert_array_equal(given[number][0], pixels_of(patches, indices[0]))


@pytest.mark.parametrize("on_error", ["skip", "background"])
def test_damaged_tiles_need_not_end_an_epoch(partly_damaged, on_error, caplog):
    patches = partly_damaged
    with pytest.raises(TileError):
        list(PatchBatches(patches, Order(4)))
    batches = PatchBatches(patches, Order(1), on_error=on_error)
    for _ in range(2):
        caplog.clear()
        found = {
            int(index): pixels
            for batch in batches
            for index, pixels in zip(batch[1], batch[0], strict=True)
        }
        assert "1 patches have damaged tiles: 4 at (32, 32) in" in caplog.text
    assert list(batches.reader.failures) == [4]
    assert sorted(found) == [index for index in range(9) if on_error == "background" or index != 4]
    if on_error == "background":
        assert (found[4] == 255).all()
    batches.close()


def test_an_unknown_treatment_of_errors(tmp_path):
    with pytest.raises(RegionError, match="on_error is 'ignore'; use one of raise, skip"):
        PatchBatches(Patches.at({tmp_path: []}, 16), Order(1), on_error="ignore")
