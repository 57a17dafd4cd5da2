package arrakis_test

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/coppice-dev/coppice/controller/compat/arrakis"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// ran is the answer to a command.
type ran struct {
	Output, Error string
	ExitCode      int
}

// The trace of py-arrakis' cookbook, on its three wire lines.
func TestThreeLines(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for line, c := range map[string]struct{ prefix, blocking string }{"1.1.2": {"", ""}, "1.2.2": {"", `,"blocking":true`}, "2.0.0": {"/v1", `,"blocking":true`}} {
		do := func(method, path, body string, into any) {
			t.Helper()
			w.do(ask{method: method, path: c.prefix + path, body: body}).want(t, http.StatusOK, into)
		}
		id := "initial-state-" + line
		var none struct{ VMs []machine }
		do("GET", "/vms", "", &none)
		if len(none.VMs) != 0 || none.VMs == nil {
			t.Errorf("%s: %v: clients iterate over the list", line, none)
		}
		do("DELETE", "/vms", "", nil)
		var vm machine
		do("POST", "/vms", `{"vmName":"snapshot-example"}`, &vm)
		if vm.VMName != "snapshot-example" || vm.Status != "RUNNING" || !strings.HasSuffix(vm.IP, "/32") {
			t.Errorf("%s: %+v", line, vm)
		}
		run := func(cmd string) (out ran) {
			t.Helper()
			do("POST", "/vms/snapshot-example/cmd", `{"cmd":"`+cmd+`"`+c.blocking+`}`, &out)
			return out
		}
		if out := run("echo hello"); out.Output != "hello\n" || out.Error != "" {
			t.Errorf("%s: %+v", line, out)
		}
		if out := run("exit 3"); out.Output != "" || out.Error != "exit status 3" || out.ExitCode != 3 {
			t.Errorf("%s: %+v", line, out)
		}
		do("POST", "/vms/snapshot-example/files", `{"files":[{"path":"testfile","content":"before\n"}]}`, nil)
		var snap struct{ SnapshotID string }
		do("POST", "/vms/snapshot-example/snapshots", `{"snapshotId":"`+id+`"}`, &snap)
		if snap.SnapshotID != id {
			t.Errorf("%s: %+v", line, snap)
		}
		do("POST", "/vms/snapshot-example/files", `{"files":[{"path":"testfile","content":"after\n"}]}`, nil)
		do("DELETE", "/vms/snapshot-example", "", nil)
		do("POST", "/vms", `{"vmName":"snapshot-example","snapshotId":"`+id+`"}`, nil)
		if out := run("cat /tmp/server_files/testfile"); out.Output != "before\n" {
			t.Errorf("%s: %+v", line, out)
		}
		var all struct{ VMs []machine }
		do("GET", "/vms", "", &all)
		if len(all.VMs) != 1 || all.VMs[0].VMName != "snapshot-example" {
			t.Errorf("%s: %+v", line, all)
		}
		do("DELETE", "/vms", "", nil)
		w.do(ask{method: "GET", path: c.prefix + "/vms/snapshot-example"}).want(t, http.StatusNotFound, nil)
		var health struct{ Status string }
		do("GET", "/health", "", &health)
		if health.Status != "healthy" {
			t.Errorf("%s: %+v", line, health)
		}
	}
}

// A snapshot is restored while its VM runs, many times and deeper than once, which Arrakis cannot do.
func TestRestoreWhileTheOriginalRuns(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	original := w.start("original", "")
	w.write("original", "one")
	w.snapshot("original", "first")
	w.write("original", "two")

	other := w.start("other", "first")
	if other.WorkspaceID == original.WorkspaceID || w.read("other") != "one" || w.read("original") != "two" {
		t.Errorf("%+v beside %+v", other, original)
	}
	w.write("other", "three")
	w.snapshot("other", "second")
	w.start("third", "second")
	if got := w.read("third"); got != "three" {
		t.Errorf("the snapshot of a restored VM has %q", got)
	}

	// Under its own name, a VM goes back in place.
	again := w.start("original", "first")
	if again.WorkspaceID != original.WorkspaceID || w.read("original") != "one" {
		t.Errorf("%+v is not %+v, set back", again, original)
	}
	w.patch("original", "stopped").want(t, http.StatusOK, nil)
	if again := w.start("original", "first"); again.Status != "RUNNING" {
		t.Errorf("restored when stopped: %+v", again)
	}

	// A snapshot of another VM never replaces a VM.
	r := w.do(ask{method: "POST", path: "/vms", body: `{"vmName":"original","snapshotId":"second"}`}).want(t, http.StatusConflict, nil)
	if !strings.Contains(r.message(), "exists already") || w.info("original").Status != "RUNNING" || w.read("original") != "one" {
		t.Errorf("%s", r.message())
	}
	w.do(ask{method: "POST", path: "/vms", body: `{"vmName":"x","snapshotId":"absent"}`}).want(t, http.StatusNotFound, nil)

	// A checkpoint that Coppice's own clients took of a VM is one of its own, too.
	if _, err := w.rest.CreateCheckpoint(t.Context(), original.WorkspaceID, coppice.CreateCheckpointRequest{Name: "native"}); err != nil {
		t.Fatal(err)
	}
	w.write("original", "later")
	if again := w.start("original", "native"); again.WorkspaceID != original.WorkspaceID || w.read("original") != "one" {
		t.Errorf("%+v", again)
	}
}

// Clients that start one name at the same time get one VM, and a snapshot is restored many times at once.
func TestAtTheSameTime(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	together := func(n int, body func(i int) string) (statuses map[int]int) {
		replies := make([]reply, n)
		var group sync.WaitGroup
		for i := range n {
			group.Go(func() { replies[i] = w.do(ask{method: "POST", path: "/vms", body: body(i)}) })
		}
		group.Wait()
		statuses = map[int]int{}
		for _, r := range replies {
			statuses[r.Status]++
		}
		return statuses
	}
	if got := together(6, func(int) string { return `{"vmName":"one"}` }); got[http.StatusOK] != 1 || got[http.StatusConflict] != 5 {
		t.Errorf("one name: %v", got)
	}
	w.write("one", "of the snapshot")
	w.snapshot("one", "s")
	if got := together(6, func(i int) string { return fmt.Sprintf(`{"vmName":"copy-%d","snapshotId":"s"}`, i) }); got[http.StatusOK] != 6 {
		t.Errorf("six names: %v", got)
	}
	for i := range 6 {
		if got := w.read(fmt.Sprintf("copy-%d", i)); got != "of the snapshot" {
			t.Errorf("copy %d has %q", i, got)
		}
	}
	w.do(ask{method: "DELETE", path: "/vms"}).want(t, http.StatusOK, nil)
	var all struct{ VMs []machine }
	if w.do(ask{method: "GET", path: "/vms"}).want(t, http.StatusOK, &all); len(all.VMs) != 0 {
		t.Errorf("%+v", all)
	}
}

func TestPauseStopStart(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	vm := w.start("vm", "")
	w.write("vm", "kept")
	for _, c := range []struct{ status, want string }{{"paused", "PAUSED"}, {"paused", "PAUSED"}, {"stopped", "STOPPED"}, {"resume", "RUNNING"}, {"resume", "RUNNING"}, {"stopped", "STOPPED"}} {
		w.patch("vm", c.status).want(t, http.StatusOK, nil)
		if got := w.info("vm"); got.Status != c.want || got.WorkspaceID != vm.WorkspaceID {
			t.Fatalf("%s: %+v", c.status, got)
		}
	}
	r := w.do(ask{method: "POST", path: "/vms/vm/cmd", body: `{"cmd":"true"}`}).want(t, http.StatusConflict, nil)
	if !strings.Contains(r.message(), "STOPPED") {
		t.Error(r.message())
	}
	w.do(ask{method: "POST", path: "/vms/vm/snapshots", body: `{"snapshotId":"s"}`}).want(t, http.StatusConflict, nil)
	if got := w.start("vm", ""); got.WorkspaceID != vm.WorkspaceID || got.Status != "RUNNING" || w.read("vm") != "kept" {
		t.Errorf("started again: %+v", got)
	}
	w.patch("vm", "paused").want(t, http.StatusOK, nil)
	w.do(ask{method: "POST", path: "/vms", body: `{"vmName":"vm"}`}).want(t, http.StatusConflict, nil)
	w.patch("vm", "deleted").want(t, http.StatusBadRequest, nil)
	w.patch("absent", "paused").want(t, http.StatusNotFound, nil)
	w.do(ask{method: "DELETE", path: "/vms/vm"}).want(t, http.StatusOK, nil)
	w.do(ask{method: "DELETE", path: "/vms/vm"}).want(t, http.StatusNotFound, nil)
}

// Names and ids are those that clients choose, and each is used once.
func TestNames(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	names := []string{"my-vm", "My_VM.2", "with space", "über", strings.Repeat("x", 128), "snapshots", "arrakis--abc", "-", "a,b"}
	seen := map[string]bool{}
	for _, name := range names {
		vm := w.start(name, "")
		if vm.VMName != name || seen[vm.WorkspaceID] {
			t.Errorf("%q: %+v", name, vm)
		}
		seen[vm.WorkspaceID] = true
		w.do(ask{method: "POST", path: "/vms/" + url.PathEscape(name) + "/snapshots", body: `{"snapshotId":"of ` + name + `"}`}).want(t, http.StatusOK, nil)
		w.do(ask{method: "POST", path: "/vms/" + url.PathEscape(name) + "/snapshots", body: `{"snapshotId":"of ` + name + `"}`}).want(t, http.StatusConflict, nil)
		w.do(ask{method: "POST", path: "/vms", body: `{"vmName":"` + name + `"}`}).want(t, http.StatusConflict, nil)
		w.do(ask{method: "DELETE", path: "/vms/" + url.PathEscape(name)}).want(t, http.StatusOK, nil)
		if vm := w.start(name, "of "+name); vm.VMName != name {
			t.Errorf("%q: %+v", name, vm)
		}
	}
	var all struct{ VMs []machine }
	w.do(ask{method: "GET", path: "/vms"}).want(t, http.StatusOK, &all)
	if len(all.VMs) != len(names) {
		t.Errorf("%d VMs", len(all.VMs))
	}
	var snap struct{ SnapshotID string }
	w.do(ask{method: "POST", path: "/vms/my-vm/snapshots", body: `{"snapshotId":""}`}).want(t, http.StatusOK, &snap)
	if !strings.HasPrefix(snap.SnapshotID, "snapshot-my-vm-2") {
		t.Errorf("%+v", snap)
	}
	for _, bad := range []string{"", "../x", ".", "..", "a/b", `a\\b`, "a?b", "a#b", "a%2fb", " a", `a\u0000`, `a\n`, strings.Repeat("x", 300)} {
		w.do(ask{method: "POST", path: "/vms", body: `{"vmName":"` + bad + `"}`}).want(t, http.StatusBadRequest, nil)
		if bad != "" {
			w.do(ask{method: "POST", path: "/vms/my-vm/snapshots", body: `{"snapshotId":"` + bad + `"}`}).want(t, http.StatusBadRequest, nil)
		}
	}
}

// The layer neither shows nor destroys what other clients made, and does not take their names.
func TestOtherWorkspacesStay(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	own, err := w.rest.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{Name: "own"})
	if err != nil {
		t.Fatal(err)
	}
	w.start("vm", "")
	w.do(ask{method: "GET", path: "/vms/own"}).want(t, http.StatusNotFound, nil)
	w.do(ask{method: "POST", path: "/vms", body: `{"vmName":"own"}`}).want(t, http.StatusConflict, nil)
	w.do(ask{method: "DELETE", path: "/vms"}).want(t, http.StatusOK, nil)
	if ws, err := w.rest.Workspace(t.Context(), own.ID); err != nil || ws.State != coppice.WorkspaceReady {
		t.Errorf("%s, %v", ws.State, err)
	}
	// A checkpoint of Coppice's own can be restored by its name, with a key.
	if _, err := w.rest.CreateCheckpoint(t.Context(), own.ID, coppice.CreateCheckpointRequest{Name: "before"}); err != nil {
		t.Fatal(err)
	}
	restore := ask{method: "POST", path: "/vms", body: `{"vmName":"vm","snapshotId":"before"}`}
	w.do(restore).want(t, http.StatusNotFound, nil)
	restore.header = map[string]string{"Authorization": "Bearer " + firstKey}
	w.do(restore).want(t, http.StatusOK, nil)
}

// A VM whose machine has ended is not replaced silently.
func TestLostVM(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	vm := w.start("vm", "")
	w.snapshot("vm", "s")
	w.lose(vm.WorkspaceID)
	if got := w.info("vm"); got.Status != "LOST" {
		t.Errorf("%+v", got)
	}
	for _, a := range []ask{
		{method: "POST", path: "/vms", body: `{"vmName":"vm"}`}, {method: "POST", path: "/vms/vm/cmd", body: `{"cmd":"true"}`}, {method: "PATCH", path: "/vms/vm", body: `{"status":"resume"}`},
	} {
		if r := w.do(a).want(t, http.StatusConflict, nil); !strings.Contains(r.message(), "lost") {
			t.Errorf("%s %s: %s", a.method, a.path, r.message())
		}
	}
	if got := w.start("vm", "s"); got.Status != "RUNNING" || got.WorkspaceID == vm.WorkspaceID {
		t.Errorf("%+v", got)
	}
	var all struct{ VMs []machine }
	w.do(ask{method: "GET", path: "/vms"}).want(t, http.StatusOK, &all)
	if len(all.VMs) != 1 || all.VMs[0].Status != "RUNNING" {
		t.Errorf("%+v", all)
	}
	w.do(ask{method: "DELETE", path: "/vms/vm"}).want(t, http.StatusOK, nil)
	w.do(ask{method: "GET", path: "/vms/vm"}).want(t, http.StatusNotFound, nil)
}

// The operator chooses what VMs reach, and what they are made of.
func TestOperatorsChoices(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	open := w.layer(arrakis.Config{Key: firstKey, OpenEgress: true})
	var vm machine
	egress := func() coppice.EgressPolicy {
		ws, err := w.rest.Workspace(t.Context(), vm.WorkspaceID)
		if err != nil {
			t.Fatal(err)
		}
		return ws.Network.EgressPolicy
	}
	vm = w.start("closed", "")
	if got := egress(); got != coppice.EgressDenyAll {
		t.Errorf("closed: %s", got)
	}
	w.do(ask{method: "POST", path: "/vms", body: `{"vmName":"open"}`, at: open}).want(t, http.StatusOK, &vm)
	if got := egress(); got != coppice.EgressAllowAll {
		t.Errorf("open: %s", got)
	}
	w.snapshot("open", "s")
	w.do(ask{method: "POST", path: "/vms", body: `{"vmName":"open-2","snapshotId":"s"}`, at: open}).want(t, http.StatusOK, &vm)
	if got := egress(); got != coppice.EgressAllowAll {
		t.Errorf("restored, open: %s", got)
	}
	vm = w.start("closed-2", "s")
	if got := egress(); got != coppice.EgressDenyAll {
		t.Errorf("restored, closed: %s", got)
	}
	for _, field := range []string{"kernel", "rootfs", "initramfs"} {
		r := w.do(ask{method: "POST", path: "/vms", body: `{"vmName":"vm","` + field + `":"/dev/sda1"}`}).want(t, http.StatusNotImplemented, nil)
		if !strings.Contains(r.message(), field) {
			t.Error(r.message())
		}
	}
	// The Go client of Arrakis sends all fields.
	w.do(ask{method: "POST", path: "/vms", body: `{"vmName":"vm","kernel":"","rootfs":"","initramfs":"","snapshotId":"","entryPoint":"/bin/x","more":1}`}).want(t, http.StatusOK, nil)
}

func TestPortForwards(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	vm := w.start("vm", "")
	if len(vm.PortForwards) != 1 || vm.PortForwards[0].GuestPort != "5901" || vm.PortForwards[0].Description != "gui" || vm.PortForwards[0].HostPort == "" {
		t.Errorf("%+v", vm)
	}
	w.patch("vm", "stopped").want(t, http.StatusOK, nil)
	if got := w.info("vm"); len(got.PortForwards) != 0 {
		t.Errorf("a stopped VM listens: %+v", got)
	}
	again := w.start("vm", "")
	if len(again.PortForwards) != 1 {
		t.Errorf("%+v", again)
	}
	if _, err := w.rest.CreatePort(t.Context(), vm.WorkspaceID, coppice.CreatePortRequest{GuestPort: 8000}); err != nil {
		t.Fatal(err)
	}
	if got := w.info("vm"); len(got.PortForwards) != 2 {
		t.Errorf("%+v", got)
	}
}

func TestParsePorts(t *testing.T) {
	t.Parallel()
	got, err := arrakis.ParsePorts("5901=gui,5736-5738=code, 8000")
	if err != nil || len(got) != 5 || got[0] != (arrakis.Port{Guest: 5901, Description: "gui"}) || got[3] != (arrakis.Port{Guest: 5738, Description: "code"}) || got[4].Guest != 8000 {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"x", "0", "65536", "9-8", "1,1", "1-3,2", "1-33", "-1", "1-", "=gui"} {
		if got, err := arrakis.ParsePorts(bad); err == nil {
			t.Errorf("%q: %v", bad, got)
		}
	}
}
