# make demo   install, and open the sample slide in napari
# make test   install, and run the tests
# make check  format, lint and types, as CI does
# make quick  the same, and the fast tests of the core: a minute
# make native-check  run the native core under sanitizers: a minute
# make docs   build the pages of docs/ into site/
# make fuzz   damage slides at random and open them, for an hour (HOURS=1)
# make bench  time a viewport against other readers

# If this were set, every process would compile the package and its tests again.
export PYTHONDONTWRITEBYTECODE =

VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

QUICK := tests/test_house.py tests/test_docs.py tests/test_figures.py tests/model/test_errors.py \
	tests/model/test_geometry.py tests/storage/test_buffers.py tests/slide/test_runtime.py \
	tests/slide/test_tiles.py tests/slide/test_slide.py tests/cli/test_cli.py \
	tests/annotations/test_outlines.py \
	tests/codecs/test_cpu.py tests/codecs/test_choose.py tests/codecs/test_jpeg.py tests/display \
	tests/formats/test_describe.py tests/formats/test_tiff.py tests/formats/test_aperio.py \
	tests/reading tests/storage/test_file.py --ignore tests/reading/test_device.py \
	--ignore tests/reading/test_on_device.py

.PHONY: demo test check quick fuzz native-check docs bench clean

demo: $(VENV)/installed
	$(BIN)/python tools/demo.py

# Three processes keep two cores busy, because tests of viewers wait for screens and threads.
WORKERS ?= 3
test: $(VENV)/installed
	$(if $(DISPLAY)$(WAYLAND_DISPLAY)$(shell command -v Xvfb),,@echo "No display and no Xvfb: tests of the viewer are skipped.")
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

check: $(VENV)/installed
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

# Fast tests without a display or subprocesses, which a change to the core breaks first.
quick: check
	$(BIN)/python -m pytest -p no:napari --numprocesses 2 --dist worksteal $(QUICK)

HOURS ?= 1
fuzz: $(VENV)/installed
	$(BIN)/python -m tests.fuzz --hours $(HOURS) --seed $$(date +%s)

# ThreadSanitizer needs identical addresses in each process; no sanitizer supports the fork check.
native-check: $(VENV)/installed
	for kind in address,undefined thread none; do \
		$(BIN)/cmake -S cmake -B build/check-$$kind -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
			-DWSIGPU_CHECKS=ON -DWSIGPU_SANITIZE=$${kind#none} >/dev/null && \
		$(BIN)/cmake --build build/check-$$kind >/dev/null && \
		setarch -R build/check-$$kind/check_core || exit 1; \
	done

docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[bench]"
	$(BIN)/python -m benchmarks.viewport

$(VENV)/docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

# Debian's Python comes without ensurepip unless python3-venv is installed; virtualenv needs pip only.
NATIVE := cmake/CMakeLists.txt $(wildcard src/napari_wsigpu/native/*.cpp src/napari_wsigpu/native/*.h)
$(VENV)/installed: pyproject.toml constraints.txt $(NATIVE)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed."; exit 1; }
	$(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV) && \
		$(PYTHON) -m pip install --quiet --target .virtualenv virtualenv && \
		PYTHONPATH=.virtualenv $(PYTHON) -m virtualenv $(VENV); }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[all,test]"
	touch $@

clean:
	rm -rf $(VENV) .virtualenv build demo.png site
