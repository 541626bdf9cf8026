"""Probes of CuPy, nvImageCodec and kvikio, each in its own process, as it may crash or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TypedDict, cast

import numpy as np

PROBE_SECONDS = 120  # a probe that takes longer counts as hung
HARDWARE, JPEG2000 = "hardware JPEG", "JPEG 2000"
BACKENDS = {HARDWARE: "HW_GPU_ONLY", JPEG2000: "GPU_ONLY"}
ADD_ONE = 'extern "C" __global__ void add_one(int* number) { *number += 1; }'


class Answer(TypedDict, total=False):
    """Result of a probe; `reason` says why it failed and is empty if it succeeded.

    `missing` holds the private attributes that napari lacks, and the effect of each.
    """

    version: str
    note: str
    works: list[str]
    missing: dict[str, str]
    reason: str


def run_probe(name: str, module: str = __name__) -> Answer:
    """Run a probe of this module, or of another one, in a separate process."""
    code = f"from {__name__} import answer; answer({module!r}, {name!r})"
    command = [sys.executable, "-P", "-c", code]
    environment = {**os.environ, "PYNVIMGCODEC_VERBOSITY": "0"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"reason": getattr(error, "strerror", "") or f"no answer in {PROBE_SECONDS} s"}
    # The answer is the last line of JSON: libraries may print before and after it.
    for line in reversed(done.stdout.splitlines()):
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return cast("Answer", {"reason": "", **found})
    output = done.stderr.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(output) if line.strip()), "it printed nothing")
    return {"reason": f"its process ended with status {done.returncode}: {last}"}


def answer(module: str, name: str) -> None:
    """Run a probe of a module; print its findings, or why it failed, as JSON."""
    try:
        found: Answer = getattr(import_module(module), name)()
    except Exception as error:
        found = {"reason": _cause(error)}
    print(json.dumps(found), flush=True)


def probe_cupy() -> Answer:
    """Compile and run a kernel."""
    cupy = import_module("cupy")
    note = f"CUDA runtime {cuda_version(cupy.cuda.runtime.runtimeGetVersion())}"
    found: Answer = {"version": cupy.__version__, "note": note}
    try:
        number = cupy.full(1, 41, np.int32)
        cupy.RawKernel(ADD_ONE, "add_one")((1,), (1,), (number,))
        number.get()
        nvrtc = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    except Exception as error:
        return {**found, "reason": f"its kernels don't run: {_cause(error)}"}
    return {**found, "note": f"{note}, NVRTC {nvrtc}", "works": ["kernels"]}


def probe_nvimagecodec() -> Answer:
    """Decode a small JPEG or JPEG 2000 code stream with each backend that slides need."""
    import imagecodecs

    nvimgcodec = import_module("nvidia.nvimgcodec")
    picture = np.indices((256, 256, 3)).sum(0).astype(np.uint8)
    jpeg = bytes(imagecodecs.jpeg8_encode(picture, level=90, subsampling="420"))
    jpeg2000 = bytes(imagecodecs.jpeg2k_encode(picture, codecformat="J2K"))
    works, reasons = [], []
    for ability, kind in BACKENDS.items():
        try:
            backend = nvimgcodec.Backend(getattr(nvimgcodec.BackendKind, kind))
            decoder = nvimgcodec.Decoder(device_id=0, backends=[backend])
            stream = nvimgcodec.CodeStream(jpeg2000 if ability == JPEG2000 else jpeg)
            if decoder.decode([stream])[0] is not None:
                works.append(ability)
        except Exception as error:
            reasons.append(_cause(error))
    tried = [f"{ability}: {'yes' if ability in works else 'no'}" for ability in BACKENDS]
    note = ", ".join([f"CUDA {cuda_version(nvimgcodec.__cuda_version__)}", *tried])
    reason = "" if works else ", ".join(reasons[:1])
    return {"version": nvimgcodec.__version__, "note": note, "works": works, "reason": reason}


def probe_kvikio() -> Answer:
    """Read a small file into device memory."""
    from napari_wsigpu.gpu.transfer.gds import GDS, gds_state

    cupy, kvikio = import_module("cupy"), import_module("kvikio")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "probe")
        path.write_bytes(bytes(4096))
        with kvikio.CuFile(str(path), "r") as file:
            file.read(cupy.empty(4096, np.uint8))
    state = gds_state()
    note = "GPUDirect Storage: on" if state.direct else f"GPUDirect Storage: off, {state.reason}"
    if os.environ.get(GDS) == "off":
        note += f"; slides are read without it because of {GDS}=off"
    return {"version": state.version, "note": note, "works": ["read", "GDS"][: 1 + state.direct]}


def cuda_version(number: int) -> str:
    """Format CUDA's version number, 1000 * major + 10 * minor."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:200] or type(error).__name__
