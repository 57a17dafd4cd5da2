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

var update = flag.Bool("update", false, "write docs/FAULTS.md again")

// fault is a row of the fault matrix. It is run, or shown by other tests, or both; or it waits.
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
func (f fault) inPool() string { return "internal/test/e2e.TestPoolFaults/" + f.pool }

// The issues that rows wait for.
const (
	waitsForEgress = "issue 6: the egress proxy and its secrets"
)

// faults is the fault matrix. docs/FAULTS.md is made from it.
var faults = []fault{
	{number: 1, what: "runner killed before the pause of a capture", expected: "RUNNER_LOST; the machine continues", run: killRunnerAt("capture.prepared")},
	{number: 2, what: "runner killed while the machine is paused", expected: "the next runner resumes and thaws it; the capture fails and leaves nothing behind", run: killRunnerAt("capture.paused"), brief: true},
	{number: 3, what: "runner killed while memory is written", expected: "as 2", run: killRunnerAt("capture.copied")},
	{number: 4, what: "power cut after the files of a capture are written and before they are durable", expected: "never acknowledged, so there is no row; acknowledged checkpoints are whole", run: powerCut("capture.thawed"), brief: true},
	{number: 5, what: "VMM crashes in a capture", expected: "a typed error; LOST with the cause; the runner reaps everything", run: crashInCapture, brief: true},
	{number: 6, what: "VMM hangs in a capture", expected: "a typed error in time; LOST with the cause", run: stopInCapture},
	{number: 7, what: "disk full in a capture", expected: "DISK_FULL; the machine continues", shown: []string{"internal/test/e2e.TestHardTimes/full disk", "runner/memory.TestWriteFileLeavesNothing"}},
	{number: 8, what: "disk full in a fork", expected: "DISK_FULL or success; other machines continue", run: fullDisk},
	{number: 9, what: "retry after an earlier try left files", expected: "done once; the old files do no harm", shown: []string{"runner.TestCrashInFork", "controller.TestRunnerDies"}},
	{number: 10, what: "runner killed in an upload", expected: "the upload continues; no duplicates", shown: []string{"runner.TestCrashInSeal", "snapshotstore/blob/s3.TestKilledInTheMiddle", "runner.TestSealAgain"}},
	{number: 11, what: "crash between the manifest and its row", expected: "committed once or collected", shown: []string{"runner.TestCrashInSeal", "controller.TestGarbageAgainstModel", "controller.TestImagesAgainstModel"}},
	{number: 12, what: "controller killed after the commit, before the answer", expected: "a repeat with the key gets the same checkpoint", run: killControllerAfterCheckpoint, brief: true},
	{number: 13, what: "object store away", expected: "local checkpoints work; uploads drain later; a machine that waits for memory from the store is held and reported, and continues later", shown: []string{"runner.TestSealAgain", "internal/test/e2e.TestPoolFaults/store away", "internal/test/e2e.TestPoolLazy", "runner.TestStall", "snapshotstore/blob/s3.TestEveryCallFails"}},
	{number: 14, what: "object store slow", expected: "deadlines per chunk; bounded work", shown: []string{"snapshotstore/blob/s3.TestSlowPut", "snapshotstore/blob/s3.TestGetFaults"}},
	{number: 15, what: "object store returns wrong bytes", expected: "CHECKPOINT_CORRUPT after one more read; no guest sees wrong bytes: a machine that is fetched whole never starts; a machine whose memory comes later ends with SANDBOX_LOST, which names the object", shown: []string{"snapshotstore.TestEveryByte", "snapshotstore.TestReadAgain", "runner.TestFetchRefused", "internal/test/e2e.TestPoolFaults/changed in the store", "runner/pager.TestDamaged", "internal/test/e2e.TestPoolFaults/changed in the store, with memory that comes later"}},
	{number: 16, what: "object store returns too few bytes", expected: "as 15", shown: []string{"snapshotstore.TestEveryByte", "snapshotstore/blob/s3.TestGetFaults"}},
	{number: 17, what: "object missing", expected: "a typed error that names it", shown: []string{"runner.TestFetchRefused", "snapshotstore.TestCheck"}},
	{number: 18, what: "another object under the same key", expected: "as 15", shown: []string{"snapshotstore.TestEveryByte", "runner.TestFetchRefused"}},
	{number: 19, what: "manifest tampered with", expected: "refused before any download", shown: []string{"snapshotstore.TestTampered", "snapshotstore/manifest.TestDecodeRefuses"}},
	{number: 20, what: "credentials expire in an upload", expected: "renewed, or a typed error", shown: []string{"snapshotstore/blob/s3.TestCredentialsExpire", "snapshotstore/blob/s3.TestCredentialsAreRenewed"}},
	{number: 21, what: "bit rot in the local cache", expected: "found at use; fetched again", shown: []string{"internal/daemon.TestRotInTheCache", "snapshotstore.TestRot"}},
	{number: 22, what: "controller killed in a fork, before it is admitted", expected: "a repeat makes the fork once", run: killControllerAt("controller.in_admission")},
	{number: 23, what: "controller killed in a fork, before the runner is called", expected: "another controller makes the fork, once", run: killControllerAt("controller.after_admission")},
	{number: 24, what: "controller killed in a fork that the runner has made", expected: "another controller records the fork; one VMM for each child", run: killControllerAt("controller.before_end"), brief: true},
	{number: 25, what: "controller killed while a fork is resealed", expected: "READY with a whole reseal, or destroyed", run: killControllerInReseal},
	{number: 26, what: "two controllers, one stopped in a fork for longer than its lease", expected: "its late writes change nothing; one fork", run: stopLeader},
	{number: 27, what: "PostgreSQL killed during commits", expected: "acknowledged work is there; otherwise 503 and one result per key", run: killDatabaseInCommit},
	{number: 28, what: "PostgreSQL away for longer than the soft lease", expected: "machines continue; 503; recovers by itself", run: databaseAway},
	{number: 29, what: "PostgreSQL on a full disk, or read-only", expected: "503; everything acknowledged is there", run: databaseTakesNoWrites},
	{
		number: 30, what: "many conflicting transactions", expected: "each is done or refused; counts are exact",
		shown: []string{"controller.TestManyParallelForks", "controller.TestQuotaUnderRace", "controller/postgres.TestDeadlockIsRepeated", "controller/postgres.TestIdentitiesRace"},
	},
	{number: 31, what: "one request many times at once", expected: "done once; all get the same result", shown: []string{"controller/httpapi.TestRepeatsAtOnce"}},
	{number: 32, what: "an idempotency key with another body", expected: "422 IDEMPOTENCY_MISMATCH; nothing is done", shown: []string{"controller/httpapi.TestKeysAreChecked", "controller/postgres.TestClaimKey"}},
	{number: 33, what: "an idempotency key after it expired", expected: "done again", shown: []string{"controller/postgres.TestSweepKeys"}},
	{number: 34, what: "client hangs up", expected: "the operation continues and can be read", shown: []string{"controller.TestClientHangsUp"}},
	{number: 35, what: "controller and runner cannot reach each other", expected: "unknown, then LOST after the hard lease; the runner has ended the machines by then", run: partition(false), pool: "cut off"},
	{number: 36, what: "runner can send but not receive", expected: "as 35: a heartbeat without an answer extends no lease", run: partition(true), pool: "may send"},
	{number: 37, what: "runner stopped beyond its hard lease, and continued", expected: "it ends its machines at once; no workspace comes back; a capture that it still finishes is whole or refused", run: zombie, pool: "stopped in a seal"},
	{number: 38, what: "host reboots", expected: "LOST with the cause; nothing is left; room is free again; checkpoints are there", run: powerCut(""), pool: "reboot"},
	{number: 39, what: "runner restarted while machines run", expected: "they continue; the runner does not misread a journal of another version", run: upgrade},
	{
		number: 40, what: "clocks step", expected: "leases are not affected; certificate errors name the clock",
		shown: []string{"runner.TestLease", "controller/postgres.TestRunnerLease", "internal/daemon.TestRenewal", "internal/mtls.TestExpiryOnAnOpenConnection"},
	},
	{number: 41, what: "agent never connects", expected: "ends in time; destroyed; the error has the console's tail", shown: []string{"internal/test/e2e.TestHooksThatFail/panics", "runner/guest.TestDialFails"}},
	{number: 42, what: "agent dies in the reseal", expected: "destroyed, with a typed error", shown: []string{"internal/test/e2e.TestFailClosed/killed", "internal/test/e2e.TestKilledInQuarantine"}},
	{number: 43, what: "kernel refuses the reseed", expected: "RESEAL_FAILED; destroyed", shown: []string{"internal/test/e2e.TestFailClosed/no-reseed"}},
	{number: 44, what: "egress proxy killed, or hangs", expected: "no traffic bypasses it; back within seconds, or half a minute if it hangs; it ends by itself without a runner", shown: []string{"runner.TestEgressKilled", "runner.TestEgressHung", "runner.TestEgressVM", "runner/egress.TestKill", "runner/egress.TestHung", "runner/egress.TestAlone"}},
	{number: 45, what: "proxy without its secrets", expected: "502 for those hosts only", waits: waitsForEgress},
	{number: 46, what: "rules cannot be applied", expected: "the old rules stay; a new sandbox is never READY", shown: []string{"runner/netns.TestAllowAllFailure", "runner/netns.TestReadBackFindsTampering"}},
	{number: 47, what: "runner killed at every step of making a sandbox", expected: "nothing is left", shown: []string{"internal/test/e2e.TestKillSweep", "runner.TestCrashInFork", "runner/netns.TestReconcileAfterKill"}},
	{number: 48, what: "no descriptors, processes or inodes left", expected: "a typed error that names the limit; other machines continue", run: noDescriptors},
	{number: 49, what: "VMM or runner killed because memory ran out", expected: "LOST with the cause; a runner's machines continue", run: noMemory},
	{number: 50, what: "host of another class", expected: "INCOMPATIBLE_HOST that names the field, before anything is made", shown: []string{"controller/placement.TestChoose/other cpu", "controller.TestOtherClass", "runner.TestAnotherVMM", "runner.TestUpgrade"}, pool: "another class"},
	{number: 51, what: "checkpoint deleted while it is forked", expected: "409, or deleted after the fork; the fork is right", run: deleteInFork, pool: "deleted while it is fetched"},
	{number: 52, what: "collection races an upload", expected: "the chunk survives", shown: []string{"controller/postgres.TestReferenceIsHeld", "controller.TestGarbageRaces"}},
	{number: 53, what: "storm of forks on a full runner", expected: "a bounded queue, 429 with Retry-After; nothing half made", run: stormOfForks},
	{number: 54, what: "disk stalls", expected: "ends in time; reads and other work continue; everything works when the disk does", run: diskStalls},
	{number: 55, what: "parent terminated in a capture", expected: "the checkpoint is whole or there is none", run: terminateInCapture},
	{number: 56, what: "key service away", expected: "no new checkpoints; machines continue", waits: waitsForEgress},
	{
		number: 57, what: "controller, runner and agent of different versions", expected: "refused with both versions named, or negotiated",
		shown: []string{"controller.TestRegisterRefusals/version", "internal/daemon.TestRefusals/a registration in another version", "guestagent/guestapi.TestRecordedExchange", "guestagent.TestRecordedRequests", "runner.TestNotTakenOver/journal is of a later"},
	},
	{number: 58, what: "forks of one checkpoint in the same second", expected: "each has a generation of its own", run: sameSecond},
	{
		number: 59, what: "PostgreSQL fails over to an asynchronous standby that lacks the last commits: a checkpoint, a registration, a workspace that became ready, a completion, a release, a restore, a deletion, a runner that joined, the removal of a runner, a change of egress rules",
		expected: "only what the new primary knows runs; bytes that it does not know are in the trash; no identity is given twice; a runner that it does not know registers again; runners get its egress rules; event streams continue",
		run:      failOver, brief: true,
		shown: []string{
			"internal/daemon.TestFailover/a checkpoint", "internal/daemon.TestFailover/a registration", "internal/daemon.TestFailover/a workspace that became ready",
			"internal/daemon.TestFailover/the completion of a creation", "internal/daemon.TestFailover/the completion of a capture", "internal/daemon.TestFailover/a release",
			"internal/daemon.TestFailover/a restore in place", "internal/daemon.TestFailover/a deletion", "internal/daemon.TestFailover/a runner that joined", "internal/daemon.TestFailover/the removal of a runner",
			"internal/daemon.TestForgottenRunner", "controller/postgres.TestTokenOfAnEarlierHistory",
			"controller.TestRulesOverFailover", "controller.TestEventsOverFailover",
		},
	},
	{
		number: 60, what: "PostgreSQL fails over to a synchronous standby during commits; then the old primary comes back", expected: "everything acknowledged is there; running controllers skip the old primary",
		shown: []string{"internal/daemon.TestSynchronousFailover", "internal/test/testpg.TestSynchronousPair"},
	},
	{
		number: 61, what: "PostgreSQL without fsync, with asynchronous commits, or read-only as a standby", expected: "refused at the start; 503 if the setting changes later; recovers by itself",
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

// TestFaultMatrixIsWhole wants every row once, with how it is shown, and every test that a row names to exist.
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
		if (f.run != nil || len(f.shown) > 0) == (f.waits != "") || f.what == "" || f.expected == "" || f.brief && f.run == nil {
			t.Errorf("row %d is not shown, or waits although it is, or says too little", f.number)
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
	files, err := filepath.Glob(filepath.Join("../../..", filepath.FromSlash(pkg), "*_test.go"))
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
	b, err := os.ReadFile("../../../runner/failpoints.go")
	return err == nil && strings.Contains(string(b), `failpoint.New("`+sub+`")`)
}

const faultsDocument = "../../../docs/FAULTS.md"

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
		t.Errorf("docs/FAULTS.md is not that of the matrix (%v): go test ./internal/test/e2e -run TestFaultsDocument -update", err)
	}
}

func faultsText() string {
	var b strings.Builder
	b.WriteString(`# Faults

This page lists the faults that Coppice must survive, and how each row is shown. It is generated
from the table in ` + "`internal/test/e2e/faultmatrix_test.go`" + `
(` + "`go test ./internal/test/e2e -run TestFaultsDocument -update`" + `).

**Run**: ` + "`make faults`" + ` causes the fault in real processes (two controllers, a runner in a network
namespace of its own, PostgreSQL, real VMs) and ends it. Then it checks everything. Both controllers
answer. No operation is under way after 15 s. The machine that ran before still runs. Acknowledged
checkpoints can be forked and have the right content. The host has exactly the VMMs, namespaces,
cgroups, journals, disks and checkpoints that rows name. Audit log and quota counts are exact.
` + "`make test`" + ` also runs the rows in **bold** and the tests that are named, with real parts or with the fake
VMM, except ` + "`TestPoolFaults`, `TestPoolLazy`" + ` and a part of ` + "`TestHardTimes`" + `. ` + "`make faults`" + ` runs those.
` + "`TestPoolFaults`" + ` causes a fault for two runners on separate hosts, with a store: work that one loses
continues on the other.

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
