"""The kernels compile for the oldest and newest GPUs that CUDA 12 supports; needs no GPU."""

import ctypes
from importlib import resources
from pathlib import Path

import pytest

from napari_wsigpu.gpu.compressed import compressed_engine
from napari_wsigpu.gpu.device.compiled_kernels import OPTIONS
from napari_wsigpu.gpu.device.kernel_tables import declarations
from napari_wsigpu.gpu.jpeg import jpeg_kernels
from napari_wsigpu.gpu.jpeg2000 import form_decoder


@pytest.fixture(scope="module")
def compiler():
    package = pytest.importorskip("nvidia.cuda_nvrtc")
    folder = Path(next(iter(package.__path__))) / "lib"
    found = sorted(folder.glob("libnvrtc.so*"))
    if not found:
        pytest.skip("there is no compiler in its package")
    return ctypes.CDLL(str(found[0]))


@pytest.fixture(scope="module")
def capabilities(compiler):
    """The lowest and highest architecture of CUDA 12; what compiles for both compiles for all."""
    count = ctypes.c_int()
    compiler.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    found = (ctypes.c_int * count.value)()
    compiler.nvrtcGetSupportedArchs(found)
    return [number for number in (70, 100) if number in list(found)]


def programs():
    folder = resources.files("napari_wsigpu.gpu.device")
    code = declarations() + folder.joinpath("kernels.cu").read_text("utf-8")
    return {
        "kernels.cu": code,
        **dict(zip(("compressed.cu", "zstd.cu"), compressed_engine.programs(), strict=True)),
        "jpeg.cu": jpeg_kernels.program(),
        **dict(zip(form_decoder.PROGRAMS, form_decoder.programs(), strict=True)),
    }


@pytest.mark.parametrize("name", programs())
def test_kernels_can_be_compiled(compiler, capabilities, name):
    assert capabilities == [70, 100]
    code = programs()[name].encode()
    for capability in capabilities:
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        compiler.nvrtcCreateProgram(ctypes.byref(program), code, b"code.cu", 0, None, None)
        options = [*OPTIONS, "--std=c++14", f"--gpu-architecture=sm_{capability}"]
        texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = compiler.nvrtcCompileProgram(program, len(options), texts)
        compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetProgramLog(program, log)
        compiler.nvrtcDestroyProgram(ctypes.byref(program))
        assert not failed, log.value.decode()
