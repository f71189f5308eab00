# Weft's tasks. `make demo` and `make test` do their own set-up.
.DEFAULT_GOAL := help
SHELL := /bin/bash
CARGO ?= cargo
PREFIX ?= /usr/local
DESTDIR ?=

TARGET := $(or $(CARGO_TARGET_DIR),target)
RELEASE := $(TARGET)/release
TESTED := $(TARGET)/tested
PROGRAMS := $(TARGET)/programs
IMAGES := $(TARGET)/guest
E2E = $(1)/weft-e2e --weft $(1)/weft --programs $(PROGRAMS) --sources tests/programs --guest $(IMAGES)
BENCH := $(RELEASE)/weft-bench --weft $(RELEASE)/weft --programs $(PROGRAMS) --guest $(IMAGES)

# Rounds of the corpus and losses of each kind: few in `make test`, many in
# `make soak`.
ROUNDS ?= 1
MOMENTS ?= 2
SOAK_ROUNDS ?= 100
SOAK_MOMENTS ?= 50
SOAK_BOOTS ?= 100
SOAK_NODE_BOOTS ?= 200
SOAK_LEND_SECONDS ?= 3600
SOAK_CLUSTER_SECONDS ?= 3600
FUZZ_SECONDS ?= 60

help: ## Lists the tasks
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "make %-12s %s\n", $$1, $$2 }'

setup: ## Installs what is missing (asks nothing; quick when nothing is)
	@bash .ci/setup

# The runtime is freestanding: it has a panic handler of its own. Cargo unifies
# the features of what it builds at once, and would give it weft-wire with std,
# which has another. So the runtime is always built by itself, and first.
RUNTIME := -p weft-runtime
OTHERS := --workspace --exclude weft-runtime
INSTALLED := $(OTHERS) --exclude weft-fuzz

build: ## Builds weft, its runtime and its monitor, optimised
	$(CARGO) build --release $(RUNTIME)
	$(CARGO) build --release $(INSTALLED)

# What the end-to-end tests run: optimised in less time, without benchmarks and simulators.
under-test:
	$(CARGO) build --profile tested $(RUNTIME)
	$(CARGO) build --profile tested -p weft-cli -p weft-monitor -p weft-tests

programs: ## Builds the programs of the tests and benchmarks
	@mkdir -p $(PROGRAMS)
	$(MAKE) -s -C tests/programs OUT=$(abspath $(PROGRAMS))
	$(MAKE) -s -C bench/elastic OUT=$(abspath $(PROGRAMS))

guest: ## Builds the small guest kernel and the busybox initrd (minutes, once)
	@bash guest/build --out $(IMAGES) small tools

guest-debian: ## Fetches Debian's own kernel and makes a Debian root image
	@bash guest/build --out $(IMAGES) debian clients

guest-mpi: ## Makes the guest image for MPI, and programs for it
	@bash guest/build --out $(IMAGES) mpi scalapack

demo: setup build programs guest guest-mpi ## Sorts and searches on two nodes, boots Linux over both, moves one about
	WEFT=$(abspath $(RELEASE))/weft BENCH=$(abspath $(RELEASE))/weft-bench \
		PROGRAMS=$(abspath $(PROGRAMS)) GUEST=$(abspath $(IMAGES)) \
		PICTURE=$(abspath $(TARGET))/pings.svg PAGE=$(abspath $(TARGET))/cluster-page \
		bash demo/demo.sh

# The documentation of private items, too: its readers are Weft's developers.
RUSTDOC := RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" \
	$(CARGO) doc --no-deps --document-private-items

check: docs-check ## Format, lints, links, language, layers, rustdoc, licences
	@python3 .ci/check-layers.py
	$(CARGO) fmt --all --check
	$(CARGO) fmt --manifest-path models/Cargo.toml --check
	$(CARGO) clippy --release $(RUNTIME) -- -D warnings
	$(CARGO) clippy $(OTHERS) --all-targets -- -D warnings
	$(CARGO) check --release --tests --manifest-path models/Cargo.toml --target-dir $(TARGET)/models
	$(RUSTDOC) --release $(RUNTIME)
	$(RUSTDOC) $(OTHERS)
	@python3 .ci/check-licences.py

# A test that cannot run here passes, and says so in a line of standard error,
# which is repeated at the end.
unit: ## Tests that need no privilege and no network
	@python3 .ci/unit.py $(CARGO) $(OTHERS)

# Without the images, where the host lacks what making them takes (77): what needs
# them is skipped, and named at the end.
images:
	@for step in small debian mpi; do \
		bash guest/build --out $(IMAGES) $$step || [ $$? -eq 77 ] || exit 1; \
	done

damage: ## Builds a runtime that damages what it sends home, for the attacks of `lend`
	$(CARGO) build --release $(RUNTIME) --features damage --target-dir $(TARGET)/damage

e2e: under-test damage programs images ## Native runs against runs under weft, failures, set-up errors
	$(call E2E,$(TESTED)) --side-by-side --rounds $(ROUNDS) --moments $(MOMENTS)

fuzz-replay: ## Every input of fuzz/corpus again, crashes of the past among them: a part of `unit`
	$(CARGO) test -p weft-fuzz

# The images are made meanwhile, with what the compilers leave of the processors, by a process
# group that ends with this. If that fails, e2e tries it again, and says why.
test: setup ## All of it
	@mkdir -p $(TARGET)
	@set -m; nice -n 19 $(MAKE) -s images >$(TARGET)/images.log 2>&1 & images=$$!; set +m; \
		trap 'kill -- -$$images 2>/dev/null' EXIT; \
		$(MAKE) check unit && $(MAKE) e2e

bench: build programs guest guest-debian ## Measures, and renews the tables of bench/RESULTS.md
	$(BENCH) $(BENCHMARKS)

soak: build damage programs guest guest-debian guest-mpi ## The long tests, for a night
	$(CARGO) test --release $(OTHERS) -- --ignored
	tests/mpi/two-machines --weft $(RELEASE)/weft --guest $(IMAGES) --machines 4 || [ $$? -eq 77 ]
	$(call E2E,$(RELEASE)) --long --rounds $(SOAK_ROUNDS) --moments $(SOAK_MOMENTS) --boots $(SOAK_BOOTS) \
		--node-boots $(SOAK_NODE_BOOTS) --lend-seconds $(SOAK_LEND_SECONDS) \
		--cluster-seconds $(SOAK_CLUSTER_SECONDS)
	@bash .ci/prove all

# Each needs a tool that not every machine has, and says `skipped:` where it lacks.
miri: ## Runs the tests of the pure protocol under Miri
	@bash .ci/prove miri

models: ## Tries all interleavings of the lock-free parts, under loom
	@bash .ci/prove models

deny: ## Checks dependencies with cargo-deny: licences, sources, known vulnerabilities
	@bash .ci/prove deny

ab: ## Latency benchmarks of BASE against HEAD, two commits, in alternation
	@python3 .ci/ab.py $(BASE) $(HEAD)

fuzz: ## Coverage-guided fuzzing, FUZZ_SECONDS each target (FUZZ_TARGETS: a prefix)
	@bash .ci/fuzz run $(FUZZ_SECONDS) "$(FUZZ_TARGETS)"

docs-check: ## Links between the pages, and plain English everywhere
	@python3 .ci/check-links.py
	@python3 .ci/check-prose.py

install: build ## Installs weft, its runtime and its monitor under PREFIX
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib/weft
	install -m 0755 $(RELEASE)/weft $(DESTDIR)$(PREFIX)/bin/weft
	install -m 0755 $(RELEASE)/weft-runtime $(DESTDIR)$(PREFIX)/lib/weft/weft-runtime
	install -m 0755 $(RELEASE)/weft-monitor $(DESTDIR)$(PREFIX)/lib/weft/weft-monitor

uninstall: ## Removes what `make install` installed
	rm -f $(DESTDIR)$(PREFIX)/bin/weft $(DESTDIR)$(PREFIX)/lib/weft/weft-runtime $(DESTDIR)$(PREFIX)/lib/weft/weft-monitor
	-rmdir $(DESTDIR)$(PREFIX)/lib/weft

clean: ## Removes what was built
	$(CARGO) clean

# In order: the set-up first. Cargo uses all processors by itself.
.NOTPARALLEL:
.PHONY: help setup build under-test programs guest guest-debian guest-mpi demo check unit damage e2e test bench soak ab miri models deny fuzz fuzz-replay images docs-check install uninstall clean
