"""Run the tests of a library from its checkout against our replacement in `compat`.

Usage: ``python tools/their_tests.py openslide CHECKOUT/tests [pytest's own arguments]``, or
``python tools/their_tests.py cucim CHECKOUT/python/cucim/tests/unit/clara``, or
``python tools/their_tests.py tiffslide CHECKOUT/tiffslide/tests test_tiffslide.py``

The library's name imports our module, and only the tests of the checkout are used. Parts that we do
not replace, such as openslide's `lowlevel`, have just the names that the tests use.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

# The code of each replaced module, by library.
CUCIM = "from napari_wsigpu.compat.cucim import *\n"
STAND_INS = {
    "cucim": dict.fromkeys(
        ("cucim/__init__.py", "cucim/clara/__init__.py", "cucim/clara/cache.py"), CUCIM
    ),
    "openslide": {
        # OpenSlide itself reads some formats for us, but must not be used here.
        "openslide/__init__.py": (
            "from napari_wsigpu.compat.openslide import *\n"
            "from napari_wsigpu.storage.library_source import LIBRARIES\n"
            "LIBRARIES['OpenSlide'] = LIBRARIES['OpenSlide']._replace(package='not_there')\n"
        ),
        "openslide/deepzoom.py": "from napari_wsigpu.compat.openslide.deepzoom import *\n",
        "openslide/lowlevel.py": (
            "class _Available:\n"
            "    available = True\n"
            "cache_create = read_icc_profile = read_associated_image_icc_profile = _Available()\n"
        ),
    },
    "tiffslide": {
        "tiffslide/__init__.py": (
            "from napari_wsigpu.compat.tiffslide import *\n"
            "from napari_wsigpu.compat.tiffslide import __getattr__\n"
        ),
    },
}


def main(arguments: list[str]) -> int:
    """Run the tests; return pytest's exit status."""
    name, tests, *rest = arguments
    with tempfile.TemporaryDirectory() as folder:
        for path, text in STAND_INS[name].items():
            target = Path(folder) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, "utf-8")
        code = f"import sys, pytest; sys.path.insert(0, {folder!r}); sys.exit(pytest.main())"
        options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", *rest]
        # By default pytest collects the whole folder; name it unless specific tests are given.
        targets = ["."] if all(word.startswith("-") for word in rest) else []
        command = [sys.executable, "-c", code, *options, *targets]
        # Processes that the tests start need our modules too.
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.run(command, cwd=tests, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
