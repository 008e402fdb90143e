# make serve            install what serving needs into .venv, then serve the default model on 127.0.0.1:8000
# make serve ARGS="…"   the same with options of `pipeline serve`, as ARGS="--config throughput --port 9000"
# make test             install, then check all: format, lint, types, imports, words, sizes, tests; goes on after a failure
# make test ARGS="…"    the same with options of `tools/check`, as ARGS="--isa avx2"
# make clean            remove .venv
#
# Installing is skipped while pyproject.toml and constraints.txt are as they were.

PYTHON ?= python3
ARGS ?=

VENV := .venv
RUN_STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
DISK_MB := 300
FULL_MB := 50
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check

# Says after pip's own error what to do.
WHY_NOT = \
	for one in "$$PWD" "$${TMPDIR:-/tmp}"; do \
		free=$$(df -Pm "$$one" | awk 'NR == 2 {print $$4}'); \
		test "$${free:-$(DISK_MB)}" -ge $(FULL_MB) || \
			echo "only $$free MB are free in $$one: free $(DISK_MB) MB of disk space" >&2; \
	done; \
	echo "not installed: pip says above why. The next make $(MAKECMDGOALS) goes on from here" >&2

.PHONY: serve test clean
.DELETE_ON_ERROR:

serve: $(RUN_STAMP)
	exec $(VENV)/bin/pipeline serve $(ARGS)

test: $(DEV_STAMP)
	tools/check $(ARGS)

clean:
	rm -rf $(VENV)

# Packages come over the network, so a core has time to compile the kernels meanwhile. pip need not compile transformers'
# thousands of modules, of which serving imports none; the others are compiled for all processes that are going to import
# them; as in pip, a module that can't be compiled is no error. compileall's own -j goes on after Ctrl-C. setuptools
# comes first, from constraints.txt: a build of its own would fetch whatever version is newest. When pip is done, the
# kernels still compile: time to fetch and prepare the model that a server without options serves.
$(RUN_STAMP): pyproject.toml constraints.txt | $(VENV)/bin/pip
	@for one in $(firstword $(CXX)) c++ g++ clang++; do command -v $$one >/dev/null && exit; done; \
		echo "no C++ compiler, which computing on a CPU needs; on Debian and Ubuntu: apt install g++" >&2; exit 1
	@echo "installing packages into $(VENV): 0.1 GB, less than a minute at 100 Mbit/s"
	@$(VENV)/bin/python -m pipeline.kernels.cpu.compile_ahead & compiling=$$!; \
	$(PIP) install --no-compile -c constraints.txt setuptools && \
	$(PIP) install --no-compile -c constraints.txt --no-build-isolation -e . || \
	{ code=$$?; kill $$compiling 2>/dev/null; wait; $(WHY_NOT); exit $$code; }; \
	$(if $(ARGS),,$(VENV)/bin/python -m pipeline.cli.cache.ahead & )\
	ls -d $(VENV)/lib/python*/site-packages/* 2>/dev/null | grep -vE '/(transformers|setuptools|pip|pkg_resources)$$' | \
		xargs -r -n 4 -P "$$(nproc)" $(VENV)/bin/python -m compileall -q; \
	wait
	@touch $@

$(DEV_STAMP): pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(PIP) install -c constraints.txt setuptools
	$(PIP) install -c constraints.txt --no-build-isolation -e ".[dev,ray,torch]"
# A torch for CUDA has brought the triton that it needs, which can't be pinned beside it; one for CPUs has not.
	$(VENV)/bin/python -c 'import triton' 2>/dev/null || $(PIP) install "triton==3.6.0"
	touch $@ $(RUN_STAMP)

# pip's script is the last file of a new environment: without it, making one was interrupted.
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one as in: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "Python can't make virtual environments here; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@free=$$(df -Pm . | awk 'NR == 2 {print $$4}'); test "$${free:-$(DISK_MB)}" -ge $(DISK_MB) || \
		{ echo "$(VENV) needs $(DISK_MB) MB, but only $$free MB are free in $$PWD: free disk space" >&2; exit 1; }
	@rm -rf $(VENV); $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
