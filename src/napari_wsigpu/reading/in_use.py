"""Which decoder is in use for a slide and why, said in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from napari_wsigpu.gpu.jpeg.codestream import recipe
from napari_wsigpu.reading.throughput import tile_kind

if TYPE_CHECKING:
    from napari_wsigpu.gpu.device.devices import Devices
    from napari_wsigpu.gpu.jpeg.codestream import Recipe
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.throughput import Throughput

CPU = "CPU"
# By what is decoded, and the path that nvImageCodec decodes it on.
ENGINES = {
    ("jpeg", "hardware"): "hardware JPEG engine",
    ("jpeg", "hybrid"): "JPEG without a hardware engine",
    ("jpeg", "GPU"): "JPEG without a hardware engine",
    ("jpeg2000", "GPU"): "JPEG 2000",
    ("jpeg2000", "JPEG 2000"): "JPEG 2000, in batches",
}


def decoder_in_use(
    image: LevelLayout,
    device: str,
    index: int | None,
    against: str | None,
    devices: Devices,
    throughput: Throughput,
) -> tuple[str, str]:
    """Say what decodes an image; nothing is started for that.

    Parameters
    ----------
    image : LevelLayout
        Of stored tiles.
    device : str
        What shall decode: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    index : int or None
        The number of that CUDA device.
    against : str or None
        Why the slide has to be decoded on the CPU, if something spoke against the GPU.
    devices : Devices
        What there is to decode on.
    throughput : Throughput
        How fast such tiles were decoded so far.

    Returns
    -------
    tuple of (str, str)
        The decoder, and why it is this one or how it decodes.
    """
    how = recipe(image)
    if image.library is not None:
        return image.library.name, str(how)
    if device == "cpu":
        return CPU, "chosen"
    if isinstance(how, str):
        return CPU, how
    if against is not None:
        return CPU, against
    if index is not None:
        return _gpu(devices, index, how)
    waiting = devices.background.waiting(how.kind)
    if waiting is not None:
        return CPU, waiting
    gpu, engine = _gpu(devices, 0, how)
    key = tile_kind(image)
    if not throughput.settled(key):
        return f"{gpu} and {CPU}", "which of them is faster is being measured"
    way = throughput.choose(key)
    if way == "both":
        return f"{gpu} and {CPU}", f"{engine}; together they are faster"
    return (gpu, engine) if way == "gpu" else (CPU, "measured faster than the GPU")


def _gpu(devices: Devices, index: int, how: Recipe) -> tuple[str, str]:
    worker = devices.started(index)
    if worker is None:
        return f"GPU {index}", "it is starting"
    name = f"GPU {index} ({worker.device.model})"
    nothing = CPU, f"{name} has no decoder for it"
    if not how.by_library and worker.jpeg2000.works is False:
        return nothing
    if not worker.has_tried(how.kind):
        return name, "its decoder starts with the first tiles"
    engine = worker.made_engine(how.kind)
    return nothing if engine is None else (name, ENGINES[how.kind, engine])
