package archtest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const module = "github.com/coppice-dev/coppice"

// pkg is what `go list` says of a package.
type pkg struct {
	ImportPath, Dir, Name, ForTest string
	Standard                       bool
	GoFiles, CgoFiles, Deps        []string
}

// path is the import path within this module, or "" for a foreign package.
func (p pkg) path() string {
	rest, ok := strings.CutPrefix(p.ImportPath, module+"/")
	if !ok {
		return ""
	}
	return rest
}

// tree lists every package of the module and what they depend on, tests left out, by import path.
var tree = sync.OnceValues(func() (map[string]pkg, error) {
	dir, err := root()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command("go", "list", "-e", "-deps", "-json=ImportPath,Dir,Name,ForTest,Standard,GoFiles,CgoFiles,Deps", "./...")
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	all := map[string]pkg{}
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		switch err := dec.Decode(&p); {
		case errors.Is(err, io.EOF):
			return all, nil
		case err != nil:
			return nil, err
		}
		if !within(p.path(), "var") { // what runs leave behind
			all[p.ImportPath] = p
		}
	}
})

// root is the directory of go.mod.
var root = sync.OnceValues(func() (string, error) {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	return filepath.Dir(strings.TrimSpace(string(out))), err
})

func packages(t *testing.T) map[string]pkg {
	t.Helper()
	all, err := tree()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// rule bounds what a package and those below it may link, directly or not. An import of something below the subtree
// itself is always fine.
type rule struct {
	subtree string
	except  []string // packages below it that have another place in the tree
	// only are the subtrees of this module that may be linked; nil means any but those in not.
	only []string
	not  []string
	// foreign are the modules or packages of others that may be linked; nil means any but those in notForeign.
	foreign    []string
	notForeign []string
	why        string
}

var none = []string{}

var rules = []rule{
	{subtree: "core", only: none, foreign: none, why: "the vocabulary imports nothing"},
	{subtree: "api/runnerapi", only: []string{"core"}, foreign: none, why: "the wire is types only"},
	{subtree: "guestagent/guestapi", only: []string{"core"}, foreign: none, why: "both ends link the protocol"},
	{subtree: "guestagent", only: []string{"core"}, why: "what runs in the guest is small and knows no host"},
	{subtree: "guestagent/sessions", not: []string{"guestagent/reseal", "guestagent/workload"}, why: "sessions run in the workload that they are given"},
	{subtree: "guestagent/reseal", not: []string{"guestagent/sessions", "guestagent/files"}, why: "a reseal knows no request but its own"},
	{subtree: "controller", except: []string{"controller/compat", "controller/controllertest", "controller/runnertest"}, not: []string{"runner", "guestagent", "images", "sdk", "cmd", "egress/proxy", "egress/resolver"}, why: "the controller speaks api/runnerapi and nothing below it; of the egress proxy it knows the policy, which is pure"},
	{subtree: "controller/runnertest", only: []string{"api/runnerapi", "core", "egress", "guestagent/fakeguest", "guestagent/answer", "guestagent/guestapi", "internal", "runner/prepared", "runner/pulls", "snapshotstore"}, why: "a simulated runner knows the wires and the simulated guest, and has the pool of prepared machines and the pulls of a real one"},
	{subtree: "controller/compat", only: []string{"core", "sdk/go", "internal"}, notForeign: []string{"github.com/jackc/pgx", "github.com/labstack"}, why: "a layer for clients of others is itself a client of the REST API: it knows no use case and no database"},
	{subtree: "controller/placement", only: []string{"core", "api/runnerapi", "controller"}, foreign: none, why: "a pure function"},
	{subtree: "controller/openlimit", only: none, foreign: []string{"golang.org/x/time"}, why: "a table of addresses, which knows no request"},
	{subtree: "controller/retention", only: []string{"core", "controller", "internal/pace"}, foreign: none, why: "a plan is a pure function, and rounds declare the part of the database that they use"},
	{subtree: "controller/flows", only: []string{"core", "api/runnerapi"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/grants", only: []string{"core", "api/runnerapi", "controller/secretstore", "egress/ca", "egress/grant", "egress/policy", "internal"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/model", only: []string{"core", "api/runnerapi", "controller/grants", "controller/placement", "controller/secretstore", "egress", "internal"}, notForeign: []string{"github.com/jackc/pgx"}, why: "rows are values"},
	{subtree: "controller/datakeys", not: []string{"controller/httpapi", "controller/postgres"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/operations", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses, and knows no kind of operation"},
	{subtree: "controller/forkcall", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it asks runners, and writes no row"},
	{subtree: "controller/request", not: []string{"controller/httpapi", "controller/postgres"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/storegc", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/storecheck", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/sealing", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/transfer", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/guestclient", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it asks guests, and no database"},
	{subtree: "controller/idle", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/builds", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/uploads", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/steps", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/upkeep", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/captures", only: []string{"core"}, foreign: none, why: "it knows no rows"},
	{subtree: "controller/events", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/tenancy", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/tree", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/identity", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/attestations", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/cluster", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/fleet", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/ports", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/settings", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/internalapi", not: []string{"controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "adapters do not import one another"},
	{subtree: "controller/previews", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/sessions", not: []string{"controller/httpapi", "controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses"},
	{subtree: "controller/secretstore", only: []string{"core", "egress/ca", "internal"}, notForeign: []string{"github.com/jackc/pgx"}, why: "it declares the part of the database that it uses, and knows no grants"},
	{subtree: "controller/postgres", not: []string{"controller/httpapi", "controller/runnerclient"}, why: "adapters do not import one another"},
	{subtree: "controller/httpapi", not: []string{"controller/postgres", "controller/runnerclient"}, notForeign: []string{"github.com/jackc/pgx"}, why: "adapters do not import one another"},
	{subtree: "controller/runnerclient", not: []string{"controller/postgres", "controller/httpapi"}, notForeign: []string{"github.com/jackc/pgx"}, why: "adapters do not import one another"},
	{subtree: "snapshotstore", only: []string{"core", "internal"}, notForeign: []string{"github.com/jackc/pgx"}, why: "the store knows bytes, not rows or machines"},
	{subtree: "runner/vmm/fakevmm", not: []string{"controller", "guestagent/sessions", "guestagent/reseal", "guestagent/workload"}, notForeign: []string{"github.com/jackc/pgx"}, why: "a simulated machine has a simulated guest"},
	{subtree: "guestagent/fakeguest", only: []string{"core", "guestagent/answer", "guestagent/guestapi"}, why: "a simulation of the agent has none of its parts"},
	{subtree: "runner", except: []string{"runner/vmm/fakevmm"}, only: []string{"core", "api/runnerapi", "egress/egressapi", "egress/policy", "guestagent/guestapi", "images", "internal", "snapshotstore"}, notForeign: []string{"github.com/jackc/pgx"}, why: "a runner depends on the wire, not on the control plane, and never touches the database"},
	{subtree: "egress", only: []string{"core", "api/runnerapi", "internal"}, notForeign: []string{"github.com/jackc/pgx"}, why: "the egress process knows its runner only, by a socket"},
	{subtree: "egress/egressapi", only: []string{"core", "api/runnerapi"}, foreign: none, why: "both ends link the wire"},
	{subtree: "internal/attest", only: []string{"core"}, foreign: []string{"github.com/secure-systems-lab/go-securesystemslib", "golang.org/x/crypto"}, why: "verifiers link the format: the standard library and DSSE, which brings x/crypto for ids of keys"},
	{subtree: "runner/prepared/forecast", only: []string{"core"}, foreign: none, why: "a pure function of events"},
	{subtree: "runner/prepared", only: []string{"core", "api/runnerapi"}, why: "it knows no machine, only when there should be one"},
	{subtree: "runner/warm", only: []string{"core"}, foreign: none, why: "it knows no shell, only when there should be one"},
	{subtree: "runner/attestor", only: []string{"core", "internal"}, why: "a key and its certificate"},
	{subtree: "controller/sweep", only: none, foreign: none, why: "it bounds work, and knows no rows"},
	{subtree: "controller/countersign", only: []string{"core", "internal"}, why: "it compares what it is given, and asks no database"},
	{subtree: "images", only: []string{"core", "internal", "egress/policy"}, notForeign: []string{"github.com/jackc/pgx"}, why: "images are files; a registry's answer leads to public addresses only, and the policy, which is pure, knows those"},
	{subtree: "runner", except: []string{"runner/ext4/ext4test"}, not: []string{"images/build"}, why: "a runner opens images, and builds none"},
	{subtree: "migrations", only: []string{"core", "internal"}, why: "migrations are SQL"},
	{subtree: "sdk/go", only: none, why: "its users do not import a server"},
	{subtree: "examples", only: []string{"sdk/go"}, why: "examples use the public API only"},
	{subtree: "mcp", only: []string{"core", "sdk/go", "internal/foreign"}, notForeign: []string{"github.com/jackc/pgx"}, why: "the MCP server is a client of the API: it can do what its caller's key can do"},
	{subtree: "internal/cli", except: []string{"internal/cli/clitest", "internal/cli/operator"}, only: []string{"core", "sdk/go", "internal/atomicfile", "internal/attest", "internal/foreign", "internal/version", "mcp"}, notForeign: []string{"github.com/jackc/pgx"}, why: "commands of users are clients of the API: they know no server and no host"},
	{subtree: "internal/cli/user", not: []string{"internal/cli/operator"}, why: "commands of users know no command of an operator"},
	{subtree: "internal/cli/operator", not: []string{"internal/cli/user"}, why: "commands of operators know no command of a user"},
	{subtree: "internal/cli/clitest", only: []string{"api", "core", "sdk/go", "internal"}, notForeign: []string{"github.com/jackc/pgx"}, why: "a server of tests has the routes of the contract and nothing behind them"},
	{subtree: "internal", except: []string{"internal/cli", "internal/daemon", "internal/devstack", "internal/hostcheck", "internal/test"}, only: []string{"core"}, why: "helpers know the vocabulary and one another"},
	{subtree: "internal/test", except: []string{"internal/test/bench", "internal/test/e2e", "internal/test/kvmlane", "internal/test/poolrun", "internal/test/sdkserver", "internal/test/testegress", "internal/test/testoutside", "internal/test/testpool", "internal/test/testvm"}, only: []string{"core", "internal"}, why: "helpers of tests know the vocabulary and one another"},
}

func TestDependencyDirection(t *testing.T) {
	t.Parallel()
	for _, fault := range check(packages(t), rules) {
		t.Error(fault)
	}
}

// check returns a sentence for each breach.
func check(all map[string]pkg, rules []rule) []string {
	var faults []string
	for _, p := range all {
		if p.path() == "" {
			continue
		}
		for _, dep := range p.Deps {
			d := all[dep]
			if strings.HasPrefix(d.path(), "cmd/") && !within(p.path(), d.path()) {
				faults = append(faults, fmt.Sprintf("%s links %s: nobody imports a command", p.path(), d.path()))
			}
		}
		for _, r := range rules {
			if !within(p.path(), r.subtree) || under(p.path(), r.except) {
				continue
			}
			for _, dep := range p.Deps {
				if d := all[dep]; !r.allows(d) {
					faults = append(faults, fmt.Sprintf("%s links %s: %s", p.path(), d.ImportPath, r.why))
				}
			}
		}
	}
	slices.Sort(faults)
	return slices.Compact(faults)
}

func (r rule) allows(d pkg) bool {
	switch path := d.path(); {
	case d.Standard || within(path, r.subtree):
		return true
	case path != "":
		return !under(path, r.not) && (r.only == nil || under(path, r.only))
	default:
		return !under(d.ImportPath, r.notForeign) && (r.foreign == nil || under(d.ImportPath, r.foreign))
	}
}

func under(path string, subtrees []string) bool {
	return slices.ContainsFunc(subtrees, func(s string) bool { return within(path, s) })
}

func within(path, subtree string) bool {
	return path == subtree || strings.HasPrefix(path, subtree+"/")
}

// TestRulesCatch plants one breach of each kind.
func TestRulesCatch(t *testing.T) {
	t.Parallel()
	all := map[string]pkg{}
	for path, deps := range map[string][]string{
		module + "/core":                nil,
		module + "/runner":              {module + "/core", module + "/controller/x"},
		module + "/runner/netns":        {"github.com/jackc/pgx/v5"},
		module + "/controller/x":        {module + "/core"},
		module + "/guestagent/guestapi": {"github.com/hashicorp/yamux"},
		module + "/cmd/coppice":         {module + "/runner"},
		module + "/internal/e":          {module + "/cmd/coppice"},
		"github.com/jackc/pgx/v5":       nil,
		"github.com/hashicorp/yamux":    nil,
	} {
		all[path] = pkg{ImportPath: path, Deps: deps}
	}
	want := []string{
		"guestagent/guestapi links github.com/hashicorp/yamux: both ends link the protocol",
		"internal/e links cmd/coppice: nobody imports a command",
		"internal/e links " + module + "/cmd/coppice: helpers know the vocabulary and one another",
		"runner links " + module + "/controller/x: a runner depends on the wire, not on the control plane, and never touches the database",
		"runner/netns links github.com/jackc/pgx/v5: a runner depends on the wire, not on the control plane, and never touches the database",
	}
	if diff := cmp.Diff(want, check(all, rules)); diff != "" {
		t.Errorf("breaches (-want +got):\n%s", diff)
	}
}

// TestNoTestCodeInPrograms keeps helpers of tests out of what is shipped. What is below internal/test, and packages whose names end in
// "test", are helpers.
func TestNoTestCodeInPrograms(t *testing.T) {
	t.Parallel()
	for _, p := range packages(t) {
		if p.path() == "" || p.ForTest != "" || within(p.path(), "internal/test") || strings.HasSuffix(p.path(), "test") {
			continue
		}
		helpers := []string{"go.uber.org/goleak", "github.com/google/go-cmp/cmp"}
		if strings.HasPrefix(p.path(), "cmd/") {
			helpers = append(helpers, "testing")
		}
		for _, dep := range p.Deps {
			if slices.Contains(helpers, dep) || strings.HasPrefix(dep, module+"/internal/test/") {
				t.Errorf("%s links %s", p.path(), dep)
			}
		}
	}
}
