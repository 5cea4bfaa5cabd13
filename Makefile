# `make` alone lists the targets. Building, testing and the demo need Go and make; only `make generate` needs clang.

DIST    := dist/otelcol-ebpfllm
TOOLS   := go tool -modfile=internal/tools/go.mod
OCB     := $(TOOLS) builder --ldflags="-s -w"
# Programs that only tests run are built outside the tree, so that they outlive `git clean`.
BACKENDS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/ebpfllm/backends
SOURCES  := builder-config.yaml go.mod go.sum $(shell find bpf cmd extension internal processor receiver -name '*.go' ! -name '*_test.go' -o -name '*.o')
# What `make test` tests; e.g. make test PKGS=./internal/assemble/... TESTFLAGS='-run Chunk -v'
PKGS      := ./...
TESTFLAGS :=
# The module, and those beside it whose dependencies the module shall not have.
MODULES := . internal/bench examples/llamacpp

export GOTOOLCHAIN ?= local
# quotes in it are the shell's only here
export SCENARIO
export EBPFLLM_COLLECTOR := $(CURDIR)/$(DIST)

.DEFAULT_GOAL := help
.PHONY: help build build-full build-agent generate generate-ocb test test-kernels kernels-docs truth truth-docs demo demo-llamacpp run bench bench-overhead bench-receiver soak soak-sampler lint fmt backends test-backends clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

build: $(DIST) ## build the distribution with ocb: dist/otelcol-ebpfllm

$(DIST): $(SOURCES)
	@mkdir -p dist
	$(OCB) --config builder-config.yaml --skip-get-modules || { echo "If go.mod or builder-config.yaml changed: make generate-ocb" >&2; exit 1; }
	@mv cmd/otelcol-ebpfllm/otelcol-ebpfllm $@
	@ls -lh $@ | awk '{print $$9, $$5}'

build-full: ## build the distribution with the heavy components too: dist/otelcol-ebpfllm-full
	@mkdir -p dist build
	$(OCB) --config builder-full.yaml
	@mv build/full/otelcol-ebpfllm-full dist/

build-agent: ## build the collector of the first of two tiers: dist/otelcol-ebpfllm-agent
	@mkdir -p dist build
	$(OCB) --config builder-agent.yaml
	@mv build/agent/otelcol-ebpfllm-agent dist/

generate: ## regenerate BPF objects (clang-19), component metadata and the collector's source
	go generate ./...
	@$(MAKE) --no-print-directory generate-ocb

generate-ocb: ## regenerate the collector's source and its modules only: after a change to builder-config.yaml or go.mod
	$(OCB) --config builder-config.yaml --skip-compilation

test: build ## run every test; as root the kernel tests run too
	@mkdir -p out
	$(TOOLS) gotestsum --format pkgname --format-hide-empty-pkg --jsonfile out/test.json --post-run-command internal/tools/counts.sh \
		--raw-command -- internal/tools/gotest.sh "$(if $(filter ./...,$(PKGS)),$(MODULES),.)" -count 1 -timeout 20m $(TESTFLAGS) $(PKGS)

# Which kernels; e.g. make test-kernels KERNELS=6.1,6.12 KERNELFLAGS=-v
KERNELS := 5.10,6.1,6.12,6.12-integrity,6.12-confidentiality,6.18,newest
test-kernels: ## run the kernel tests on other kernels, in emulated machines; writes out/kernels.json (needs qemu-system-x86, cpio, kmod, e2fsprogs, xz-utils, zstd, lz4, gcc)
	@mkdir -p out
	go run ./internal/vmtest -kernels $(KERNELS) $(KERNELFLAGS)

kernels-docs: ## put the table of out/kernels.json into docs/kernels.md
	go run ./internal/vmtest -docs docs/kernels.md

truth: ## inject known faults and hold what the receiver says of them to its bars; SCENARIO='host/lock' runs some, TRUTHFLAGS=-quick the short list (as root)
	go run ./internal/truthlab $(if $(SCENARIO),-run "$$SCENARIO" -add) $(TRUTHFLAGS)

truth-docs: ## put the table and the picture of out/truth.json into docs/accuracy.md
	go run ./internal/truthlab -docs docs/accuracy.md

demo: build ## spike a real streaming server and explain each spike (as root; under a minute after the build)
	go run ./internal/demo -collector $(DIST)

demo-llamacpp: build ## the same on the real llama.cpp, instrumented and not (as root; needs npm)
	go run ./internal/demo -collector $(DIST) -server llamacpp -out out/llamacpp
	go run ./internal/demo -collector $(DIST) -server llamacpp -uninstrumented -out out/llamacpp-uninstrumented

run: build ## run the distribution with examples/quickstart/config.yaml
	$(DIST) --config examples/quickstart/config.yaml

bench: ## measure; writes out/bench.json
	@mkdir -p out
	go build -o out/servercost ./internal/servercost
	cd internal/bench && go build -o ../../out/clusteronce ./clusteronce
	go test -c -o out/processor.test ./processor/spikesamplingprocessor
	cd internal/bench && go run . -out ../../out/bench.json -cluster-once ../../out/clusteronce \
		-benchmarks 'p="../../out/processor.test -test.run ^$$"; $$p -test.bench Recall -test.benchtime 10x && $$p -test.bench Planted -test.benchtime 1x && $$p -test.bench "Step$$"' \
		-server-cost '../../out/servercost -out - -configs echo_all,echo_tcp -rounds 20'

# e.g. make bench-overhead OVERHEADFLAGS='-configs bystander -rounds 80'
bench-overhead: ## measure what being watched costs a server and its neighbours; writes out/overhead.json (as root, on an idle machine; needs gcc, npm)
	@mkdir -p out
	go build -o out/servercost ./internal/servercost
	out/servercost $(OVERHEADFLAGS)

bench-receiver: ## measure the receiver's own CPU and memory at 1,000 and 5,000 requests/s; writes out/receiver.json (as root)
	@mkdir -p out
	go build -o out/receiverload ./internal/receiverload
	out/receiverload -out out/receiver.json

# How long; e.g. make soak SOAK=5m
SOAK := 20m
soak: ## keep the receiver under a mixed load for SOAK (20m) and tell whether its memory stays flat; writes out/soak.json (as root)
	@mkdir -p out
	go build -o out/receiverload ./internal/receiverload
	out/receiverload -soak $(SOAK) -out out/soak.json

soak-sampler: SOAK := 30m
soak-sampler: build ## keep spike_sampling at 20,000 spans/s with bursts of five times as many for SOAK (30m): memory within its bound, no loss uncounted; writes out/soak-sampler.json
	go run ./internal/samplersoak -collector $(DIST) -length $(SOAK) -out out/soak-sampler.json

lint: ## run golangci-lint
	@for m in $(MODULES); do (cd $$m && go tool -modfile=$(CURDIR)/internal/tools/lint/go.mod golangci-lint run ./...) || failed=1; done; [ -z "$$failed" ]

fmt: ## format as the linter wants it
	go tool -modfile=internal/tools/lint/go.mod golangci-lint fmt ./...

backends:
	@mkdir -p $(BACKENDS)
	go build -C internal/tools/backends/victoriametrics -trimpath -ldflags='-s -w' -o $(BACKENDS)/victoria-metrics github.com/VictoriaMetrics/VictoriaMetrics/app/victoria-metrics
	go build -C internal/tools/backends/jaeger -trimpath -ldflags='-s -w' -o $(BACKENDS)/jaeger github.com/jaegertracing/jaeger/cmd/all-in-one

test-backends: build build-agent backends ## read kept traces and metrics back from a real Jaeger and a real VictoriaMetrics; scale samplers up and down
	@mkdir -p out
	EBPFLLM_BACKENDS=$(BACKENDS) EBPFLLM_AGENT=$(CURDIR)/$(DIST)-agent $(TOOLS) gotestsum --format testname --jsonfile out/test-backends.json --post-run-command internal/tools/counts.sh \
		-- -tags backends -timeout 10m -count 1 $(TESTFLAGS) ./internal/backendtest/...

clean: ## remove what was built
	rm -rf dist build out examples/existing-collector/build
