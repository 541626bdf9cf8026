# make demo   install, and open the sample slide in napari
# make test   install, and run the tests
# make check  format, lint and types, as CI does

VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.PHONY: demo test check clean

demo: $(VENV)/installed
	$(BIN)/python tools/demo.py

test: $(VENV)/installed
	$(if $(DISPLAY)$(WAYLAND_DISPLAY)$(shell command -v Xvfb),,@echo "No display and no Xvfb: tests of the viewer are skipped.")
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

check: $(VENV)/installed
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

# Debian's Python comes without ensurepip unless python3-venv is installed; virtualenv needs pip only.
$(VENV)/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed."; exit 1; }
	$(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV) && \
		$(PYTHON) -m pip install --quiet --target .virtualenv virtualenv && \
		PYTHONPATH=.virtualenv $(PYTHON) -m virtualenv $(VENV); }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[all,test]"
	touch $@

clean:
	rm -rf $(VENV) .virtualenv demo.png
