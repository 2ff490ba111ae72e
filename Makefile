# make demo: quantize a real model and show what came of it.   make test: run the tests.
# Both make .venv with all they need; nothing but Python 3.11 or later and pip has to be there.

PYTHON ?= python3
BIN := .venv/bin
EXTRAS := hf,datasets,onnx,openvino,onnxruntime,report,notebook,test,lint,docs
INSTALLED := .venv/.installed

# pip installs without bytecode, which takes a minute; the first import of a module writes its own, unless the
# environment forbids it: then every process would compile torch and transformers afresh.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: delivered demo test tasks zoo compat pictures gallery nightly clients structure goldens property torture torture-files torture-faults lint docs bench field figures gpu mutation clean

demo: $(INSTALLED)
	$(BIN)/quantizer run configs/minilm-sentiment-int8.yaml --output runs/demo --force

# One thread a process: torch, OpenVINO and pytest-xdist would otherwise fight over the cores.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --max-worker-restart=0 --dist loadfile --no-loadscope-reorder -m "not nightly and not gpu"

# Damaged files of every kind that is read on one core, kills and full disks on the other, half an hour in all. Run again
# it goes on; make torture SEED=... does the same damage again.
TORTURE := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=tests $(BIN)/python -m torture $(if $(SEED),--seed $(SEED)) --seconds 1680

torture: $(INSTALLED)
	@$(MAKE) --no-print-directory -j2 torture-files torture-faults

torture-files: $(INSTALLED)
	$(TORTURE) --kind files --folder runs/torture/files

torture-faults: $(INSTALLED)
	$(TORTURE) --kind faults --folder runs/torture/faults

# What make test leaves out: see docs/design/testing.md.
nightly: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --max-worker-restart=0 --dist loadfile --no-loadscope-reorder -m "nightly and not gpu"

# The clients that load what deliver writes, in environments of their own (up to 6 GB, installed once), the tests with
# them, and docs/clients.md, in about half an hour. make clients SELECT="-k fill-mask" runs some tests alone, and writes
# no page. Without npm, those of JavaScript are skipped. The install scripts of npm would only download libraries for
# GPUs. ultralytics needs the torch of its torchvision, and our package beside it.
CLIENTS := .clients

RUN_CLIENTS = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 QUANTIZER_CLIENTS=$(abspath $(CLIENTS)) PYTHONPATH=.:tests $(BIN)/python

clients: $(INSTALLED) $(CLIENTS)/.installed
	$(RUN_CLIENTS) -m pytest -m nightly -rs tests/clients $(SELECT)
ifndef SELECT
	$(RUN_CLIENTS) tests/clients
endif

$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/ultralytics.txt tests/clients/package.json
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet -r tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)/ultralytics
	$(CLIENTS)/ultralytics/bin/python -m pip install --quiet -c constraints.txt -r tests/clients/ultralytics.txt
	cp tests/clients/package.json $(CLIENTS)
	-npm install --prefix $(CLIENTS) --ignore-scripts --no-audit --no-fund
	touch $@

# Rooms, boxes and the arrows between them, files, statements, lines; and how deep a user's call lies when work begins.
structure: $(INSTALLED)
	@$(BIN)/python tests/structure.py
	@PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python tests/frames.py 2>/dev/null | grep "^f[a-z]* at\|^files"

# What quantizing twelve nets gives, and what twelve commands write and print, recorded anew after a change that is
# meant; read the diff. make goldens CASES="sweep run_qat" records these commands alone.
goldens: $(INSTALLED)
ifndef CASES
	OMP_NUM_THREADS=1 PYTHONPATH=tests:tests/report $(BIN)/python tests/goldens/golden_record.py
endif
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=tests $(BIN)/python tests/goldens/product_record.py $(CASES)

# 2,000 random models, and engines of 200 others, in about half an hour on one core. make property SEED=... draws the
# same ones again.
ifndef SEED
SEED := $(shell date +%s)
endif

property: $(INSTALLED)
	@echo "random models with SEED=$(SEED)"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/property --hypothesis-profile=nightly --hypothesis-seed=$(SEED)

# Engines of 300 random models on OpenVINO, ONNX Runtime and torch, at five batch sizes and three lengths, counted.
# Models that fail are written to failed-models/.
delivered: $(INSTALLED)
	@echo "random models with SEED=$(SEED)"
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests:tests/property $(BIN)/python -m delivered --seed $(SEED)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site of docs/, into site/: it needs no network to be read.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Report and terminal of a run as pictures; needs Chromium.
pictures: $(INSTALLED)
	$(BIN)/python tests/pictures.py $(or $(RUN),runs/demo) runs/pictures

# The notebooks of examples/ anew, with what they show.
gallery: $(INSTALLED)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python tests/gallery.py $(NOTEBOOKS)

# Each task of models end to end, and docs/tasks.md with their scores, in about an hour. Run again it goes on.
tasks: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	$(BIN)/python -m pip install --quiet --no-deps -r benchmarks/requirements-no-deps.txt
	OMP_NUM_THREADS=1 PYTHONPATH=benchmarks $(BIN)/python benchmarks/tasks

# Every architecture of transformers as a tiny model, some of them in engines and other tools too, docs/zoo.md, and what
# changed, in hours. Run again it goes on.
zoo: export PYTHONPATH = benchmarks:tests/zoo:tests
zoo: export OMP_NUM_THREADS = 1
zoo: export HF_HUB_OFFLINE = 1
zoo: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/zoo
	$(BIN)/python benchmarks/zoo --exports
	$(BIN)/python benchmarks/zoo --peers

# A model of each family with other versions of torch and transformers, docs/compatibility.md, in about an hour; with
# another Python: python benchmarks/compat --python python3.13 --torch 2.13.0 --transformers 5.24.0. Each
# torch is downloaded into an environment of its own, of up to 8 GB, and deleted. Run again it goes on.
compat: $(INSTALLED)
	$(BIN)/python benchmarks/compat

bench: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	$(BIN)/python -m pip install --quiet --no-deps -r benchmarks/requirements-no-deps.txt
	$(BIN)/python benchmarks/engine_speed.py
	$(BIN)/python benchmarks/proxy_speed.py
	$(BIN)/python benchmarks/proxy_build.py
	$(BIN)/python benchmarks/build_size.py
	$(BIN)/python benchmarks/accuracy.py
	$(BIN)/python benchmarks/calibration_speed.py
	$(BIN)/python benchmarks/calibration_accuracy.py
	$(BIN)/python benchmarks/default_accuracy.py
	$(BIN)/python benchmarks/sensitivity.py
	$(BIN)/python benchmarks/accuracy_control.py
	$(BIN)/python benchmarks/check_peers.py
	$(BIN)/python benchmarks/export_speed.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/training_speed.py
	$(BIN)/python benchmarks/training_accuracy.py
	@$(MAKE) --no-print-directory field

# Everybody's INT8 on real models, a row a process, and docs/benchmarks, in hours. Run again it goes on.
field: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	$(BIN)/python -m pip install --quiet --no-deps -r benchmarks/requirements-no-deps.txt
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/field

# The figures of README.md and docs/index.md from the kept rows of `make field`; `make field` does it as well.
figures: $(INSTALLED)
	$(BIN)/python benchmarks/field/headline.py

# The tests that need a GPU, and the benchmark that writes its section of results/gpu.md; without one all of it is skipped and
# says why. make gpu GPU_PYTHON=python3 takes an environment that is there, with a torch of its own.
ifndef GPU_PYTHON
gpu: $(INSTALLED)
endif
GPU_PYTHON ?= $(BIN)/python
gpu:
	PYTHONPATH=. $(GPU_PYTHON) -m pytest -m gpu -rs tests
	PYTHONPATH=. $(GPU_PYTHON) benchmarks/gpu_latency.py

# Hours long, resumable, and no part of the tests: see docs/design/testing.md.
mutation: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[mutation]'
	OMP_NUM_THREADS=1 $(BIN)/python mutation/run.py

# The pip that comes with Python 3.11 finds versions in three times the time of a new one; a new one shows what a build
# warns of, here of what any editable install does.
$(INSTALLED): pyproject.toml constraints.txt requirements-no-deps.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt pip
	PYTHONWARNINGS='ignore:Editable installation' \
		$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	$(BIN)/python -m pip install --quiet --no-compile --no-deps -r requirements-no-deps.txt
	touch $(INSTALLED)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache
