package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/testleak"
	"github.com/coppice-dev/coppice/internal/testvm"
)

func TestMain(m *testing.M) { testleak.Main(m) }

// The driver's tests and the conformance suite look at the calls that succeed, and at every fault. The tests here look at what the
// fake refuses, because a fake that takes everything finds nothing.

const (
	mib      = 1 << 20
	ramBytes = 4 * mib
	patience = 2 * time.Minute
)

// process is a fake that runs.
type process struct {
	t      *testing.T
	cmd    *exec.Cmd
	dir    string // short
	client *http.Client
}

func start(t *testing.T, program string) *process {
	t.Helper()
	dir, err := os.MkdirTemp("", "fch") //nolint:usetesting // t.TempDir is too long for the path of a unix socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	p := &process{t: t, dir: dir}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: p.path("api"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	listener.SetUnlinkOnClose(false)
	socket, err := listener.File()
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	events, err := os.Create(p.path("events"))
	if err != nil {
		t.Fatal(err)
	}
	defer events.Close()
	var said bytes.Buffer
	p.cmd = exec.CommandContext(t.Context(), program, "--api-socket", "fd=3", "--event-monitor", "fd=4", "--seccomp", "true")
	p.cmd.ExtraFiles, p.cmd.Stderr, p.cmd.Env = []*os.File{socket, events}, &said, []string{"PATH=/usr/bin:/bin"}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var d net.Dialer
	p.client = &http.Client{
		Timeout: patience,
		Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return d.DialContext(ctx, "unix", p.path("api"))
		}},
	}
	t.Cleanup(func() {
		p.client.CloseIdleConnections()
		_ = p.cmd.Process.Kill() // it may have ended
		_ = p.cmd.Wait()
		if said.Len() > 0 {
			t.Errorf("the fake says:\n%s", &said)
		}
	})
	return p
}

func (p *process) path(name string) string { return filepath.Join(p.dir, name) }

// call makes a request; body is JSON, or anything that is encoded.
func (p *process) call(method, name string, body any) (int, string) {
	p.t.Helper()
	var r io.Reader
	switch b := body.(type) {
	case nil:
	case string:
		r = strings.NewReader(b)
	default:
		r = bytes.NewReader(encode(b))
	}
	req, err := http.NewRequestWithContext(p.t.Context(), method, "http://localhost/api/v1/"+name, r)
	if err != nil {
		p.t.Fatal(err)
	}
	resp, err := p.client.Do(req)
	if err != nil {
		p.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		p.t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// refuses wants a call to fail with a status and these words at the end.
func (p *process) refuses(code int, method, name string, body any, words ...string) {
	p.t.Helper()
	got, b := p.call(method, name, body)
	var said []string
	if err := json.Unmarshal([]byte(b), &said); err != nil || got != code || len(said) < len(words) || !slices.Equal(said[len(said)-len(words):], words) {
		p.t.Errorf("%s %s %v: got %d %s, want %d and %q", method, name, body, got, b, code, words)
	}
}

func (p *process) ok(name string, body any) {
	p.t.Helper()
	if code, b := p.call(http.MethodPut, name, body); code != 204 {
		p.t.Fatalf("%s: got %d %s", name, code, b)
	}
}

func (p *process) wantState(want string) {
	p.t.Helper()
	if code, b := p.call(http.MethodGet, "vm.info", nil); code != 200 || !strings.Contains(b, `"state":"`+want+`"`) {
		p.t.Errorf("vm.info: got %d %s, want the state %s", code, b, want)
	}
}

// wantEvents looks at the events so far.
func (p *process) wantEvents(want ...string) {
	p.t.Helper()
	f, err := os.Open(p.path("events"))
	if err != nil {
		p.t.Fatal(err)
	}
	defer f.Close()
	var got []string
	for dec := json.NewDecoder(f); ; {
		var e event
		err := dec.Decode(&e)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			p.t.Fatal(err)
		}
		got = append(got, e.Source+" "+e.Event)
	}
	if !slices.Equal(got, want) {
		p.t.Errorf("the events are %q, want %q", got, want)
	}
}

// file makes a file of a size with something at its beginning.
func (p *process) file(name string, size int64, content string) string {
	p.t.Helper()
	if err := errors.Join(os.WriteFile(p.path(name), []byte(content), 0o600), os.Truncate(p.path(name), size)); err != nil {
		p.t.Fatal(err)
	}
	return p.path(name)
}

// config describes a VM on a base.
func (p *process) config() vmConfig {
	return vmConfig{
		CPUs:    cpusConfig{Boot: 1, Max: 1},
		Memory:  memoryConfig{Zones: []zoneConfig{{ID: "mem0", Size: ramBytes, File: p.file("base", ramBytes, "")}}},
		Payload: &payloadConfig{Kernel: p.file("kernel", 4096, "\x7fELF"), CommandLine: "console=ttyS0"},
		Disks:   []diskConfig{{ID: "root", Path: p.file("disk", mib, ""), ImageType: "Raw", NumQueues: 1, QueueSize: 128}},
		Vsock:   &vsockConfig{ID: "vsock0", CID: 3, Socket: p.path("vsock")},
		Serial:  consoleConfig{Mode: "Socket", Socket: p.path("serial")},
		Console: consoleConfig{Mode: "Off"},
	}
}

// booted is a fake with a VM that runs.
func booted(t *testing.T, program string) *process {
	t.Helper()
	p := start(t, program)
	p.ok("vm.create", p.config())
	p.ok("vm.boot", nil)
	return p
}

// dial connects to a port of the guest.
func (p *process) dial(port string) (net.Conn, *bufio.Reader) {
	p.t.Helper()
	var d net.Dialer
	conn, err := d.DialContext(p.t.Context(), "unix", p.path("vsock"))
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		p.t.Fatal(err)
	}
	if _, err := fmt.Fprintf(conn, "CONNECT %s\n", port); err != nil {
		p.t.Fatal(err)
	}
	return conn, bufio.NewReader(conn)
}

func (p *process) ask(request string) string {
	p.t.Helper()
	conn, lines := p.dial("1024")
	defer conn.Close()
	if ok, err := lines.ReadString('\n'); err != nil || !strings.HasPrefix(ok, "OK 10737418") {
		p.t.Fatalf("CONNECT: got %q, %v", ok, err)
	}
	if _, err := fmt.Fprintln(conn, request); err != nil {
		p.t.Fatal(err)
	}
	answer, err := lines.ReadString('\n')
	if err != nil {
		p.t.Fatal(err)
	}
	return strings.TrimSpace(answer)
}

// TestStates makes calls that do not fit the state. The words are those of cloud-hypervisor v53.0.
func TestStates(t *testing.T) {
	t.Parallel()
	p := start(t, testvm.BuildFakeCloudHypervisor(t).Path)
	p.refuses(400, "PUT", "vmm.ping", nil, "Bad Request")
	p.refuses(404, "GET", "vm.nothing", nil, "Not Found")
	p.refuses(400, "PUT", "vm.pause", "{}", "Bad Request")
	p.refuses(400, "PUT", "vm.create", nil, "Bad Request")
	p.refuses(404, "PUT", "vm.boot", nil, "Error from API", "The VM could not boot", "VM config is missing")
	p.refuses(404, "GET", "vm.info", nil, "Error from API", "The VM info is not available", "VM is not created")
	p.refuses(500, "PUT", "vm.pause", nil, "The VM could not be paused", "VM is not running")
	p.refuses(500, "PUT", "vm.resume", nil, "The VM could not resume", "VM is not running")
	p.refuses(400, "PUT", "vm.create", `{"cpus"`, "Failed to deserialize JSON", "unexpected EOF")
	p.refuses(400, "PUT", "vm.create", `{"cpu": {}}`, "Failed to deserialize JSON", `fakech: it does not know the field "cpu"`)
	if code, b := p.call("PUT", "vm.create", strings.Repeat(" ", maxPayload+1)); code != 400 || !strings.Contains(b, "larger than the limit") {
		t.Errorf("a long request: got %d %s", code, b)
	}
	c := p.config()
	p.ok("vm.create", c)
	p.refuses(500, "PUT", "vm.create", c, "VM is already created")
	p.wantState("Created")
	p.ok("vm.boot", nil)
	p.refuses(500, "PUT", "vm.boot", nil, "VM is already created")
	p.refuses(500, "PUT", "vm.resume", nil, "Cannot resume VM", "Failed to resume migratable component", "Invalid transition: InvalidStateTransition(Running, Running)")
	to := map[string]string{"destination_url": "file://" + p.dir}
	p.refuses(500, "PUT", "vm.snapshot", to, "Cannot snapshot VM", "Failed to snapshot migratable component", "Trying to snapshot while VM is running")
	p.refuses(500, "PUT", "vm.restore", map[string]string{"source_url": "file:///"}, "VM is already created")
	p.ok("vm.pause", nil)
	p.wantState("Paused")
	p.refuses(500, "PUT", "vm.pause", nil, "Cannot pause VM", "Failed to pause migratable component", "Invalid transition: InvalidStateTransition(Paused, Paused)")
	p.refuses(500, "PUT", "vm.resize-disk", map[string]any{"id": "none", "desired_size": mib}, "Failed to find device corresponding to the given identifier: none")
	p.refuses(500, "PUT", "vm.resize-disk", map[string]any{"id": "root", "desired_size": mib + 1}, "Disk image size is not a multiple of 512")
	p.ok("vm.resume", nil)
	p.wantEvents("vmm starting", "vm booting", "vm booting", "vm booted", "vm resuming", "vm snapshotting", "vm pausing", "vm paused", "vm pausing", "vm resuming", "vm resumed")
}

// TestBootFails has VMs that cannot be made.
func TestBootFails(t *testing.T) {
	t.Parallel()
	program := testvm.BuildFakeCloudHypervisor(t).Path
	const invalid = "Failed to validate config"
	for name, c := range map[string]struct {
		change func(c *vmConfig)
		words  []string
	}{
		"no base":                {func(c *vmConfig) { c.Memory.Zones[0].File = "/nowhere" }, []string{"Memory manager error", "Failed to stat filesystem", "No such file or directory (os error 2)"}},
		"no kernel":              {func(c *vmConfig) { c.Payload.Kernel = "/nowhere" }, []string{"Cannot open kernel file", "No such file or directory (os error 2)"}},
		"no kernel but a file":   {func(c *vmConfig) { c.Payload.Kernel = c.Disks[0].Path }, []string{"Kernel Loader: Invalid bzImage"}},
		"no payload":             {func(c *vmConfig) { c.Payload = nil }, []string{"No bootitem provided: neither firmware nor kernel"}},
		"a special CID":          {func(c *vmConfig) { c.Vsock.CID = 2 }, []string{invalid, "2 is a special VSOCK CID"}},
		"a vsock that is there":  {func(c *vmConfig) { c.Vsock.Socket = c.Disks[0].Path }, []string{"Error binding to the host-side Unix socket", "Address already in use (os error 98)"}},
		"no disk":                {func(c *vmConfig) { c.Disks[0].Path = "/nowhere" }, []string{"I/O error (path=/nowhere op=open)", "No such file or directory (os error 2)"}},
		"an id twice":            {func(c *vmConfig) { c.Vsock.ID = "root" }, []string{invalid, "Identifier root is not unique"}},
		"too many queues":        {func(c *vmConfig) { c.Disks[0].NumQueues = 2 }, []string{invalid, "Queue count (2) must not exceed boot vCPUs (1)"}},
		"an odd size of a queue": {func(c *vmConfig) { c.Disks[0].QueueSize = 100 }, []string{invalid, "Queue size must be a power of 2 no greater than 32768: 100"}},
		"a guessed type":         {func(c *vmConfig) { c.Disks[0].ImageType = "" }, []string{invalid, `fakech: it has disks of the type Raw only, not ""`}},
		"shared memory":          {func(c *vmConfig) { c.Memory.Zones[0].Shared = true }, []string{invalid, "fakech: its zone has a file, which it maps privately"}},
		"a rule of nothing":      {func(c *vmConfig) { c.LandlockRules = []landlockConfig{{"/nowhere", "r"}} }, []string{invalid, `Path "/nowhere" provided in landlock-rules does not exist`}},
	} {
		t.Log(name)
		p := start(t, program)
		config := p.config()
		c.change(&config)
		p.ok("vm.create", config)
		p.refuses(500, "PUT", "vm.boot", nil, c.words...)
		p.wantState("Created")
	}
	// A disk that another VM writes is locked, and the VM that could not lock it is there, good for nothing.
	one, two := booted(t, program), start(t, program)
	config := two.config()
	config.Disks[0].Path = one.path("disk")
	two.ok("vm.create", config)
	two.refuses(500, "PUT", "vm.boot", nil, "Failed to get Write lock for disk image: "+one.path("disk"), "The file is already locked")
	two.refuses(500, "PUT", "vm.boot", nil, "VM is already created")
}

func TestVsock(t *testing.T) {
	t.Parallel()
	p := booted(t, testvm.BuildFakeCloudHypervisor(t).Path)
	for _, port := range []string{"1025", "x", "", strings.Repeat("1", 40)} {
		_, lines := p.dial(port)
		if b, err := io.ReadAll(lines); err != nil && !errors.Is(err, unix.ECONNRESET) || len(b) > 0 {
			t.Errorf("CONNECT %s: got %q, %v, want the end", port, b, err)
		}
	}
	p.ok("vm.pause", nil)
	conn, lines := p.dial("1024")
	if err := conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if b, err := lines.ReadString('\n'); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("CONNECT to a paused VM: got %q, %v", b, err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	p.ok("vm.resume", nil)
	if b, err := lines.ReadString('\n'); err != nil || !strings.HasPrefix(b, "OK ") {
		t.Errorf("CONNECT after the pause: got %q, %v", b, err)
	}
}

// saved is the directory of a snapshot of a VM that has counted to 1.
func saved(t *testing.T, program string) string {
	t.Helper()
	p := booted(t, program)
	if got := p.ask("inc"); got != "1" {
		t.Fatalf("the guest counts %s", got)
	}
	p.ok("vm.pause", nil)
	dir := p.path("snapshot")
	if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, "memory-ranges"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	to := map[string]string{"destination_url": "file://" + dir}
	p.refuses(500, "PUT", "vm.snapshot", to, "Error from API", "The VM could not be snapshotted", "Cannot send VM snapshot", "Failed to send migratable component snapshot",
		fmt.Sprintf("Error creating memory snapshot file %q", filepath.Join(dir, "memory-ranges")), "File exists (os error 17)")
	p.wantState("Paused")
	p.refuses(500, "PUT", "vm.snapshot", to, "Error creating VM config snapshot file", "File exists (os error 17)")
	p.ok("vm.resume", nil)
	if got := p.ask("inc"); got != "2" {
		t.Errorf("the guest counts %s after its snapshots", got)
	}
	return dir
}

// from makes a directory to restore from: a configuration, an edited state, and a hole in the place of RAM.
func (p *process) from(snapshot string, config vmConfig, edit func(string) string) map[string]string {
	p.t.Helper()
	state, err := os.ReadFile(filepath.Join(snapshot, "state.json"))
	if err != nil {
		p.t.Fatal(err)
	}
	state = []byte(edit(string(state)))
	p.file("config.json", int64(len(encode(config))), string(encode(config)))
	p.file("state.json", int64(len(state)), string(state))
	p.file("memory-ranges", ramBytes, "")
	return map[string]string{"source_url": "file://" + p.dir}
}

// TestRestore restores without reading RAM. RAM that comes after that leaves the guest without its channel.
func TestRestore(t *testing.T) {
	t.Parallel()
	program := testvm.BuildFakeCloudHypervisor(t).Path
	snapshot := saved(t, program)
	same := func(s string) string { return s }
	p := start(t, program)
	p.ok("vm.restore", p.from(snapshot, p.config(), same))
	p.wantState("Paused")
	p.ok("vm.resume", nil)
	if got := p.ask("count"); got != "0" {
		t.Errorf("the guest counts %s without the RAM of the snapshot", got)
	}
	p.wantEvents("vmm starting", "vm restoring", "vm restored", "vm resuming", "vm resumed")

	late := start(t, program)
	late.ok("vm.restore", late.from(snapshot, late.config(), same))
	ram, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", late.cmd.Process.Pid), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer ram.Close()
	if _, err := ram.WriteAt([]byte("late"), late.mapped("base")); err != nil {
		t.Fatal(err)
	}
	late.ok("vm.resume", nil)
	if conn, err := net.Dial("unix", late.path("vsock")); err == nil {
		t.Error("a guest whose memory came after the restore has its channel", conn.Close())
	}
}

// mapped is where the process maps a file.
func (p *process) mapped(name string) int64 {
	p.t.Helper()
	list, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", p.cmd.Process.Pid))
	if err != nil {
		p.t.Fatal(err)
	}
	for l := range strings.Lines(string(list)) {
		var low int64
		if _, err := fmt.Sscanf(l, "%x-", &low); err == nil && strings.HasSuffix(strings.TrimSpace(l), p.path(name)) {
			return low
		}
	}
	p.t.Fatalf("%s is not mapped:\n%s", name, list)
	return 0
}

// TestNotRestored has snapshots that were changed, or are for other VMs.
func TestNotRestored(t *testing.T) {
	t.Parallel()
	program := testvm.BuildFakeCloudHypervisor(t).Path
	snapshot := saved(t, program)
	swap := func(old, now string) func(string) string {
		return func(s string) string {
			if !strings.Contains(s, old) {
				t.Errorf("there is no %s in %s", old, s)
			}
			return strings.Replace(s, old, now, 1)
		}
	}
	const changed = "fakech: state.json is not what was saved: more differs than may be changed"
	for name, c := range map[string]struct {
		edit   func(string) string
		change func(*vmConfig)
		words  string
	}{
		"a number that lost digits": {edit: swap("18446744073709551615", "18446744073709552000"), words: changed},
		"one of a vCPU":             {edit: swap("18446744071579503391", "18446744071579500544"), words: changed},
		"another number":            {edit: swap(`\"next_memory_slot\":1`, `\"next_memory_slot\":2`), words: changed},
		"a device less":             {edit: swap(`"__ioapic":{`, `"__iopaic":{`), words: changed},
		"cut off":                   {edit: func(s string) string { return s[:len(s)/2] }, words: "unexpected end of JSON input"},
		"another device":            {change: func(c *vmConfig) { c.Disks[0].ID = "other" }, words: `fakech: the devices are ["other" "vsock0"], and were ["root" "vsock0"]`},
		"another zone":              {change: func(c *vmConfig) { c.Memory.Zones[0].ID = "mem1" }, words: "No memory region found"},
		"less RAM":                  {change: func(c *vmConfig) { c.Memory.Zones[0].Size /= 2 }, words: "fakech: RAM has another size than in the snapshot"},
		"a tap that is not given": {change: func(c *vmConfig) {
			c.Net = []netConfig{{ID: "net0", FDs: []int{-1}, NumQueues: 2, QueueSize: 256}}
		}, words: "Net id net0 is associated with FDs and is required"},
	} {
		p := start(t, program)
		config := p.config()
		if c.change != nil {
			c.change(&config)
		}
		if c.edit == nil {
			c.edit = func(s string) string { return s }
		}
		t.Log(name)
		p.refuses(500, "PUT", "vm.restore", p.from(snapshot, config, c.edit), c.words)
		p.refuses(404, "GET", "vm.info", nil, "VM is not created")
	}
}
