"""Zarr arrays whose codecs only zarr reads: the same pixels, and nothing that harms."""

import json
import shutil

import numpy as np
import pytest
import zarr
from zarr import codecs

from napari_wsigpu import open_slide
from napari_wsigpu.model.errors import TileError, UnsupportedSlideError
from tests.writers import slides, zarrs

CODECS = {
    "as it is": [],
    "zstd": [codecs.ZstdCodec(level=1)],
    "zstd with checksums": [codecs.ZstdCodec(checksum=True), codecs.Crc32cCodec()],
    "gzip": [codecs.GzipCodec()],
    "blosc": [codecs.BloscCodec(cname="lz4", shuffle="bitshuffle")],
}
INDICES = {
    "usual": [codecs.BytesCodec(), codecs.Crc32cCodec()],
    "without a checksum": [codecs.BytesCodec()],
    "big-endian": [codecs.BytesCodec(endian="big"), codecs.Crc32cCodec()],
}


def write_coded(folder, pixels, chain):
    array = zarr.create(
        **{"store": folder / "0", "shape": pixels.shape, "dtype": pixels.dtype, "zarr_format": 3},
        chunks=(1, 64, 64),
        codecs=chain,
    )
    array[...] = pixels
    zarrs.write_group(folder, {"multiscales": [zarrs.multiscale("cyx", [[1.0, 1.0, 1.0]])]})


class TestCodecsOfShards:
    """What our reader leaves to zarr is read by it, and checked as all else."""

    @pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
    @pytest.mark.parametrize("location", ["start", "end"])
    @pytest.mark.parametrize("compressors", CODECS.values(), ids=CODECS)
    @pytest.mark.parametrize("order", [None, (2, 1, 0), (0, 2, 1)])
    @pytest.mark.parametrize("endian", ["little", "big"])
    def test_any_chain(self, tmp_path, order, endian, compressors, location, index):
        pixels = slides.picture(130, 150, 3, "uint16").transpose(2, 0, 1)
        turned = [] if order is None else [codecs.TransposeCodec(order=order)]
        inner = [*turned, codecs.BytesCodec(endian=endian), *compressors]
        shards = codecs.ShardingCodec(
            **{"chunk_shape": (1, 32, 32), "codecs": inner},
            **{"index_codecs": index, "index_location": location},
        )
        write_coded(tmp_path / "a.zarr", pixels, [shards])
        expected = zarrs.read_array(tmp_path / "a.zarr/0").transpose(1, 2, 0)
        with open_slide(tmp_path / "a.zarr", "cpu") as slide:
            np.testing.assert_array_equal(slide.levels[0][...], expected)
            part = slide.read_region((60, 60), (9, 9))
            np.testing.assert_array_equal(part, expected[60:69, 60:69])

    def test_uncheckable_codecs_are_refused_on_opening(self, tmp_path):
        pixels = np.ones((1, 64, 64), "uint16")
        index = [codecs.BytesCodec(), codecs.ZstdCodec(), codecs.Crc32cCodec()]
        inner = {"chunk_shape": (1, 32, 32), "codecs": [codecs.BytesCodec(), codecs.ZstdCodec()]}
        write_coded(tmp_path / "a.zarr", pixels, [codecs.ShardingCodec(**inner)])
        path = tmp_path / "a.zarr/0/zarr.json"
        said = json.loads(path.read_text())
        document = said["codecs"][0]["configuration"]
        document["index_codecs"] = [each.to_dict() for each in index]
        path.write_text(json.dumps(said))
        with pytest.raises(UnsupportedSlideError, match="encoding of the shard index"):
            open_slide(tmp_path / "a.zarr")

    def test_shards_within_shards_are_refused_for_what_they_are(self, tmp_path):
        within = codecs.ShardingCodec(chunk_shape=(1, 16, 16))
        shards = codecs.ShardingCodec(chunk_shape=(1, 32, 32), codecs=[within])
        write_coded(tmp_path / "a.zarr", np.ones((1, 64, 64), "uint16"), [shards])
        with pytest.raises(UnsupportedSlideError, match="has nested shards"):
            open_slide(tmp_path / "a.zarr")

    @pytest.mark.parametrize("location", ["start", "end"])
    def test_a_chunk_that_grows_too_large_is_refused(self, tmp_path, location):
        def write(name, side):
            inner = [codecs.TransposeCodec(order=(0, 2, 1)), codecs.BytesCodec()]
            shards = codecs.ShardingCodec(
                **{"chunk_shape": (1, side // 2, side // 2), "index_location": location},
                codecs=[*inner, codecs.ZstdCodec()],
            )
            folder = tmp_path / name
            array = zarr.create(
                **{"store": folder / "0", "shape": (1, side, side), "dtype": "uint16"},
                **{"chunks": (1, side, side), "codecs": [shards], "zarr_format": 3},
            )
            array[...] = 7
            zarrs.write_group(folder, {"multiscales": [zarrs.multiscale("cyx", [[1.0] * 3])]})
            return folder

        small, large = write("small.zarr", 64), write("large.zarr", 4096)
        shutil.copy(large / "0/c/0/0/0", small / "0/c/0/0/0")
        with (
            open_slide(small, "cpu") as slide,
            pytest.raises(TileError, match=r"chunks? .*can't be read"),
        ):
            slide.read_region((3, 3), (8, 8))
