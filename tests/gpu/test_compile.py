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


@pytest.mark.parametrize("capability", ["7.0", "9.0"])
@pytest.mark.parametrize("name", ["kernels.cu", "jpeg2000"])
def test_kernels_can_be_compiled(compiler, name, capability):
    code = decoder.code()
    if name == "kernels.cu":
        folder = resources.files("napari_wsigpu.gpu")
        code = declarations() + folder.joinpath(name).read_text("utf-8")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    compiler.nvrtcCreateProgram(ctypes.byref(program), code.encode(), b"code.cu", 0, None, None)
    options = [*OPTIONS, "--std=c++14", f"--gpu-architecture=sm_{capability.replace('.', '')}"]
    texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = compiler.nvrtcCompileProgram(program, len(options), texts)
    compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    compiler.nvrtcGetProgramLog(program, log)
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    assert not failed, log.value.decode()
