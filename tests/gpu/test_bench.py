"""`wsigpu bench` on a CUDA device."""

import json

import pytest

from napari_wsigpu.cli import main
from napari_wsigpu.cli.doctor import find_driver
from tests.writers import slides

pytestmark = pytest.mark.gpu
pytest.importorskip("cupy")


@pytest.fixture(autouse=True, scope="module")
def device():
    driver = find_driver()
    if not driver.devices:
        pytest.skip(f"there is no CUDA device: {driver.reason}")


@pytest.mark.parametrize("gpu_decodes", [True, False])
def test_a_slide(tmp_path, gpu_decodes):
    path, record = tmp_path / "slide.tif", tmp_path / "record.json"
    compression = "jpeg" if gpu_decodes else "lzma"
    photometric = "ycbcr" if gpu_decodes else "rgb"
    options = {"compression": compression, "photometric": photometric}
    slides.write_pyramid(path, slides.picture(2100, 4200), (), **options)
    assert main(["bench", str(path), "--seconds", "0.5", "--json", str(record)]) == 0
    found = json.loads(record.read_text())
    memories = ["host", "host", "GPU"] if gpu_decodes else ["host", "GPU"]
    assert [row["memory"] for row in found["rows"]] == memories
    assert (found["no_gpu"] == "") == gpu_decodes
    for row in found["rows"]:
        assert row["viewports"] > 0
        assert row["patches_per_second"] > 0
        assert row["megapixels_per_second"] > 0
    assert found["machine"]["driver"]["devices"]
