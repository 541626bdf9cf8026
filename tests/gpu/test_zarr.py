import logging
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import napari_wsigpu
from napari_wsigpu.compat.zarr_to_gpu import read_zarr_to_gpu
from napari_wsigpu.gpu.device import driver
from napari_wsigpu.gpu.transfer import zarr_reader
from napari_wsigpu.model.errors import (
    DeviceError,
    MissingPackageError,
    RegionError,
    SlideReadError,
    UnsupportedArrayError,
)
from napari_wsigpu.storage.zarr.chunks import (
    MAX_CHUNKS,
    axes_of,
    batches_of,
    chunk_encoding,
    find_chunks,
    local_files,
)

pytest.importorskip("nvidia.nvimgcodec")
numcodecs = pytest.importorskip("numcodecs")
zarr = pytest.importorskip("zarr")

# zarr warns of each codec that is not in the specification of v3.
pytestmark = pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")

SHAPE, CHUNKS, SHARDS = (3, 70, 90), (1, 32, 32), (2, 64, 96)
FILL = 7
SELECTIONS = [
    ...,
    (0,),
    np.s_[1, 10:60, 5:88],
    np.s_[..., 33],
    np.s_[-1, ::3, 1::7],
    np.s_[:, 31:34, -1],
    np.s_[2, 69, 89],
    np.s_[0:0, :, :],
    np.s_[:2, 200:300],
    (slice(None), 5, ...),
    2,
]


def compressor(name, version):
    """Created on demand, because zarr warns of LZ4, which is not in the specification of v3."""
    if version == 2:
        return {"zstd": numcodecs.Zstd(level=1), "LZ4": numcodecs.LZ4()}[name]
    from zarr.codecs import ZstdCodec
    from zarr.codecs.numcodecs import LZ4

    return ZstdCodec(level=1) if name == "zstd" else LZ4()


STORED = {
    "raw v2": {"zarr_format": 2},
    "raw v3": {"zarr_format": 3},
    "raw shards": {"zarr_format": 3, "shards": SHARDS},
    "zstd v2": {"zarr_format": 2, "compressors": "zstd"},
    "zstd v3": {"zarr_format": 3, "compressors": "zstd"},
    "zstd shards": {"zarr_format": 3, "compressors": "zstd", "shards": SHARDS},
    "LZ4 v2": {"zarr_format": 2, "compressors": "LZ4"},
    "LZ4 v3": {"zarr_format": 3, "compressors": "LZ4"},
    "LZ4 shards": {"zarr_format": 3, "compressors": "LZ4", "shards": SHARDS},
}


def make(path, *, dtype="uint16", missing=False, **options):
    """Write an array with zarr, or only a few of its chunks if some shall be missing."""
    if isinstance(options.get("compressors"), str):
        name, version = options["compressors"], options["zarr_format"]
        options = options | {"compressors": compressor(name, version)}
    array = zarr.create_array(
        store=path,
        shape=SHAPE,
        dtype=dtype,
        fill_value=FILL,
        **{"compressors": None, "chunks": CHUNKS} | options,
    )
    pixels = np.random.default_rng(0).integers(0, 250, SHAPE).astype(dtype)
    if missing:
        array[:2, :32, 32:] = pixels[:2, :32, 32:]
    else:
        array[...] = pixels
    return array


def way_of(name):
    return "direct" if name.startswith("raw") else "nvcomp"


@pytest.fixture(autouse=True)
def device(host_gpu, monkeypatch):
    """A device with numcodecs instead of nvCOMP, and small batches."""

    def decompress(parts, algorithm, size, device, stream):
        codec = {"Zstd": numcodecs.Zstd(), "LZ4": numcodecs.LZ4()}[algorithm]
        decoded = [np.frombuffer(codec.decode(part.tobytes()), np.uint8) for part in parts]
        assert {each.size for each in decoded} == {size}
        return np.stack(decoded)

    monkeypatch.setattr(zarr_reader, "decompress", decompress)
    monkeypatch.setattr(zarr_reader, "BATCH_BYTES", 5000)
    monkeypatch.setattr(zarr_reader, "_warned", set())
    return host_gpu


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("name", STORED)
def test_all_methods_agree(tmp_path, name, missing):
    array = make(tmp_path / "a.zarr", missing=missing, **STORED[name])
    for selection in SELECTIONS:
        expected = np.asarray(array[selection])
        for how in ("auto", way_of(name), "host"):
            found = read_zarr_to_gpu(array, selection, how=how)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected, err_msg=f"{how} {selection}")


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "float64", "complex64"])
@pytest.mark.parametrize("index", ["start", "end"])
def test_types_and_indices_of_shards(tmp_path, dtype, index):
    """With the index first, chunks are not aligned to their elements."""
    serializer = zarr.codecs.BytesCodec()
    codec = zarr.codecs.ShardingCodec(chunk_shape=CHUNKS, codecs=[serializer], index_location=index)
    array = zarr.create_array(
        tmp_path / "a.zarr",
        shape=SHAPE,
        dtype=dtype,
        chunks=SHARDS,
        serializer=codec,
        compressors=None,
        filters=None,
    )
    array[...] = np.random.default_rng(0).integers(0, 250, SHAPE).astype(dtype)
    found = read_zarr_to_gpu(array, np.s_[1:, 3:50], how="direct")
    np.testing.assert_array_equal(found, array[1:, 3:50])


@pytest.mark.parametrize(
    "options",
    [{"zarr_format": 2, "order": "C"}, {"zarr_format": 3}],
    ids=["v2", "v3"],
)
def test_a_single_value(tmp_path, options):
    array = zarr.create_array(
        tmp_path / "a.zarr", shape=(), dtype="float32", compressors=None, **options
    )
    array[...] = 2.5
    assert read_zarr_to_gpu(array, how="direct") == 2.5


def test_a_path_and_an_array_in_a_group(tmp_path):
    group = zarr.create_group(tmp_path / "g.zarr")
    array = group.create_array("deep/0", shape=(9, 9), dtype="uint8", compressors=None)
    array[...] = np.arange(81).reshape(9, 9)
    for given_array in (tmp_path / "g.zarr/deep/0", str(tmp_path / "g.zarr/deep/0"), array):
        found = read_zarr_to_gpu(given_array, np.s_[2:4], how="direct")
        np.testing.assert_array_equal(found, array[2:4])


REFUSED = {
    "Fortran order": ({"zarr_format": 2, "order": "F"}, "Fortran"),
    "a filter": ({"zarr_format": 2, "filters": [numcodecs.Delta("<u2")]}, "filters"),
    "a transposition": (
        {"filters": [zarr.codecs.TransposeCodec(order=(2, 1, 0))]},
        "transpose, bytes",
    ),
    "big-endian v2": ({"zarr_format": 2, "dtype": ">u2"}, "byte order"),
    "big-endian v3": (
        {"serializer": zarr.codecs.BytesCodec(endian="big")},
        "byte order",
    ),
    "gzip v2": ({"zarr_format": 2, "compressors": numcodecs.GZip()}, "gzip"),
    "gzip v3": ({"compressors": zarr.codecs.GzipCodec()}, "gzip"),
    "blosc": ({"compressors": zarr.codecs.BloscCodec()}, "blosc"),
    "a checksum": ({"compressors": zarr.codecs.Crc32cCodec()}, "crc32c"),
    "two codecs": (
        {"compressors": [zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()]},
        "zstd, crc32c",
    ),
    "gzip in shards": ({"compressors": zarr.codecs.GzipCodec(), "shards": SHARDS}, "gzip"),
}


@pytest.mark.parametrize(("options", "reason"), REFUSED.values(), ids=REFUSED)
def test_arrays_that_only_zarr_reads(tmp_path, caplog, options, reason):
    array = make(tmp_path / "a.zarr", **options)
    for how in ("direct", "nvcomp"):
        with pytest.raises(UnsupportedArrayError, match=f"{reason}.*how='auto'"):
            read_zarr_to_gpu(array, how=how)
    np.testing.assert_array_equal(read_zarr_to_gpu(array), array[...])
    assert not caplog.records  # no method has failed


def test_other_stores(tmp_path):
    array = make(zarr.storage.MemoryStore())
    with pytest.raises(UnsupportedArrayError, match="local folder"):
        read_zarr_to_gpu(array, how="direct")
    np.testing.assert_array_equal(read_zarr_to_gpu(array), array[...])


def test_other_types(tmp_path):
    array = zarr.create_array(tmp_path / "a.zarr", shape=(3,), dtype="datetime64[s]")
    with pytest.raises(UnsupportedArrayError, match="datetime64"):
        read_zarr_to_gpu(array, how="direct")


@pytest.mark.parametrize(("name", "how"), [("raw v3", "nvcomp"), ("zstd v3", "direct")])
def test_method_for_other_chunks(tmp_path, name, how):
    array = make(tmp_path / "a.zarr", **STORED[name])
    with pytest.raises(UnsupportedArrayError, match="compressed"):
        read_zarr_to_gpu(array, how=how)


def test_an_unusual_index(tmp_path):
    index = [zarr.codecs.BytesCodec(endian="big"), zarr.codecs.Crc32cCodec()]
    codec = zarr.codecs.ShardingCodec(
        chunk_shape=CHUNKS, codecs=[zarr.codecs.BytesCodec()], index_codecs=index
    )
    array = make(tmp_path / "a.zarr", chunks=SHARDS, serializer=codec)
    with pytest.raises(UnsupportedArrayError, match="index"):
        read_zarr_to_gpu(array, how="direct")
    np.testing.assert_array_equal(read_zarr_to_gpu(array), array[...])


class TestDamage:
    @pytest.mark.parametrize("name", ["raw v2", "raw v3"])
    def test_truncated_chunk(self, tmp_path, name):
        array = make(tmp_path / "a.zarr", **STORED[name])
        path = tmp_path / "a.zarr" / array.metadata.encode_chunk_key((0, 0, 0))
        path.write_bytes(path.read_bytes()[:-2])
        with pytest.raises(UnsupportedArrayError, match="does not match its chunks"):
            read_zarr_to_gpu(array, how="direct")
        with pytest.raises(SlideReadError):
            read_zarr_to_gpu(array)

    @pytest.mark.parametrize("place", [-1, -30])
    def test_a_damaged_index(self, tmp_path, place):
        array = make(tmp_path / "a.zarr", **STORED["raw shards"])
        path = tmp_path / "a.zarr" / array.metadata.encode_chunk_key((0, 0, 0))
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        with pytest.raises(UnsupportedArrayError, match=r"index of .* is damaged"):
            read_zarr_to_gpu(array, how="direct")

    def test_file_that_is_not_a_shard(self, tmp_path):
        array = make(tmp_path / "a.zarr", **STORED["raw shards"])
        path = tmp_path / "a.zarr" / array.metadata.encode_chunk_key((0, 0, 0))
        path.write_bytes(b"short")
        with pytest.raises(UnsupportedArrayError, match="shorter"):
            read_zarr_to_gpu(array, how="direct")

    def test_a_compressed_chunk(self, tmp_path):
        array = make(tmp_path / "a.zarr", **STORED["zstd v3"])
        path = tmp_path / "a.zarr" / array.metadata.encode_chunk_key((0, 0, 0))
        path.write_bytes(b"no zstd")
        with pytest.raises(SlideReadError, match="cannot be read"):
            read_zarr_to_gpu(array)

    @pytest.mark.parametrize("name", ["raw v3", "zstd v3"])
    def test_failed_method_is_skipped_and_logged_once(self, tmp_path, monkeypatch, caplog, name):
        def fail(*arguments):
            raise RuntimeError("CUDA_ERROR_UNKNOWN")

        monkeypatch.setattr(zarr_reader, "_fill", fail)
        array = make(tmp_path / "a.zarr", **STORED[name])
        for _ in range(2):
            np.testing.assert_array_equal(read_zarr_to_gpu(array), array[...])
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert f"how='{way_of(name)}': CUDA_ERROR_UNKNOWN" in record.message
        with pytest.raises(SlideReadError, match="CUDA_ERROR_UNKNOWN"):
            read_zarr_to_gpu(array, how=way_of(name))


def test_error_without_a_gpu_recommends_zarr(tmp_path, host_machine, monkeypatch):
    def refuse(index):
        monkeypatch.setattr(driver, "driver_available", lambda: False)
        return driver.import_cuda("cupy", f"cuda:{index}")

    host_machine.open = refuse
    with pytest.raises(DeviceError, match=r"no NVIDIA driver; read the array with zarr\.$"):
        read_zarr_to_gpu(make(tmp_path / "a.zarr"))


class TestErrors:
    @pytest.mark.parametrize(
        "selection",
        [np.s_[5], np.s_[0, 0, 0, 0], np.s_[..., ...], np.s_[::-1], np.s_[1.5], np.s_[[0, 1]], "x"],
    )
    def test_selections(self, tmp_path, selection):
        array = make(tmp_path / "a.zarr")
        with pytest.raises(RegionError):
            read_zarr_to_gpu(array, selection)

    def test_unknown_method(self, tmp_path):
        with pytest.raises(RegionError, match="'fast'"):
            read_zarr_to_gpu(make(tmp_path / "a.zarr"), how="fast")

    def test_devices(self, tmp_path):
        array = make(tmp_path / "a.zarr")
        for device, advice in (
            ("cpu", "use device='cuda' or 'cuda:1'"),
            ("gpu", "use device='cuda' or 'cuda:1'"),
            ("cuda:9", "use 'cuda:0'"),
        ):
            with pytest.raises(DeviceError, match=f"; {advice}\\.$"):
                read_zarr_to_gpu(array, device=device)

    def test_no_array(self, tmp_path):
        with pytest.raises(SlideReadError, match="Zarr array"):
            read_zarr_to_gpu(tmp_path / "none.zarr")

    def test_memory(self, tmp_path, device, monkeypatch):
        def empty(shape, dtype):
            raise MemoryError

        monkeypatch.setattr(device, "empty", empty)
        with pytest.raises(RegionError, match="doesn't fit"):
            read_zarr_to_gpu(make(tmp_path / "a.zarr"))

    def test_no_zarr(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "zarr", None)
        with pytest.raises(MissingPackageError, match=r"pip install .napari-wsigpu\[zarr\]"):
            napari_wsigpu.read_zarr_to_gpu("a.zarr")


@given(st.data())
def test_found_chunks_match_zarr(tmp_path_factory, data):
    """Chunk by chunk with NumPy, compared with zarr's own result."""
    size = data.draw(st.integers(1, 30))
    chunk = data.draw(st.integers(1, 12))
    begin, end = (data.draw(st.integers(-35, 35)) for _ in range(2))
    step = data.draw(st.integers(1, 9))
    path = tmp_path_factory.mktemp("zarr") / "a.zarr"
    array = zarr.create_array(path, shape=(size,), chunks=(chunk,), dtype="i4", compressors=None)
    array[...] = np.arange(size) + 1
    [axis] = axes = axes_of(slice(begin, end, step), array.shape)
    chunks, complete = find_chunks(array, chunk_encoding(array), axes, local_files(array))
    assert complete
    found = np.zeros(axis.length, "i4")
    for part in chunks:
        stored = np.frombuffer(Path(part.path).read_bytes(), "i4")
        assert part.size == stored.nbytes
        found[part.target] = stored[part.inside]
    np.testing.assert_array_equal(found, (np.arange(size) + 1)[begin:end:step])


def test_batch_reads_few_files(tmp_path):
    array = zarr.create_array(
        tmp_path / "a.zarr", shape=(300,), chunks=(1,), dtype="u1", compressors=None
    )
    array[...] = np.arange(300) % 250 + 1
    axes = axes_of(..., array.shape)
    chunks, _ = find_chunks(array, chunk_encoding(array), axes, local_files(array))
    batches = list(batches_of(chunks, 1 << 20))
    assert [len(batch) for batch in batches] == [MAX_CHUNKS, MAX_CHUNKS, 300 - 2 * MAX_CHUNKS]
    assert list(chain.from_iterable(batches)) == chunks
    np.testing.assert_array_equal(read_zarr_to_gpu(array, how="direct"), array[...])
