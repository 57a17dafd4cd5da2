# `make help` lists the targets. Those marked (root) need it: sudo -E make … As root, demo, demo-pool, dev, image and test
# first install what they need. SETUP=0 turns that off.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup needs s3-server minio test-minio test-bare test-api test-first-hour test-kvm setup-kvm build generate test test-sdk test-compat test-e2b test-long lint image demo demo-pool dev bench bench-control bench-scale bench-store bench-egress clean fuzz chaos faults attack explore deploy-check compose-up compose-down test-compose release release-check

GO      ?= go
ROOT    := $(filter 0,$(shell id -u))
VAR     := $(CURDIR)/var
GOFLAGS_BUILD := -trimpath -ldflags "-s -w"

# Where `make image` puts images, and where demo and dev look for them. Tests build their own into the user's cache.
export COPPICE_IMAGES_DIR ?= $(VAR)/images

# golangci-lint takes minutes to build, so it is kept outside the tree, by version.
LINT_VERSION := v2.15.0
TOOLS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/coppice/tools
LINT  := $(TOOLS)/golangci-lint-$(LINT_VERSION)

# Runs go test and reports on it: what failed, what was run again, what took longest.
GOTESTSUM_VERSION := v1.13.0
GOTESTSUM := $(TOOLS)/gotestsum-$(GOTESTSUM_VERSION)

# The S3 servers of tests, kept alike. internal/test/tests3 looks for these versions there.
VERSITYGW_VERSION := v1.8.0
MINIO_VERSION     := v0.0.0-20260212201848-7aac2a2c5b7c
VERSITYGW := $(TOOLS)/versitygw-$(VERSITYGW_VERSION)
MINIO     := $(TOOLS)/minio-$(MINIO_VERSION)

# Lists what a released program consists of.
CYCLONEDX_VERSION := v1.9.0
CYCLONEDX := $(TOOLS)/cyclonedx-gomod-$(CYCLONEDX_VERSION)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install what is missing from Debian's packages (root; else it prints the command)
	@scripts/setup

# As root, make installs what a target needs before it runs the target. Anyone else gets the command. Tests then skip what needs a missing program.
needs:
ifneq ($(SETUP),0)
	@GO="$(GO)" scripts/setup --quiet $(if $(filter test,$(MAKECMDGOALS)),,--run) || { $(if $(ROOT),echo "SETUP=0 leaves this check out." >&2; exit 1,true); }
endif

setup-kvm: ## install the pinned cloud-hypervisor, checked by its sum: PREFIX=dir (root, or a PREFIX of yours)
	@scripts/setup-kvm $(if $(PREFIX),--prefix $(PREFIX))

build: ## build bin/coppice and the static guest agent, bin/coppice-guest
	CGO_ENABLED=0 $(GO) build $(GOFLAGS_BUILD) -o bin/ ./cmd/...

generate: ## write generated code and documents again: API models and servers, SDKs, the wire of E2B (protoc of Debian's protobuf-compiler), state machines, sums
	$(GO) tool -modfile=internal/tools/go.mod oapi-codegen -config api/codegen.yaml api/openapi.yaml
	$(GO) tool -modfile=internal/tools/go.mod oapi-codegen -config sdk/go/codegen.yaml api/openapi.yaml
	$(GO) test ./api -run TestRequestsAreCurrent -update
	scripts/generate-sdks
	GO="$(GO)" scripts/generate-envd
	$(GO) test ./internal/test/archtest -run 'TestGeneratedFilesAreCurrent|TestStateMachinesDocument' -update
	$(GO) test ./internal/test/docs -run 'TestPictures|TestRoutes' -update
	$(GO) test ./cmd/coppice -run TestReference -update

# Packages are tested in this order. What takes longest begins first: behind all others it would go on alone. (Results are printed in
# this order, too.)
LONGEST := ./internal/test/e2e ./controller ./runner

# One package more than there are processors is tested at once: many tests wait for the end of a lease or for a timer.
AT_ONCE := -p $(shell expr $$(nproc) + 1)

# Without the tables for debuggers, which no stack trace needs, a test binary is linked in two thirds of the time.
LINK := -ldflags=-w

# The settings of make build, so that what it has compiled is used again: by the checks of deploy/, and by the linters.
COMPILED := CGO_ENABLED=0 GOFLAGS=-trimpath

# As root everything is required and what is missing fails. As anyone else, what needs root skips and says so.
ifdef ROOT
test: export COPPICE_TEST_REQUIRE ?= all
test: needs build $(GOTESTSUM) $(VERSITYGW) ## unit and integration tests with the race detector (root for all of them)
else
test: needs build $(GOTESTSUM)
	@echo "Not root: tests that need namespaces or VMs skip. All of them: sudo -E make test"
endif
	@(cd internal/test/deploytest && exec $(GO) mod download) >/dev/null 2>&1 & # on a new machine this takes one or two minutes
	@GOTESTSUM=$(GOTESTSUM) scripts/test '$(LONGEST) ./...' -race -count=1 -timeout 60m $(AT_ONCE) $(LINK) $(TESTFLAGS)
	@cd internal/test/deploytest && $(COMPILED) GOTESTSUM=$(GOTESTSUM) ../../../scripts/test ./... -count=1 -timeout 10m $(LINK)

test-sdk: ## the tests of the Python and other SDKs, from their packages (needs their registries): SDK=--short for the quick ones
	scripts/test-sdk $(SDK)

deploy-check: ## the checks of deploy/ alone: compose file, images, Helm chart, systemd units
	$(COMPILED) $(GO) test -C internal/test/deploytest -count=1 ./...

.PHONY: sdk
sdk: ## build the packages of the SDKs into var/sdk: a tarball for npm, a wheel for pip
	@scripts/build-sdks $(VAR)/sdk

.PHONY: docs
docs: ## build the documents as a site in var/docs and follow every link of it (needs python3-venv, and the registry of Python packages once)
	@TOOLS=$(TOOLS) GO="$(GO)" scripts/docs $(VAR)/docs

release: $(CYCLONEDX) ## make a release of the last commit in var/release, or OUT=dir: static programs, archives and Debian packages for amd64 and arm64, sums, lists of what is in them
	@GO="$(GO)" CYCLONEDX_GOMOD=$(CYCLONEDX) scripts/release $(or $(OUT),$(VAR)/release)

release-check: $(CYCLONEDX) ## make it twice, in two directories, the second with an empty build cache (SAME_CACHE=1: not), compare all digests and look into it
	@GO="$(GO)" CYCLONEDX_GOMOD=$(CYCLONEDX) SAME_CACHE=$(SAME_CACHE) scripts/release-check $(or $(OUT),$(VAR)/release)

compose-up: ## run everything in containers: needs a docker engine with Compose 2.15 or later
	@scripts/compose-up

compose-down: ## stop that; the volumes stay, but for VOLUMES=1
	@scripts/compose-down $(if $(filter 1,$(VOLUMES)),--volumes)

test-compose: $(VERSITYGW) ## run that on a real docker engine, in namespaces of its own, and use it: workspaces, forks, grants, forwarded ports, restarts (root; 15 minutes)
	@GO="$(GO)" VERSITYGW=$(VERSITYGW) scripts/test-compose $(COMMANDS)

test-long: build $(VERSITYGW) ## the long sweeps: 64 generations, every runtime, every fault, random sequences against the store, a mass fence (root; an hour)
	COPPICE_TEST_REQUIRE=all $(GO) test -count=1 -timeout 120m ./internal/test/e2e -long
	COPPICE_TEST_REQUIRE=all $(GO) test -race -count=1 -timeout 30m ./runner ./runner/memory ./internal/attest -run '^Test(Diff|DamagedDelta|EveryByteCounts)$$' -long
	COPPICE_TEST_REQUIRE=all $(GO) test -race -count=1 -timeout 30m ./controller -run '^Test((Images|Garbage)AgainstModel|KilledStep)$$' -long
	@GO="$(GO)" TOOLS=$(TOOLS) scripts/test-api
	COPPICE_TEST_REQUIRE=all $(GO) test -count=1 -timeout 60m ./controller -run '^Test(MassFence|(Among)?ManyLiveWorkspaces)$$' -long -v

test-api: ## generated requests to a server without machines, each answer compared with api/openapi.yaml (Schemathesis, from PyPI once): SEED=1 MAX_TIME=240
	@GO="$(GO)" TOOLS=$(TOOLS) SEED=$(SEED) MAX_TIME=$(MAX_TIME) scripts/test-api

test-first-hour: ## the commands of the documents and the mistakes of a new user, in a terminal of 100 columns, on a real coppice dev (root; ten minutes): ONLY=README; TRANSCRIPT=file keeps what was typed and shown
	@COPPICE_TEST_REQUIRE=all COPPICE_TRANSCRIPT=$(TRANSCRIPT) $(GO) test -v -count=1 -timeout 60m ./internal/test/firsthour -run '^TestFirstHour$$' -hour $(if $(ONLY),-only '$(ONLY)')

test-bare: ## the README's first commands on a fresh Debian 12 with nothing but make, git and Go: COMMANDS="'make demo'" (root; an hour)
	scripts/bare-root $(COMMANDS)

test-kvm: ## run the drivers and the system under a KVM that works, in an emulated machine; COPPICE_CLOUD_HYPERVISOR=/path tests that too (root; up to 45 minutes)
	CGO_ENABLED=0 $(GO) build $(GOFLAGS_BUILD) -o bin/ ./internal/test/kvmlane
	bin/kvmlane -cloud-hypervisor "$(COPPICE_CLOUD_HYPERVISOR)" $(LANE) test

test-compat: build ## run the unmodified packages of others, pinned by their sums, against Coppice; as root on real VMs, too: COMPAT_LAYERS=e2b or arrakis runs one layer, COMPAT_URL=http://… COMPAT_KEY=… COMPAT_ARRAKIS_URL=http://… uses a server that runs, WRITE=1 writes docs/COMPATIBILITY.md
	@GO=$(GO) WRITE=$(WRITE) scripts/test-compat

test-e2b: ## run E2B's own tests against a server that runs, of Python or, with SDK=js, of JavaScript: COPPICE_E2B_REPO=/their/repository COMPAT_URL=http://… COMPAT_KEY=…
	@scripts/test-e2b

s3-server: $(VERSITYGW) ## build versitygw, the S3 server of tests, unless it is there (minutes)

minio: $(MINIO) ## build MinIO, for test-minio, unless it is there (ten minutes)

test-minio: build $(MINIO) ## the tests of the store, and a pool of runners on it, with MinIO as the S3 server (root for the second)
	COPPICE_TEST_REQUIRE=s3 COPPICE_TEST_S3=minio $(GO) test -race -count=1 -timeout 30m ./snapshotstore/... ./internal/test/tests3
	COPPICE_TEST_REQUIRE=$(if $(ROOT),all,s3) COPPICE_TEST_S3=minio $(GO) test -count=1 -timeout 30m ./internal/test/e2e -run '^TestPool$$'

FUZZTIME ?= 60s
fuzz: ## fuzz every target for FUZZTIME (60s) each, beginning with the committed corpora; UNGUIDED=1 builds faster and ignores coverage
	@UNGUIDED=$(UNGUIDED) scripts/fuzz $(FUZZTIME)

chaos: build $(VERSITYGW) ## grow trees while servers, databases and VMs are killed, and check all that was promised: FOR=5m SEED=1 DEPLOY=dev, split or all (root)
	mkdir -p $(VAR)/chaos
	COPPICE_TEST_REQUIRE=all $(GO) test -tags chaos -v -count=1 -timeout 90m ./internal/test/e2e -run '^TestChaos$$' \
		-chaos $(or $(FOR),5m) -chaos-seed $(or $(SEED),1) -chaos-deployment $(or $(DEPLOY),all) -chaos-history $(VAR)/chaos/history.jsonl

faults: build $(VERSITYGW) ## every row of the fault matrix that is run, docs/FAULTS.md, to real processes and machines (root)
	COPPICE_TEST_REQUIRE=all $(GO) test -v -count=1 -timeout 90m ./internal/test/e2e -run '^Test(Fault(Matrix|MatrixIsWhole|sDocument)|HardTimes|PoolFaults|PoolLazy)$$' -long
	COPPICE_TEST_REQUIRE=all $(GO) test -v -count=1 -timeout 30m ./internal/daemon -run '^TestFailover$$' -long

EXPLORERS ?= $(shell expr 3 \* $$(nproc))
explore: ## every schedule of the explorer of interleavings, EXPLORERS at once, for FOR=6h at most; EVERY=50 runs one in 50, PART=0 to 49 says which; SCHEDULE=N,… runs these again
	@EXPLORERS=$(EXPLORERS) EVERY=$(EVERY) PART=$(PART) FOR=$(FOR) SCHEDULE=$(SCHEDULE) GO=$(GO) scripts/explore $(VAR)/explore

attack: build ## attack a stack as a malicious guest, tenant, upstream and bucket, while another tenant works (root; 15 minutes)
	@mkdir -p $(VAR)
	@set -o pipefail; status=0; \
	COPPICE_TEST_REQUIRE=all $(GO) test -v -count=1 -timeout 60m ./internal/test/e2e -run '^TestAttack$$' -long | tee $(VAR)/attack.log || status=$$?; \
	grep '^attacks ' $(VAR)/attack.log; exit $$status

lint: $(LINT) ## run the pinned linters, which are built on first use (minutes)
	$(COMPILED) $(LINT) run ./...
	cd internal/test/deploytest && $(COMPILED) $(LINT) run --config ../../../.golangci.yml ./...

$(LINT):
	mkdir -p $(TOOLS)/new
	CGO_ENABLED=0 GOBIN=$(TOOLS)/new $(GO) install -trimpath github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(LINT_VERSION)
	mv $(TOOLS)/new/golangci-lint $@

$(GOTESTSUM):
	mkdir -p $(TOOLS)/new
	CGO_ENABLED=0 GOBIN=$(TOOLS)/new $(GO) install $(GOFLAGS_BUILD) gotest.tools/gotestsum@$(GOTESTSUM_VERSION)
	mv $(TOOLS)/new/gotestsum $@

$(VERSITYGW):
	mkdir -p $(TOOLS)/new
	CGO_ENABLED=0 GOBIN=$(TOOLS)/new $(GO) install $(GOFLAGS_BUILD) github.com/versity/versitygw/cmd/versitygw@$(VERSITYGW_VERSION)
	mv $(TOOLS)/new/versitygw $@

$(MINIO):
	mkdir -p $(TOOLS)/new
	CGO_ENABLED=0 GOBIN=$(TOOLS)/new $(GO) install $(GOFLAGS_BUILD) github.com/minio/minio@$(MINIO_VERSION)
	mv $(TOOLS)/new/minio $@

$(CYCLONEDX):
	mkdir -p $(TOOLS)/new
	CGO_ENABLED=0 GOBIN=$(TOOLS)/new $(GO) install $(GOFLAGS_BUILD) github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@$(CYCLONEDX_VERSION)
	mv $(TOOLS)/new/cyclonedx-gomod $@

image: needs build ## build the base guest image unless it is current (root)
	bin/coppice image build

demo: needs build ## search a tree of running machines for a fix, with a real library and real VMs (root)
	scripts/demo

demo-pool: needs build $(VERSITYGW) ## the same on two runners, each on a host of its own, with the tree in an S3 store (root)
	scripts/demo-pool

dev: needs build image ## run controller, runner and PostgreSQL here until Ctrl-C (root)
	bin/coppice dev --data-dir $(VAR)/dev

bench: build image ## measure boots, forks, checkpoints and memory in one run of at most 25 minutes: BENCH="-vmm qemu -accel tcg" (root)
	CGO_ENABLED=0 $(GO) build $(GOFLAGS_BUILD) -o bin/ ./internal/test/bench
	bin/bench -out $(VAR)/bench -images-dir $(COPPICE_IMAGES_DIR) $(if $(COPPICE_QEMU),-qemu $(COPPICE_QEMU)) \
		$(if $(COPPICE_CLOUD_HYPERVISOR),-cloud-hypervisor $(COPPICE_CLOUD_HYPERVISOR)) $(BENCH)

bench-control: ## measure the control plane: fork operations, 1,000 parallel forks, a tree of 100,000; var/bench/control.json
	CGO_ENABLED=0 $(GO) build $(GOFLAGS_BUILD) -o bin/ ./internal/test/bench
	bin/bench control -out $(VAR)/bench $(BENCH)

bench-scale: ## measure a cell: 3 controllers, 1,000 simulated runners, 1,000,000 checkpoints; 15 minutes, var/bench/scale.json: BENCH="-scale 0.01"
	CGO_ENABLED=0 $(GO) build $(GOFLAGS_BUILD) -o bin/ ./internal/test/bench
	bin/bench scale -out $(VAR)/bench $(BENCH)

bench-store: build image $(VERSITYGW) ## measure the store of checkpoints: a chain of 64, and forks on other hosts, lazy and whole; var/bench/store.json (root)
	CGO_ENABLED=0 $(GO) build $(GOFLAGS_BUILD) -o bin/ ./internal/test/bench
	bin/bench store -out $(VAR)/bench -images-dir $(COPPICE_IMAGES_DIR) $(BENCH)

bench-egress: ## measure what the egress process costs, beside goproxy and a direct connection; var/bench/egress.json (root)
	CGO_ENABLED=0 $(GO) build $(GOFLAGS_BUILD) -o bin/ ./internal/test/bench
	bin/bench egress -out $(VAR)/bench $(BENCH)

clean: ## remove bin/, and var/ (images, checkpoints, reports) after asking, or with FORCE=1
	rm -rf bin
	@scripts/clean $(VAR) $(FORCE)
