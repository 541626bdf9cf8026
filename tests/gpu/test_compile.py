"""Kernels are compiled for every GPU that CUDA 12 knows, by NVIDIA's compiler, without a GPU."""

import ctypes
from importlib import resources
from pathlib import Path

import pytest

from napari_wsigpu.gpu.compiled import OPTIONS
from napari_wsigpu.gpu.jpeg2000 import decoder
from napari_wsigpu.gpu.tables import declarations


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
    """The first of each generation from 7 to 10 that this compiler knows: all run what it runs."""
    count = ctypes.c_int()
    compiler.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    found = (ctypes.c_int * count.value)()
    compiler.nvrtcGetSupportedArchs(found)
    return {number // 10: number for number in reversed(found) if 70 <= number <= 100}


def programs():
    folder = resources.files("napari_wsigpu.gpu")
    code = declarations() + folder.joinpath("kernels.cu").read_text("utf-8")
    return {"kernels.cu": code} | dict(zip(decoder.PROGRAMS, decoder.programs(), strict=True))


@pytest.mark.parametrize("name", programs())
def test_kernels_can_be_compiled(compiler, capabilities, name):
    assert capabilities == {7: 70, 8: 80, 9: 90, 10: 100}
    code = programs()[name].encode()
    for capability in capabilities.values():
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
