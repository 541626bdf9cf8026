"""Patches in PyTorch's loaders; skipped without PyTorch."""

import json

import numpy as np
import pytest

from napari_wsigpu import open_slide
from napari_wsigpu.datasets import Patches
from napari_wsigpu.model.errors import DeviceError, RegionError, SlideError, TileError
from tests.writers import slides

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from napari_wsigpu.datasets.torch import PatchDataset, PatchStream  # noqa: E402

# PyTorch warns about forking a process that has threads.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def patches(two_slides):
    return Patches.grid(two_slides, 48, mpp=0.998)


def check(patches, pixels, indices):
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (len(indices), 3, 48, 48)
    for picture, index in zip(pixels, indices.tolist(), strict=True):
        with open_slide(patches.paths[patches.slides[index]]) as slide:
            expected = slide.read_region(patches.locations[index], (48, 48), mpp=patches.mpp)
        np.testing.assert_array_equal(picture.permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_streams(patches, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    stream = PatchStream(patches, 7, shuffle=True, device=device)
    seen = []
    for pixels, indices in stream:
        assert pixels.device.type == device
        assert pixels.is_contiguous(memory_format=torch.channels_last)
        check(patches, pixels.cpu(), indices)
        seen += indices.tolist()
    assert len(stream) == -(-len(patches) // 7)
    assert sorted(seen) == list(range(len(patches)))
    stream.close()


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"color": "rgb"}, "Color 'rgb' is not supported"),
        ({"on_error": "ignore"}, "on_error is 'ignore'; use one of raise, skip"),
        ({"device": "gpu"}, "cannot be returned on device 'gpu'"),
    ],
)
def test_options_are_checked_at_once(patches, option, error):
    with pytest.raises(SlideError, match=error):
        PatchStream(patches, **option)
    if "device" not in option:
        with pytest.raises(SlideError, match=error):
            PatchDataset(patches, **option)


def test_batches_are_not_copied(patches):
    """Batches are views of the memory that tiles were decoded to."""
    stream = PatchStream(patches, 7)
    made = stream._worker_batches()
    arrays = []
    read = made.reader.read

    def noted(*arguments):
        arrays.append(read(*arguments))
        return arrays[-1]

    made.reader.read = noted
    addresses = {pixels.data_ptr() for pixels, _ in stream}
    assert addresses == {array.ctypes.data for array in arrays}
    stream.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_streams_in_loaders(patches, workers, shuffle):
    stream = PatchStream(patches, 3, shuffle=shuffle, transform=lambda pixels: pixels // 2)
    context = "fork" if workers else None
    seen = []
    for pixels, indices in DataLoader(
        stream, batch_size=None, num_workers=workers, multiprocessing_context=context
    ):
        assert int(pixels.max()) <= 127
        seen += indices.tolist()
    assert sorted(seen) == list(range(len(patches)))
    stream.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_map_style(patches, workers):
    data = PatchDataset(patches)
    assert len(data) == len(patches)
    with pytest.raises(IndexError, match=f"index -{len(data) + 1} is out of range for {len(data)}"):
        data[-len(data) - 1]
    picture, index = data[-2]
    check(patches, picture[None], torch.tensor([index]))
    assert index == len(patches) - 2
    loader = DataLoader(
        data,
        batch_size=5,
        shuffle=True,
        num_workers=workers,
        collate_fn=data.collate,
        multiprocessing_context="spawn" if workers else None,
    )
    seen = []
    for pixels, indices in loader:
        check(patches, pixels, indices)
        seen += indices.tolist()
    assert sorted(seen) == list(range(len(patches)))


def test_ranks_divide_an_epoch(patches):
    seen = []
    for rank in range(3):
        stream = PatchStream(patches, 4, shuffle=True, rank=rank, world_size=3)
        found = [indices.tolist() for _, indices in stream]
        assert len(found) == len(stream)
        seen += [index for batch in found for index in batch]
        stream.close()
    assert sorted(seen) == list(range(len(patches)))
    lengths = {
        len(PatchStream(patches, 4, drop_last=True, rank=rank, world_size=3)) for rank in range(3)
    }
    assert lengths == {len(patches) // 12}


def test_resumed(patches):
    stream = PatchStream(patches, 4, shuffle=True, seed=5)
    stream.set_epoch(2)
    expected = [indices.tolist() for _, indices in stream]
    stream.set_epoch(2)
    seen = []
    for _, indices in stream:
        seen.append(indices.tolist())
        state = json.loads(json.dumps(stream.state_dict()))
        if len(seen) == 3:
            break
    other = PatchStream(patches, 4, shuffle=True, seed=5)
    other.load_state_dict(state)
    assert seen + [indices.tolist() for _, indices in other] == expected
    assert other.state_dict()["epoch"] == 3
    for each in (stream, other):
        each.close()


def test_processes_do_not_share_one_state(patches):
    stream = PatchStream(patches, 4)
    next(iter(stream))
    state = stream.state_dict()
    stream.load_state_dict(state)
    with pytest.raises(RegionError, match="StatefulDataLoader"):
        list(DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context="fork"))
    stream.close()


def test_processes_decode_to_no_device(patches, host_gpu, monkeypatch):
    monkeypatch.setattr("napari_wsigpu.datasets.torch._CudaMemory", lambda device: None)
    stream = PatchStream(patches, device="cuda")
    with pytest.raises(DeviceError, match="num_workers=0"):
        list(DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context="fork"))


def test_memory_of_pytorch(patches, host_gpu, monkeypatch):
    """Tiles are decoded directly into the tensors that the stream yields."""

    class HostMemory:
        def __init__(self, device):
            assert device == "cuda"

        def __call__(self, shape, dtype):
            tensor = torch.empty(shape, dtype=torch.uint8)
            return tensor, tensor.numpy()

    monkeypatch.setattr("napari_wsigpu.datasets.torch._CudaMemory", HostMemory)
    stream = PatchStream(patches, 7, shuffle=True, device="cuda")
    for pixels, indices in stream:
        check(patches, pixels, indices)
    stream.close()


def test_failures_in_processes_are_reported(two_slides, tmp_path):
    damaged = tmp_path / "damaged.svs"
    slides.write_aperio(damaged, slides.picture(60, 60), (), encode=lambda tile: b"damaged")
    options = {"num_workers": 1, "multiprocessing_context": "fork"}
    for path, sentence in ((damaged, "could not be decoded"), (tmp_path / "none", "no file")):
        data = PatchDataset(Patches.at({path: [(3, 4)]}, 30))
        with pytest.raises(Exception, match=sentence):
            list(DataLoader(data, collate_fn=data.collate, **options))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_errors_keep_their_locations_in_processes(partly_damaged, context):
    data = PatchDataset(partly_damaged)
    options = {"num_workers": 1, "multiprocessing_context": context, "batch_size": 9}
    with pytest.raises(TileError, match=r"in the region at \(32, 32\)") as caught:
        list(DataLoader(data, collate_fn=data.collate, **options))
    error = caught.value
    assert (error.path, error.locations) == (partly_damaged.paths[0], ((32, 32),))
    assert [name for name, _ in error.failures] == ["level 0, row 1, column 1"]
    assert "DataLoader worker process 0" in error.__notes__[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_patches_can_be_skipped(partly_damaged, workers, caplog):
    options = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    stream = PatchStream(partly_damaged, 2, on_error="skip")
    data = PatchDataset(partly_damaged, on_error="skip")
    for loader in (
        DataLoader(stream, batch_size=None, **options),
        DataLoader(data, batch_size=4, collate_fn=data.collate, **options),
    ):
        seen = [index for _, indices in loader for index in indices.tolist()]
        assert sorted(seen) == [0, 1, 2, 3, 5, 6, 7, 8]
    if not workers:
        assert list(stream.failures) == [4] == list(data.failures)
        assert stream.failures[4].locations == ((32, 32),)
        assert caplog.text.count("1 patches have damaged tiles: 4 at (32, 32) in") == 2
        with pytest.raises(TileError):
            data[4]


def test_a_new_process_starts_a_new_epoch(patches):
    stream = PatchStream(patches, 3, shuffle=True)
    loader = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="fork")

    def orders(loader):
        return [indices.tolist() for _, indices in loader]

    epochs = [orders(loader) for _ in range(3)]
    for epoch in epochs:
        assert sorted(index for batch in epoch for index in batch) == list(range(len(patches)))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    stream.set_epoch(1)
    assert orders(loader) == epochs[1]
    assert orders(loader) == epochs[2]
