"""What only a CUDA device shows of `python -m benchmarks`: device memory, nvCOMP and kvikio."""

import json

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.transfers.chunk_writer import ChunkWriter
from benchmarks.transfers.device_chunks import DeviceChunkWriter, KvikioChunkWriter, Lz4Encoder
from tests.writers import slides

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")
zarr = pytest.importorskip("zarr")
numcodecs = pytest.importorskip("numcodecs")

SHAPE, CHUNK = (700, 900, 3), (256, 128)
OURS = "napari-wsigpu"


@pytest.fixture(autouse=True, scope="module")
def device():
    try:
        if not cupy.cuda.runtime.getDeviceCount():
            pytest.skip("there is no CUDA device")
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"CUDA does not start: {error}")


def create(folder, dtype, lz4):
    coded = {"zarr_format": 3, "compressors": None}
    if lz4:
        coded = {"zarr_format": 2, "compressors": numcodecs.LZ4()}
    return zarr.create_array(
        str(folder), shape=SHAPE, chunks=(*CHUNK, SHAPE[2]), dtype=dtype, **coded
    )


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("lz4", [False, True])
@pytest.mark.parametrize("writer", [DeviceChunkWriter, KvikioChunkWriter])
def test_chunks_from_the_device(tmp_path, writer, lz4, dtype):
    if lz4:
        pytest.importorskip("nvidia.nvcomp")
    if writer is KvikioChunkWriter:
        pytest.importorskip("kvikio")
    folder, pixels = tmp_path / "a.zarr", slides.picture(*SHAPE, dtype)
    array = create(folder, dtype, lz4)
    with writer(folder, array, Lz4Encoder() if lz4 else None) as output:
        for top in range(0, SHAPE[0], CHUNK[0]):
            part = cupy.asarray(pixels[top : top + CHUNK[0]])
            output.write(part, top, 0)
            part[...] = 0
    np.testing.assert_array_equal(zarr.open_array(str(folder), mode="r")[...], pixels)


def test_lz4_of_the_device_is_plain_zarr(tmp_path):
    """Its chunks begin as numcodecs' do, and are about as small."""
    pytest.importorskip("nvidia.nvcomp")
    pixels = np.zeros(SHAPE, np.uint8)
    pixels[::3] = 9
    sizes = {}
    for name, writer, given, encode in (
        ("cpu", ChunkWriter, pixels, numcodecs.LZ4().encode),
        ("gpu", DeviceChunkWriter, cupy.asarray(pixels), Lz4Encoder()),
    ):
        with writer(tmp_path / name, create(tmp_path / name, "uint8", True), encode) as output:
            output.write(given, 0, 0)
        chunk = (tmp_path / name / "1.2.0").read_bytes()
        assert int.from_bytes(chunk[:4], "little") == CHUNK[0] * CHUNK[1] * 3
        sizes[name] = len(chunk)
    assert sizes["gpu"] < 4 * sizes["cpu"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["read", "--size", "2048"], [f"{OURS}, GPU", "tifffile, then copied"]),
        (["read", "--size", "2048"], ["pread, pinned copy: bytes alone"]),
        (["read", "--size", "2048", "--codec", "jpeg"], [f"{OURS}, GPU"]),
        (["round-trip", "--size", "2048"], [f"{OURS}, GPU"]),
        (["zarr-write", "--size", "1024", "--chunks", "256"], [f"{OURS}, CuPy"]),
        (["zarr-write-lz4", "--size", "1024", "--chunks", "256"], [f"{OURS}, CuPy"]),
        (["viewport", "--size", "2048", "--viewports", "512"], [f"{OURS}, GPU"]),
    ],
)
def test_a_benchmark(tmp_path, words, names):
    record = tmp_path / "record.json"
    assert main([*words, "--rounds", "2", "--json", str(record)]) == 0
    found = json.loads(record.read_text())
    rows = [row for row in found["rows"] if row["way"] in names]
    assert len(rows) >= len(names)
    if words[0] == "zarr-write-lz4":
        pytest.importorskip("nvidia.nvcomp")
    for row in rows:
        assert row["missing"] == ""
        assert row["largest_difference"] <= (3 if "jpeg" in words else 0)
    assert found["environment"]["gpus"]


@pytest.mark.parametrize("words", [["read"], ["round-trip"], ["zarr-write", "--chunks", "256"]])
def test_kvikio_without_gpudirect_storage(tmp_path, words):
    """Its compatibility mode works wherever kvikio does."""
    pytest.importorskip("kvikio")
    record = tmp_path / "record.json"
    given = [*words, "--size", "1024", "--rounds", "1", "--json", str(record)]
    assert main(given) == 0
    rows = {row["way"]: row for row in json.loads(record.read_text())["rows"]}
    assert rows[f"{OURS}, kvikio, GDS off"]["largest_difference"] == 0
    direct = rows[f"{OURS}, kvikio, GDS on"]
    assert direct["missing"].startswith("not here: ") or direct["largest_difference"] == 0
