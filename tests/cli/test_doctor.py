"""The command `wsigpu doctor` on this machine without a GPU, and on simulated machines."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import imagecodecs
import pytest
import tifffile

from napari_wsigpu import native, open_slide
from napari_wsigpu.cli import doctor, main, probes
from napari_wsigpu.cli.doctor import HARDWARE, JPEG2000, Device, Driver, Finding, Report, Route
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.slide.slide import Slide
from tests.writers import leica, ndpi, slides, tiffbytes

GPU = Driver("580.1", "12.9", (Device("NVIDIA Test", 24 << 30, "8.9"),))
BY_GPU = "NVIDIA GPU"
WORKING_CUPY = Finding("CuPy", "14.2.0", works=("kernels",))
WORKING_CODEC = Finding("nvImageCodec", "0.9.0", works=(HARDWARE, JPEG2000))
REST = "  zstd1, LZMA, WebP, JPEG-LS, RLE, JPEG XL, JPEG XR, PNG, BMP, LERC: CPU (imagecodecs)"

CUPY = """
__version__ = "14.2.0"

class Array(list):
    def get(self):
        return self

class cuda:
    class runtime:
        runtimeGetVersion = staticmethod(lambda: 12090)
    class nvrtc:
        getVersion = staticmethod(lambda: (12, 9))

class RawKernel:
    def __init__(self, code, name):
        assert f"void {name}(int* number)" in code

    def __call__(self, grid, block, arguments):
        arguments[0][0] += 1

def full(shape, value, dtype):
    return Array([value] * shape)

def empty(size, dtype):
    return bytearray(size)
"""

NVIMGCODEC = """
import os, sys
assert os.environ["PYNVIMGCODEC_VERBOSITY"] == "0"
print("Failed to load nvjpeg library!", file=sys.stderr)
print("{noise}")
__version__, __cuda_version__ = "0.9.0", 12090

class BackendKind:
    HW_GPU_ONLY, GPU_ONLY = "hardware JPEG", "JPEG 2000"

class CodeStream:
    def __init__(self, data):
        assert type(data) is bytes
        self.head = data[:4]

def Backend(kind):
    return kind

class Decoder:
    def __init__(self, device_id, backends):
        [self.kind] = backends
        if self.kind in RAISES:
            raise RuntimeError("status 7")

    def decode(self, streams):
        [stream] = streams
        wanted = b"\\xff\\x4f\\xff\\x51" if self.kind == "JPEG 2000" else b"\\xff\\xd8\\xff\\xe0"
        return ["pixels" if self.kind in WORKS and stream.head == wanted else None]
"""

KVIKIO = """
__version__ = "26.10.0"

class CuFile:
    def __init__(self, path, flags):
        self.file = open(path, flags + "b")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def read(self, memory):
        return self.file.readinto(memory)
"""


class Cuda:
    """A fake libcuda with one device."""

    def __init__(self, count=1, status=0, version=12090):
        self.count, self.status, self.version = count, status, version

    def cuDriverGetVersion(self, number):  # noqa: N802
        number._obj.value = self.version

    def cuInit(self, flags):  # noqa: N802
        assert flags == 0
        return self.status

    def cuGetErrorString(self, status, text):  # noqa: N802
        text._obj.value = b"no CUDA-capable device is detected" if status == 100 else None

    def cuDeviceGetCount(self, number):  # noqa: N802
        number._obj.value = self.count

    def cuDeviceGet(self, device, index):  # noqa: N802
        device._obj.value = 70 + index

    def cuDeviceGetName(self, name, length, device):  # noqa: N802
        assert (length, device.value) == (256, 70)
        name.value = b"NVIDIA Test"

    def cuDeviceTotalMem_v2(self, memory, device):  # noqa: N802
        memory._obj.value = 24 << 30

    def cuDeviceGetAttribute(self, number, attribute, device):  # noqa: N802
        number._obj.value = {75: 8, 76: 9}[attribute]


def nvml_version(text, length):
    text.value = b"580.1"


NVML = SimpleNamespace(
    nvmlInit_v2=lambda: 0, nvmlSystemGetDriverVersion=nvml_version, nvmlShutdown=lambda: 0
)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Simulate a machine: the driver's libraries, installed wheels, and modules."""
    wheels = {}
    monkeypatch.setattr(
        doctor,
        "_wheel_version",
        lambda *names: next((wheels[n] for n in names if n in wheels), None),
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    folder = tmp_path / "modules"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))

    def make(cuda=None, nvml=NVML, has=None, **modules):
        def load_library(name):
            library = cuda if name in ("libcuda.so.1", "nvcuda.dll") else nvml
            if library is None:
                raise OSError(f"{name}: cannot open shared object file: No such file or directory")
            if isinstance(library, Exception):
                raise library
            return library

        monkeypatch.setattr(doctor, "load_library", load_library)
        wheels.update(has or {})
        # An empty folder hides what is really installed.
        for name in ("cupy", "nvidia", "kvikio", "qtpy"):
            (folder / name).mkdir(parents=True)
            absent = f"raise ModuleNotFoundError({f'No module named {name!r}'!r})"
            text = "" if "nvimgcodec" in modules and name == "nvidia" else absent
            (folder / name / "__init__.py").write_text(modules.get(name, text))
        if "nvimgcodec" in modules:
            (folder / "nvidia" / "nvimgcodec.py").write_text(modules["nvimgcodec"])
        for name in ("defaults", "cufile_driver"):
            (folder / "kvikio" / f"{name}.py").write_text(modules.get(name, ""))

    return make


@pytest.fixture
def say(capsys):
    """Run the command and return its lines."""

    def run(*words, status=0, rates=False):
        assert main(["doctor", *map(str, words)]) == status
        said = capsys.readouterr()
        assert bool(said.err) is bool(status)
        lines = said.out.splitlines()
        return lines if rates else [line for line in lines if ", pixels exact" not in line]

    return run


def nvimgcodec(*works, raises=()):
    return f"WORKS, RAISES = {works!r}, {raises!r}\n{NVIMGCODEC}"


# Without a GPU


def test_a_machine_without_a_driver(machine, say, monkeypatch):
    machine(has={"nvidia-nvimgcodec-cu12": "0.9.0.20"})
    monkeypatch.setattr(doctor, "run_probe", lambda *name: pytest.fail(f"{name} was run"))
    lines = say()
    assert lines[0].startswith("napari-wsigpu  0.")
    assert any(line.startswith("imagecodecs") and "OpenJPEG" in line for line in lines)
    assert "  No NVIDIA driver was found; tiles are decoded on the CPU." in lines
    extras = 'pip install "napari-wsigpu[cuda12]" or "napari-wsigpu[cuda13]"'
    assert f"CuPy           not found (for NVIDIA GPUs: {extras})" in lines
    assert "nvImageCodec   0.9.0.20" in lines
    assert "nvJPEG         not found (for NVIDIA GPUs: pip install nvidia-nvjpeg-cu12)" in lines
    assert (
        'kvikio         not found (for NVIDIA GPUs: pip install "napari-wsigpu[gds]"; '
        "GPUDirect Storage: off, no NVIDIA driver was found)"
    ) in lines
    assert "OpenGL         not tested (slides are drawn from host memory)" in lines
    assert lines[-5:] == [
        "Decoders",
        "  JPEG (RGB, YCbCr, gray; 8 bit): CPU (no NVIDIA driver was found)",
        "  JPEG 2000, HTJ2K (8, 16 bit): CPU (no NVIDIA driver was found)",
        "  LZW, deflate, PackBits, zstd: CPU (no NVIDIA driver was found)",
        REST,
    ]


def test_it_prints_nothing_else_and_imports_no_cuda_library(tmp_path):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(100, 150))
    script = (
        "import sys; from napari_wsigpu.cli import main; status = main(['doctor', *sys.argv[1:]]);"
        "assert not {'cupy', 'kvikio', 'nvidia', 'napari'} & set(sys.modules); sys.exit(status)"
    )
    command = [sys.executable, "-W", "error", "-c", script, path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
    assert (done.returncode, done.stderr) == (0, "")
    assert str(path) in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("libcuda.so.1: no such file"), "no NVIDIA driver was found"),
        (FileNotFoundError("Could not find module 'nvcuda.dll'"), "no NVIDIA driver was found"),
        (OSError("file too short"), "the NVIDIA driver can't be loaded (file too short)"),
        (AttributeError("cuInit"), "the NVIDIA driver can't be loaded (cuInit)"),
    ],
)
def test_a_driver_that_does_not_load(machine, error, reason):
    machine(error)
    assert doctor.find_driver() == Driver(reason=reason)


def test_missing_and_invalid_libraries(tmp_path):
    path = tmp_path / "libcuda.so.1"
    with pytest.raises(OSError, match=r"libcuda\.so\.1"):
        doctor.load_library(str(path))
    path.write_bytes(b"")
    with pytest.raises(OSError, match=r"libcuda\.so\.1"):
        doctor.load_library(str(path))


@pytest.mark.parametrize(
    ("cuda", "driver"),
    [
        (Cuda(), GPU),
        (Cuda(0), Driver("580.1", "12.9", (), "the NVIDIA driver reports no device")),
        (
            Cuda(status=100),
            Driver(
                "580.1",
                "12.9",
                (),
                "CUDA can't be initialized (no CUDA-capable device is detected; "
                "CUDA_VISIBLE_DEVICES is '')",
            ),
        ),
        (
            Cuda(status=802),
            Driver(
                "580.1",
                "12.9",
                (),
                "CUDA can't be initialized (error 802; CUDA_VISIBLE_DEVICES is '')",
            ),
        ),
        (
            Cuda(version=11080),
            Driver(
                "580.1",
                "11.8",
                GPU.devices,
                "the NVIDIA driver supports only CUDA 11.8 and must be updated for CUDA 12",
            ),
        ),
    ],
)
def test_drivers(machine, monkeypatch, cuda, driver):
    machine(cuda)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor.find_driver() == driver


@pytest.mark.parametrize(
    "nvml", [None, OSError("broken"), SimpleNamespace(), SimpleNamespace(nvmlInit_v2=lambda: 9)]
)
def test_a_driver_without_nvml(machine, nvml):
    machine(Cuda(), nvml)
    assert doctor.find_driver() == replace(GPU, version=None)


def test_a_driver_of_unknown_version(machine, say):
    machine(Cuda(), None)
    assert "NVIDIA driver  unknown version (CUDA 12.9)" in say()


@pytest.mark.parametrize(
    ("available", "reason", "lines"),
    [
        (True, "libjpeg-turbo 3.1.0", ["native core:   libjpeg-turbo 3.1.0"]),
        (
            False,
            "WSIGPU_NATIVE is off",
            [
                "native core:   not found",
                "  WSIGPU_NATIVE is off; imagecodecs decodes tiles in Python threads, which is "
                "slower.",
            ],
        ),
    ],
)
def test_native_core(machine, say, monkeypatch, available, reason, lines):
    machine()
    monkeypatch.setattr(native, "available", available)
    monkeypatch.setattr(native, "reason", reason)
    assert say()[5 : 5 + len(lines)] == lines


# With a simulated GPU


def test_a_machine_that_has_everything(machine, say, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    machine(
        Cuda(),
        has={"nvidia-nvjpeg-cu12": "12.4", "nvidia-nvjpeg2k-cu12": "0.11"}
        | {"nvidia-nvtiff-cu12": "0.8", "nvidia-nvcomp-cu12": "5.3"},
        cupy=CUPY,
        nvimgcodec=nvimgcodec(HARDWARE, JPEG2000),
        kvikio=KVIKIO,
        defaults="def is_compat_mode_preferred(): return False",
        cufile_driver="def get(name): return {'is_gds_available': True}[name]",
    )
    monkeypatch.setattr(native, "available", True)
    assert say()[7:] == [
        "NVIDIA driver  580.1 (CUDA 12.9)",
        "GPU 0          NVIDIA Test (24 GiB, compute capability 8.9)",
        "CuPy           14.2.0 (CUDA runtime 12.9, NVRTC 12.9)",
        "nvImageCodec   0.9.0 (CUDA 12.9, hardware JPEG: yes, JPEG 2000: yes)",
        "nvJPEG         12.4",
        "nvJPEG2000     0.11",
        "nvTIFF         0.8",
        "nvCOMP         5.3",
        "kvikio         26.10.0 (GPUDirect Storage: on)",
        "CUDA_DEVICE_MAX_CONNECTIONS 32",
        "OpenGL         not found",
        "  slides are drawn from host memory: No module named 'qtpy'; drawing is slower.",
        "",
        "Decoders",
        "  JPEG (RGB, YCbCr, gray; 8 bit): NVIDIA GPU and its JPEG engine",
        f"  JPEG 2000, HTJ2K (8, 16 bit): {BY_GPU}",
        f"  LZW, deflate, PackBits, zstd: {BY_GPU}",
        REST,
    ]


def test_a_card_without_a_jpeg_engine_and_a_missing_wheel(machine, say, monkeypatch):
    monkeypatch.setenv("KVIKIO_COMPAT_MODE", "ON")
    machine(
        Cuda(),
        cupy=CUPY,
        nvimgcodec=nvimgcodec(),
        kvikio=KVIKIO,
        defaults="def compat_mode(): return True",
    )
    lines = say()
    tried = "hardware JPEG: no, JPEG 2000: no"
    assert f"nvImageCodec   0.9.0 (CUDA 12.9, {tried})" in lines
    assert "  nvJPEG is not installed; pip install nvidia-nvjpeg-cu12." in lines
    assert "  nvJPEG2000 is not installed; pip install nvidia-nvjpeg2k-cu12." in lines
    off = (
        "GPUDirect Storage: off, kvikio is in compatibility mode, because KVIKIO_COMPAT_MODE is set"
    )
    assert f"kvikio         26.10.0 ({off})" in lines
    assert "  JPEG (RGB, YCbCr, gray; 8 bit): NVIDIA GPU" in lines
    by_gpu = "NVIDIA GPU"
    assert f"  JPEG 2000, HTJ2K (8, 16 bit): {by_gpu} ({doctor.WITHOUT_NVJPEG2000})" in lines


def test_a_machine_with_nothing_but_a_gpu(machine, say):
    machine(Cuda(version=13000))
    lines = say()
    assert '  CuPy is not installed; pip install "napari-wsigpu[cuda13]".' in lines
    assert '  nvImageCodec is not installed; pip install "napari-wsigpu[cuda13]".' in lines
    assert "  nvJPEG is not installed; pip install nvidia-nvjpeg." in lines
    assert "  nvCOMP is not installed; pip install nvidia-nvcomp-cu13." in lines
    at = lines.index("  kvikio is not installed; pip install kvikio-cu13.")
    off = "GPUDirect Storage: off, kvikio is not installed"
    assert lines[at - 1] == f"kvikio         not found ({off})"
    assert "  JPEG (RGB, YCbCr, gray; 8 bit): CPU (CuPy is not installed)" in lines


BROKEN = {
    "raises": ("raise ImportError('libfoo.so\\n  is  broken')", "libfoo.so is broken"),
    "causes": (
        "try:\n    raise OSError('libcudart is too old')\n"
        "except OSError as error:\n    raise ImportError('=' * 80) from error",
        "libcudart is too old",
    ),
    "wordless": ("raise RuntimeError", "RuntimeError"),
    "exits": ("import os; os._exit(3)", "its process ended with status 3: it printed nothing"),
    "last words": (
        "import os; os.write(1, b'[1]\\n[]\\n{'); os.write(2, b'\\xff\\nwhy\\n\\n'); os._exit(4)",
        "its process ended with status 4: why",
    ),
    "hangs": ("import time; time.sleep(60)", "no answer in 1 s"),
}


@pytest.mark.parametrize(("code", "reason"), BROKEN.values(), ids=BROKEN)
def test_broken_libraries(machine, monkeypatch, code, reason):
    if "sleep" in code:
        monkeypatch.setattr(probes, "PROBE_SECONDS", 1)
    machine(Cuda(), has={"cupy-cuda12x": "14.2.0"}, cupy=code)
    assert doctor.find_cupy(GPU) == Finding(
        "CuPy",
        "14.2.0",
        reason=f"CuPy can't be used ({reason})",
        advice='pip install "napari-wsigpu[cuda12]"',
    )


def test_a_process_that_does_not_start(machine, monkeypatch):
    machine(Cuda())
    monkeypatch.setattr(sys, "executable", "/no/python")
    assert probes.run_probe("probe_cupy") == {"reason": os.strerror(2)}


def test_a_library_that_breaks_on_exit_still_counts(machine):
    code = f"import atexit, os\natexit.register(os.abort)\n{CUPY}"
    machine(Cuda(), cupy=code)
    assert doctor.find_cupy(GPU).works == ("kernels",)


def test_cupy_without_nvrtc(machine):
    machine(Cuda(), cupy=CUPY.replace("assert", "raise OSError('no libnvrtc') or"))
    found = doctor.find_cupy(GPU)
    assert found.reason == "CuPy can't be used (its kernels don't run: no libnvrtc)"
    assert found.advice == 'pip install "cupy-cuda12x[ctk]"'
    assert found.note == "CUDA runtime 12.9"


def test_nvimagecodec_that_decodes_nothing(machine):
    machine(Cuda(), nvimgcodec=nvimgcodec(raises=(HARDWARE, JPEG2000)))
    found = doctor.find_nvimagecodec(GPU)
    assert found.reason == "nvImageCodec can't be used (status 7)"
    jpeg, jpeg2000, *_ = doctor.find_routes(GPU, WORKING_CUPY, found)
    assert (jpeg.decoder, jpeg.reason) == ("CPU", found.reason)
    assert (jpeg2000.decoder, jpeg2000.reason) == ("CPU", found.reason)


def test_nvimagecodec_without_its_libraries(machine):
    machine(Cuda(), nvimgcodec=nvimgcodec())
    found = doctor.find_nvimagecodec(GPU)
    assert (found.works, found.reason) == ((), "")
    jpeg, jpeg2000, *_ = doctor.find_routes(GPU, WORKING_CUPY, found)
    assert (jpeg.decoder, jpeg.reason) == ("NVIDIA GPU", "")
    assert jpeg2000.decoder.startswith("NVIDIA GPU")
    assert "nvJPEG2000 is missing" in jpeg2000.reason


@pytest.mark.parametrize(("compatible", "gds"), [(True, True), (False, False)])
def test_kvikio_in_compatibility_mode(machine, compatible, gds):
    machine(
        Cuda(),
        cupy=CUPY,
        kvikio=KVIKIO,
        defaults=f"def is_compat_mode_preferred(): return {compatible}",
        cufile_driver=f"def get(name): return {gds}",
    )
    found = doctor.find_kvikio(GPU)
    assert (found.works, found.reason) == (("read",), "")
    assert found.note.startswith("GPUDirect Storage: off, ")
    assert ("compatibility mode" in found.note) == compatible


def test_kvikio_disabled_by_the_user(machine, monkeypatch):
    machine(
        Cuda(),
        cupy=CUPY,
        kvikio=KVIKIO,
        defaults="def is_compat_mode_preferred(): return True",
    )
    monkeypatch.setenv("WSIGPU_GDS", "off")
    found = doctor.find_kvikio(GPU)
    assert found.works
    assert found.note.endswith("; slides are read without it because of WSIGPU_GDS=off")


def test_kvikio_that_fails_to_read(machine):
    machine(Cuda(), cupy=CUPY, kvikio=KVIKIO.replace("return self.file.", "raise OSError("))
    found = doctor.find_kvikio(GPU)
    assert "kvikio can't be used (" in found.reason
    assert found.note == f"GPUDirect Storage: off, {found.reason}"


def test_a_display_that_the_gpu_draws(machine, monkeypatch):
    machine(Cuda())
    monkeypatch.setattr(doctor, "run_probe", lambda *of: {"reason": "", "version": "NVIDIA Test"})
    note = "draws from GPU memory, without a copy to the host"
    assert doctor.find_display(GPU) == Finding("OpenGL", "NVIDIA Test", note)


@pytest.mark.parametrize(
    ("cuda", "installed", "wanted"),
    [
        (None, (), "12"),
        (None, ("13",), "13"),
        (12090, ("13",), "12"),
        (13000, (), "13"),
        (13000, ("12",), "12"),
        (13000, ("12", "13"), "12"),
    ],
)
def test_wheels_match_the_cuda_version(machine, cuda, installed, wanted):
    machine(cuda and Cuda(version=cuda), has={f"nvidia-nvimgcodec-cu{n}": "1" for n in installed})
    assert doctor._generation(doctor.find_driver()) == wanted


def test_queues(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert doctor.find_connections().version == "not set"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    found = doctor.find_connections()
    assert (found.version, found.reason != "") == ("8", True)


def test_a_codec_that_does_not_load(monkeypatch):
    def broken():
        raise ImportError("no libjpeg")

    monkeypatch.setattr(imagecodecs, "jpeg8_version", broken)
    assert "broken: no libjpeg" in doctor.find_software()[3].note


# Slides


def test_json(machine, capsys, tmp_path):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(100, 150))
    machine(Cuda(), cupy=CUPY, nvimgcodec=nvimgcodec(HARDWARE))
    assert main(["doctor", "--json", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["driver"]["devices"] == [
        {"name": "NVIDIA Test", "memory": 24 << 30, "compute_capability": "8.9"}
    ]
    assert {"name", "version", "note", "works", "reason", "advice"} == set(found["cuda"][0])
    assert [item["name"] for item in found["software"]][:2] == ["napari-wsigpu", "Python"]
    assert found["slides"] == [
        {
            "path": str(path),
            "routes": [
                {
                    "encoding": "JPEG, RGB, 3 x uint8",
                    "decoder": "NVIDIA GPU and its JPEG engine",
                    "reason": "",
                    "levels": [0, 1, 2],
                    "gigapixels_a_second": None,  # no such GPU is here
                    "pixels": "exact",
                }
            ],
        }
    ]


def test_a_slide_that_can_not_be_opened(machine, capsys, tmp_path):
    machine()
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(100, 150))
    assert main(["doctor", str(tmp_path / "none.svs"), str(path), "--json"]) == 1
    said = capsys.readouterr()
    assert said.err == f"There is no file '{tmp_path / 'none.svs'}'; check the path.\n"
    assert [slide["path"] for slide in json.loads(said.out)["slides"]] == [str(path)]


WRITTEN = {
    "JPEG, YCbCr, 3 x uint8": {"compression": "jpeg", "photometric": "rgb"},
    "JPEG 2000 (RGB), 3 x uint16": {"compression": 33005, "dtype": "uint16"},
    "JPEG 2000, 3 x uint8": {"compression": 34712},
    "deflate, 3 x uint8": {"compression": "zlib"},
    "none, 3 x float32": {"compression": None, "dtype": "float32"},
}


@pytest.mark.parametrize(("encoding", "options"), WRITTEN.items(), ids=WRITTEN)
def test_slides(monkeypatch, say, tmp_path, encoding, options):
    routes = doctor.find_routes(GPU, WORKING_CUPY, WORKING_CODEC)
    monkeypatch.setattr(doctor, "diagnose", lambda: Report((), GPU, (), routes))
    path = tmp_path / "slide.tif"
    options = {"dtype": "uint8", "photometric": "rgb", **options}
    slides.write_pyramid(path, slides.picture(100, 150, dtype=options.pop("dtype")), **options)
    decoders = {
        "JPEG,": "NVIDIA GPU and its JPEG engine",
        "JPEG ": BY_GPU,
        "defla": BY_GPU,
    }
    decoder = decoders.get(encoding[:5], "CPU (read as stored)")
    assert say(path)[-2:] == [str(path), f"  levels 0, 1, 2: {encoding}: {decoder}"]


def test_rates_are_measured_and_exactness_is_stated(monkeypatch, say, tmp_path):
    path = tmp_path / "slide.tif"
    slides.write_pyramid(path, slides.picture(100, 150), compression=34712, photometric="rgb")
    (line,) = [line for line in say(path, rates=True) if "pixels exact" in line]
    rate, rest = line.split(maxsplit=1)
    assert float(rate) > 0
    assert rest == "gigapixels per second, pixels exact"
    routes = doctor.find_routes(GPU, WORKING_CUPY, WORKING_CODEC)
    monkeypatch.setattr(doctor, "diagnose", lambda: Report((), GPU, (), routes))
    line = say(path, rates=True)[-1]
    assert line.startswith("    not measured ('cuda:0' can't be used because this machine has no")
    assert line.endswith("), pixels exact if lossless, else within 1")


def test_rates_of_damaged_slides_say_what_is_damaged(say, tmp_path):
    path = tmp_path / "slide.tif"
    pixels = slides.picture(100, 150)
    tiffbytes.write(path, [tiffbytes.page(pixels, lambda _: b"no deflate", compression=8)])
    line = say(path, rates=True)[-1]
    assert line.startswith("    not measured (The tile at level 0, row 0, column 0 of")
    assert line.endswith("), pixels exact")


def test_rates_count_no_tile_twice(monkeypatch, tmp_path):
    path = tmp_path / "slide.tif"
    slides.write_pyramid(path, slides.picture(100, 150), (), compression="zlib", photometric="rgb")
    read, sizes = Slide.read_regions, set()

    def counted(self, places, size, **options):
        assert len({*places}) == len(places)
        sizes.add(len(places))
        return read(self, places, size, **options)

    monkeypatch.setattr(Slide, "read_regions", counted)
    assert doctor.measure(str(path), Route("deflate", "CPU", ""), 0) > 0
    with open_slide(path) as slide:
        assert sizes == {slide.layout.levels[0].grid.byte_counts.size}


def test_computed_levels_are_not_decoded(say, tmp_path):
    path = tmp_path / "slide.ndpi"
    pages = [ndpi.level(slides.picture(side, side), blocks) for side, blocks in ((256, 2), (64, 0))]
    ndpi.write(path, pages)
    assert say(path)[-2:] == [
        "  levels 0, 2: JPEG, YCbCr, 3 x uint8: CPU (no NVIDIA driver was found)",
        "  level 1: JPEG, YCbCr, 3 x uint8: CPU (the JPEG is decoded at a fraction of its size)",
    ]


def test_parts_of_a_canvas_may_differ(monkeypatch, tmp_path):
    scans = [leica.scan(slides.picture(60, 90), place, place, ()) for place in (10_000, 60_000)]
    leica.write(tmp_path / "slide.scn", scans, (200_000, 200_000))
    layout = describe(tmp_path / "slide.scn")
    (level,) = layout.levels
    first, second = level.parts
    lzw = replace(second.image, encoding=replace(second.image.encoding, compression=5))
    level = replace(level, parts=(first, replace(second, image=lzw)))
    slide = Slide(replace(layout, levels=(level,)))
    monkeypatch.setattr(doctor, "open_slide", lambda path, device: slide)
    routes = doctor.find_routes(GPU, WORKING_CUPY, WORKING_CODEC)
    routes = doctor.find_slide_routes("slide.scn", Report((), GPU, (), routes))
    assert {route.encoding: levels for route, levels in routes.items()} == {
        "deflate, 3 x uint8": [0],
        "LZW, 3 x uint8": [0],
    }


def test_levels_that_differ(monkeypatch, say, tmp_path):
    routes = doctor.find_routes(GPU, WORKING_CUPY, WORKING_CODEC)
    monkeypatch.setattr(doctor, "diagnose", lambda: Report((), GPU, (), routes))
    path = tmp_path / "slide.tif"
    pixels = slides.picture(200, 300)
    with tifffile.TiffWriter(path) as file:
        for step, compression in ((1, "jpeg"), (2, "zlib"), (4, "jpeg")):
            file.write(
                pixels[::step, ::step],
                tile=(64, 64),
                compression=compression,
                photometric="rgb",
                subfiletype=int(step > 1),
                metadata=None,
            )
    assert say(path)[-2:] == [
        "  levels 0, 2: JPEG, YCbCr, 3 x uint8: NVIDIA GPU and its JPEG engine",
        f"  level 1: deflate, 3 x uint8: {BY_GPU}",
    ]


@pytest.mark.parametrize(
    ("changes", "planes", "reason"),
    [
        ({}, 1, ""),
        (
            {"jpeg_color": "cmyk", "samples": 3},
            1,
            "JPEG with these colors (cmyk) is decoded on the CPU only",
        ),
        ({"jpeg_color": "auto"}, 1, "JPEG with these colors (auto) is decoded on the CPU only"),
        ({"jpeg_header": b"header"}, 3, ""),
        ({"jpeg_scale": 2}, 1, "the JPEG is decoded at a fraction of its size"),
        ({"dtype": "uint16"}, 1, "JPEG of uint16 is decoded on the CPU only"),
        ({}, 3, "its planes are stored separately"),
        ({"compression": 33003, "jpeg_color": "auto"}, 1, ""),
        ({"compression": 33004, "dtype": "uint16"}, 1, ""),
        (
            {"compression": 34712, "dtype": "int32"},
            1,
            "JPEG 2000 of int32 is decoded on the CPU only",
        ),
        ({"compression": 34712}, 3, ""),
        ({"compression": 5}, 3, "its planes are stored separately"),
        ({"compression": 34925}, 3, "imagecodecs"),
    ],
)
def test_encodings(tmp_path, changes, planes, reason):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(100, 150))
    with open_slide(path, device="cpu") as slide:
        level = slide.layout.levels[0]
    grid = level.grid
    apart = replace(
        grid,
        offsets=grid.offsets.repeat(planes, 0),
        byte_counts=grid.byte_counts.repeat(planes, 0),
    )
    changed = replace(level, encoding=replace(level.encoding, **changes), grid=apart)
    routes = doctor.find_routes(GPU, WORKING_CUPY, WORKING_CODEC)
    route = doctor._level_route(changed, Report((), GPU, (), routes))
    assert route.reason == reason
    assert route.decoder.startswith("CPU" if reason else "NVIDIA")


def test_without_a_driver_each_slide_has_the_reason(machine, say, tmp_path):
    machine()
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(100, 150))
    expected = "  levels 0, 1, 2: JPEG, RGB, 3 x uint8: CPU (no NVIDIA driver was found)"
    assert say(path)[-1] == expected
