package e2e

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write docs/FAULTS.md anew")

// fault is a row of the fault matrix. Exactly one of run, shown and waits says how it is shown.
type fault struct {
	number   int
	what     string // is done
	expected string

	run   func(*testing.T, *installation) // does it to real processes and machines; heal and verify follow
	brief bool                            // is among those that every run of the tests does
	pool  string                          // case of TestPoolFaults that shows it with a second host, besides
	shown []string                        // tests that show it, as package.Test or package.Test/case
	waits string                          // for which issue, and why
}

// inPool is the test that shows the row with a second host.
func (f fault) inPool() string { return "internal/e2e.TestPoolFaults/" + f.pool }

// The issues that rows wait for.
const (
	waitsForEgress = "issue 6: the egress proxy and its secrets"
)

// faults is the fault matrix. docs/FAULTS.md is made from it.
var faults = []fault{
	{number: 1, what: "runner killed before the pause of a capture", expected: "RUNNER_LOST; the machine goes on", run: killRunnerAt("capture.prepared")},
	{number: 2, what: "runner killed while the machine is paused", expected: "the next runner resumes and thaws it; the capture has failed, nothing of it is left", run: killRunnerAt("capture.paused"), brief: true},
	{number: 3, what: "runner killed while memory is written", expected: "as 2", run: killRunnerAt("capture.copied")},
	{number: 4, what: "power cut after the files of a capture are written and before they are durable", expected: "never acknowledged, so no row has it; what was acknowledged is whole", run: powerCut("capture.thawed"), brief: true},
	{number: 5, what: "VMM crashes in a capture", expected: "typed error; LOST with the cause; all of it reaped", run: crashInCapture, brief: true},
	{number: 6, what: "VMM hangs in a capture", expected: "an end in time, typed; LOST with the cause", run: stopInCapture},
	{number: 7, what: "disk full in a capture", expected: "DISK_FULL; the machine goes on", shown: []string{"internal/e2e.TestHardTimes/full disk", "runner/memory.TestWriteFileLeavesNothing"}},
	{number: 8, what: "disk full in a fork", expected: "DISK_FULL or success; others go on", run: fullDisk},
	{number: 9, what: "retry where an earlier try left files", expected: "done once, nothing is in the way", shown: []string{"runner.TestCrashInFork", "controller.TestRunnerDies"}},
	{number: 10, what: "runner killed in an upload", expected: "goes on; no duplicates", shown: []string{"runner.TestCrashInSeal", "snapshotstore/blob/s3.TestKilledInTheMiddle", "runner.TestSealAgain"}},
	{number: 11, what: "crash between the manifest and its row", expected: "committed once or collected", shown: []string{"runner.TestCrashInSeal", "controller.TestGarbageAgainstModel", "controller.TestImagesAgainstModel"}},
	{number: 12, what: "controller killed after the commit, before the answer", expected: "a repeat with the key gets the same checkpoint", run: killControllerAfterCheckpoint, brief: true},
	{number: 13, what: "object store away", expected: "local checkpoints can be used; uploads drain later; a machine that waits for memory from there is held and reported, and goes on", shown: []string{"runner.TestSealAgain", "internal/e2e.TestPoolFaults/store away", "internal/e2e.TestPoolLazy", "runner.TestStall", "snapshotstore/blob/s3.TestEveryCallFails"}},
	{number: 14, what: "object store slow", expected: "deadlines per chunk; bounded work", shown: []string{"snapshotstore/blob/s3.TestSlowPut", "snapshotstore/blob/s3.TestGetFaults"}},
	{number: 15, what: "object store gives wrong bytes", expected: "CHECKPOINT_CORRUPT after one more read; nothing of it is shown: what is fetched before is never started, a machine whose memory comes later is ended with SANDBOX_LOST, which names the object", shown: []string{"snapshotstore.TestEveryByte", "snapshotstore.TestReadAgain", "runner.TestFetchRefused", "internal/e2e.TestPoolFaults/changed in the store", "runner/pager.TestDamaged", "internal/e2e.TestPoolFaults/changed in the store, with memory that comes later"}},
	{number: 16, what: "object store gives too few bytes", expected: "as 15", shown: []string{"snapshotstore.TestEveryByte", "snapshotstore/blob/s3.TestGetFaults"}},
	{number: 17, what: "an object is gone", expected: "a typed error that names it", shown: []string{"runner.TestFetchRefused", "snapshotstore.TestCheck"}},
	{number: 18, what: "another object under the key", expected: "as 15", shown: []string{"snapshotstore.TestEveryByte", "runner.TestFetchRefused"}},
	{number: 19, what: "manifest tampered with", expected: "refused before any download", shown: []string{"snapshotstore.TestTampered", "snapshotstore/manifest.TestDecodeRefuses"}},
	{number: 20, what: "credentials expire in an upload", expected: "renewed, or a typed error", shown: []string{"snapshotstore/blob/s3.TestCredentialsExpire", "snapshotstore/blob/s3.TestCredentialsAreRenewed"}},
	{number: 21, what: "bit rot in the local cache", expected: "found at use; fetched anew", shown: []string{"internal/daemon.TestRotInTheCache", "snapshotstore.TestRot"}},
	{number: 22, what: "controller killed in a fork, before it is admitted", expected: "a repeat makes it once", run: killControllerAt("controller.in_admission")},
	{number: 23, what: "controller killed in a fork, before the runner is called", expected: "another controller makes it, once", run: killControllerAt("controller.after_admission")},
	{number: 24, what: "controller killed in a fork that the runner has made", expected: "another controller records it; one VMM a child", run: killControllerAt("controller.before_end"), brief: true},
	{number: 25, what: "controller killed while a fork is resealed", expected: "READY with a whole reseal, or destroyed", run: killControllerInReseal},
	{number: 26, what: "two controllers, one stopped in a fork for longer than its lease", expected: "its late writes change nothing; one fork", run: stopLeader},
	{number: 27, what: "PostgreSQL killed during commits", expected: "acknowledged is there; else 503 and one result per key", run: killDatabaseInCommit},
	{number: 28, what: "PostgreSQL away for longer than the soft lease", expected: "machines go on; 503; recovers by itself", run: databaseAway},
	{number: 29, what: "PostgreSQL without room, or read-only", expected: "503; nothing acknowledged that is not there", run: databaseTakesNoWrites},
	{
		number: 30, what: "many conflicting transactions", expected: "all done or refused; counts exact",
		shown: []string{"controller.TestManyParallelForks", "controller.TestQuotaUnderRace", "controller/postgres.TestDeadlockIsRepeated", "controller/postgres.TestIdentitiesRace"},
	},
	{number: 31, what: "one request many times at once", expected: "done once; all get its result", shown: []string{"controller/httpapi.TestRepeatsAtOnce"}},
	{number: 32, what: "a key with another body", expected: "422 IDEMPOTENCY_MISMATCH; nothing done", shown: []string{"controller/httpapi.TestKeysAreChecked", "controller/postgres.TestClaimKey"}},
	{number: 33, what: "a key after its time", expected: "done anew", shown: []string{"controller/postgres.TestSweepKeys"}},
	{number: 34, what: "client hangs up", expected: "the operation goes on and can be read", shown: []string{"controller.TestClientHangsUp"}},
	{number: 35, what: "controller and runner cut off from one another", expected: "unknown, then LOST after the hard lease; the runner has ended the machines by then", run: partition(false), pool: "cut off"},
	{number: 36, what: "runner can send and not receive", expected: "as 35: a heartbeat without its answer extends nothing", run: partition(true), pool: "may send"},
	{number: 37, what: "runner stopped beyond its hard lease, and continued", expected: "ends its machines at once; no workspace comes back; a capture it still ends is whole or refused", run: zombie, pool: "stopped in a seal"},
	{number: 38, what: "host reboots", expected: "LOST with the cause; nothing left; room again; checkpoints there", run: powerCut(""), pool: "reboot"},
	{number: 39, what: "runner restarted under living machines", expected: "they go on; a journal of another version is not misread", run: upgrade},
	{
		number: 40, what: "clocks step", expected: "leases do not care; certificates say so",
		shown: []string{"runner.TestLease", "controller/postgres.TestRunnerLease", "internal/daemon.TestRenewal", "internal/mtls.TestExpiryOnAnOpenConnection"},
	},
	{number: 41, what: "agent never connects", expected: "an end in time; destroyed, with the console's tail", shown: []string{"internal/e2e.TestHooksThatFail/panics", "runner/guest.TestDialFails"}},
	{number: 42, what: "agent dies in the reseal", expected: "destroyed, typed", shown: []string{"internal/e2e.TestFailClosed/killed", "internal/e2e.TestKilledInQuarantine"}},
	{number: 43, what: "kernel refuses the reseed", expected: "RESEAL_FAILED; destroyed", shown: []string{"internal/e2e.TestFailClosed/no-reseed"}},
	{number: 44, what: "egress proxy killed, or hangs", expected: "no way out but through it; back within seconds, or half a minute when it hangs; ends by itself without a runner", shown: []string{"runner.TestEgressKilled", "runner.TestEgressHung", "runner.TestEgressVM", "runner/egress.TestKill", "runner/egress.TestHung", "runner/egress.TestAlone"}},
	{number: 45, what: "proxy without its secrets", expected: "502 for those hosts only", waits: waitsForEgress},
	{number: 46, what: "rules are not applied", expected: "old rules stay; never READY", shown: []string{"runner/netns.TestAllowAllFailure", "runner/netns.TestReadBackFindsTampering"}},
	{number: 47, what: "runner killed at every step of making a sandbox", expected: "nothing is left", shown: []string{"internal/e2e.TestKillSweep", "runner.TestCrashInFork", "runner/netns.TestReconcileAfterKill"}},
	{number: 48, what: "descriptors, processes or inodes used up", expected: "a typed error that names the limit; others go on", run: noDescriptors},
	{number: 49, what: "VMM or runner killed for want of memory", expected: "LOST with the cause; a runner's machines go on", run: noMemory},
	{number: 50, what: "host of another class", expected: "INCOMPATIBLE_HOST that names the field, before anything is made", shown: []string{"controller/placement.TestChoose/other cpu", "controller.TestOtherClass", "runner.TestAnotherVMM", "runner.TestUpgrade"}, pool: "another class"},
	{number: 51, what: "checkpoint deleted while it is forked", expected: "409, or gone after; the fork is right", run: deleteInFork, pool: "deleted while it is fetched"},
	{number: 52, what: "collection races an upload", expected: "the chunk survives", shown: []string{"controller/postgres.TestReferenceIsHeld", "controller.TestGarbageRaces"}},
	{number: 53, what: "storm of forks on a full runner", expected: "a bounded line, 429 with Retry-After; nothing half made", run: stormOfForks},
	{number: 54, what: "disk stalls", expected: "an end in time; reads and other work go on; all is well when it goes on", run: diskStalls},
	{number: 55, what: "parent terminated in a capture", expected: "the checkpoint is whole or there is none", run: terminateInCapture},
	{number: 56, what: "key service away", expected: "no new checkpoints; machines go on", waits: waitsForEgress},
	{
		number: 57, what: "controller, runner and agent of different versions", expected: "refused with both versions named, or negotiated",
		shown: []string{"controller.TestRegisterRefusals/version", "internal/daemon.TestRefusals/a registration in another version", "guestagent/guestapi.TestRecordedExchange", "guestagent.TestRecordedRequests", "runner.TestNotTakenOver/journal is of a later"},
	},
	{number: 58, what: "forks of one checkpoint in the same second", expected: "each has a generation of its own", run: sameSecond},
	{
		number: 59, what: "PostgreSQL fails over to an asynchronous standby that lacks the last commits: a checkpoint, a registration, a workspace that became ready, a completion, a release, a restore, a deletion, a change of egress rules",
		expected: "what runs is what the new primary knows; bytes that it does not know are in the trash; no identity is given twice; runners get its egress rules; event streams go on",
		shown: []string{
			"internal/daemon.TestFailover/a checkpoint", "internal/daemon.TestFailover/a registration", "internal/daemon.TestFailover/a workspace that became ready",
			"internal/daemon.TestFailover/the completion of a creation", "internal/daemon.TestFailover/the completion of a capture", "internal/daemon.TestFailover/a release",
			"internal/daemon.TestFailover/a restore in place", "internal/daemon.TestFailover/a deletion",
			"controller.TestRulesOverFailover", "controller.TestEventsOverFailover",
		},
	},
	{
		number: 60, what: "PostgreSQL fails over to a synchronous standby during commits; then the old primary comes back", expected: "everything acknowledged is there; controllers that run pass the old primary over",
		shown: []string{"internal/daemon.TestSynchronousFailover", "internal/testpg.TestSynchronousPair"},
	},
	{
		number: 61, what: "PostgreSQL without fsync, with asynchronous commits, or read-only as a standby", expected: "refused at the start; 503 when it becomes so later; recovers by itself",
		shown: []string{"internal/daemon.TestWeakDatabase", "internal/daemon.TestDatabaseWeakens", "controller/postgres.TestDurability", "controller/postgres.TestCheckIsAsked"},
	},
}

// TestFaultMatrix does what the rows with a function say, one after the other on one installation. After each all is healed and
// looked at. One that fails gets the next a new installation.
func TestFaultMatrix(t *testing.T) {
	needVM(t)
	var in *installation
	for _, f := range faults {
		if f.run == nil || !f.brief && !*long {
			continue
		}
		if in == nil {
			in = newInstallation(t)
		}
		if !t.Run(fmt.Sprintf("%02d", f.number), func(t *testing.T) {
			t.Logf("%s: %s", f.what, f.expected)
			f.run(t, in)
			healed := time.Now()
			in.heal(t)
			in.verify(t, healed)
		}) {
			in.show(t)
			in = nil // its machines end with the test
		}
	}
	if in != nil {
		for _, a := range in.acked {
			in.checkCheckpoint(t, a)
		}
	}
}

// TestFaultMatrixIsWhole wants every row once, with one way in which it is shown, and every test that a row names to exist.
func TestFaultMatrixIsWhole(t *testing.T) {
	t.Parallel()
	const rows = 61
	if len(faults) != rows {
		t.Errorf("%d rows, want %d", len(faults), rows)
	}
	sources := map[string]*testSource{}
	for i, f := range faults {
		if f.number != i+1 {
			t.Errorf("row %d has number %d", i+1, f.number)
		}
		ways := 0
		for _, way := range []bool{f.run != nil, len(f.shown) > 0, f.waits != ""} {
			if way {
				ways++
			}
		}
		if ways != 1 || f.what == "" || f.expected == "" || f.brief && f.run == nil {
			t.Errorf("row %d is not shown in exactly one way, or says too little", f.number)
		}
		shown := f.shown
		if f.pool != "" {
			shown = append(slices.Clip(shown), f.inPool())
		}
		for _, name := range shown {
			pkg, test, _ := strings.Cut(name, ".Test")
			test, sub, _ := strings.Cut("Test"+test, "/")
			if sources[pkg] == nil {
				sources[pkg] = readTests(t, pkg)
			}
			if !sources[pkg].has(test, sub) {
				t.Errorf("row %d names %s, which does not exist", f.number, name)
			}
		}
	}
}

// testSource is what the tests of a package are called, and the texts in the files in which they are.
type testSource struct {
	file  map[string]string          // of a test
	texts map[string]map[string]bool // of a file
}

func readTests(t *testing.T, pkg string) *testSource {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("../..", filepath.FromSlash(pkg), "*_test.go"))
	if err != nil || len(files) == 0 {
		t.Errorf("package %s has no tests: %v", pkg, err)
	}
	s := &testSource{file: map[string]string{}, texts: map[string]map[string]bool{}}
	for _, path := range files {
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		texts := map[string]bool{}
		s.texts[path] = texts
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && strings.HasPrefix(fn.Name.Name, "Test") {
				s.file[fn.Name.Name] = path
			}
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
				if text, err := strconv.Unquote(lit.Value); err == nil {
					texts[text] = true
				}
			}
			return true
		})
	}
	return s
}

// has reports whether there is a test, and a case of it: a text in its file, or one of the runner's failpoints, which its tests go
// through one by one.
func (s *testSource) has(test, sub string) bool {
	path, ok := s.file[test]
	if !ok || sub == "" {
		return ok
	}
	if s.texts[path][sub] {
		return true
	}
	b, err := os.ReadFile("../../runner/failpoints.go")
	return err == nil && strings.Contains(string(b), `failpoint.New("`+sub+`")`)
}

const faultsDocument = "../../docs/FAULTS.md"

// TestFaultsDocument compares docs/FAULTS.md with the matrix. -update writes it.
func TestFaultsDocument(t *testing.T) {
	t.Parallel()
	want := faultsText()
	if *update {
		if err := os.WriteFile(faultsDocument, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	got, err := os.ReadFile(faultsDocument)
	if err != nil || string(got) != want {
		t.Errorf("docs/FAULTS.md is not that of the matrix (%v): go test ./internal/e2e -run TestFaultsDocument -update", err)
	}
}

func faultsText() string {
	var b strings.Builder
	b.WriteString(`# Faults

What must be survived, and how each row is shown. This page is made from the table in ` + "`internal/e2e/faultmatrix_test.go`" + `
(` + "`go test ./internal/e2e -run TestFaultsDocument -update`" + `).

**Run**: ` + "`make faults`" + ` does it to real processes (two controllers, a runner in a network namespace of its own, PostgreSQL, real
VMs), heals, and then looks at everything: both controllers answer; nothing is on its way any more within 15 s; the machine that ran
before has gone on; acknowledged checkpoints can be forked and have the right content; the host has the VMMs, namespaces, cgroups, journals,
disks and checkpoints that rows name and nothing else; audit log and quota counts are exact. Rows in **bold** are part of ` + "`make test`" + ` too.
` + "`TestPoolFaults`" + ` does a row to two runners on hosts of their own, with a store: what one loses goes on on the other. Any other name is that of a test which shows the row with real parts or with the fake VMM.

| # | fault | expected | shown by |
|---|---|---|---|
`)
	for _, f := range faults {
		var by []string
		switch {
		case f.brief:
			by = []string{fmt.Sprintf("**run** as `TestFaultMatrix/%02d`", f.number)}
		case f.run != nil:
			by = []string{fmt.Sprintf("run as `TestFaultMatrix/%02d`", f.number)}
		case f.waits != "":
			by = []string{"waits for " + f.waits}
		}
		for _, name := range f.shown {
			by = append(by, "`"+name+"`")
		}
		if f.pool != "" {
			by = append(by, "`"+f.inPool()+"`")
		}
		fmt.Fprintf(&b, "| %d | %s | %s | %s |\n", f.number, f.what, f.expected, strings.Join(by, ", "))
	}
	return b.String()
}
