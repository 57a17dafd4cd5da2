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

	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/testvm"
)

func TestMain(m *testing.M) { testleak.Main(m) }

const (
	mib = 1 << 20
	// kernelHead is all that the fake looks at in a kernel.
	kernelHead = "\x7fELF"
	ramBytes   = 4 * mib
	patience   = time.Minute
)

// process is a fake that runs.
type process struct {
	t      *testing.T
	cmd    *exec.Cmd
	dir    string // short
	events string // path
	client *http.Client
	ended  chan struct{}
	errs   bytes.Buffer
}

func start(t *testing.T, program string) *process {
	t.Helper()
	dir, err := os.MkdirTemp("", "fch") //nolint:usetesting // t.TempDir is too long for the path of a unix socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	p := &process{t: t, dir: dir, events: filepath.Join(dir, "events"), ended: make(chan struct{})}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "api"), Net: "unix"})
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
	p.cmd = exec.CommandContext(t.Context(), program, "--api-socket", "fd=3", "--event-monitor", "path="+p.events, "--seccomp", "true", "-v", "--log-file", filepath.Join(dir, "log"))
	p.cmd.ExtraFiles, p.cmd.Stderr, p.cmd.Env = []*os.File{socket}, &p.errs, []string{"PATH=/usr/bin:/bin"}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = p.cmd.Wait(); close(p.ended) }() // the state says how it ended
	var d net.Dialer
	p.client = &http.Client{
		Timeout: patience,
		Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return d.DialContext(ctx, "unix", filepath.Join(dir, "api"))
		}},
	}
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // it may have ended
		<-p.ended
		p.client.CloseIdleConnections()
		if strings.Contains(p.errs.String(), "DATA RACE") || strings.Contains(p.errs.String(), "panic") {
			t.Errorf("the fake says:\n%s", p.errs.String())
		}
	})
	return p
}

// call makes a request; body is JSON, or anything that is encoded.
func (p *process) call(method, name string, body any) (int, string, error) {
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
		return 0, "", err
	}
	resp, err := p.client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 8*mib))
	return resp.StatusCode, string(b), err
}

// want makes a request and compares the answer.
func (p *process) want(code int, answer, method, name string, body any) {
	p.t.Helper()
	got, b, err := p.call(method, name, body)
	if err != nil || got != code || answer != "*" && b != answer {
		p.t.Errorf("%s %s: got %d %s (%v), want %d %s", method, name, got, b, err, code, answer)
	}
}

func (p *process) ok(name string, body any) {
	p.t.Helper()
	if code, b, err := p.call(http.MethodPut, name, body); err != nil || code != 204 {
		p.t.Fatalf("%s: got %d %s, %v", name, code, b, err)
	}
}

func (p *process) state() string {
	p.t.Helper()
	code, b, err := p.call(http.MethodGet, "vm.info", nil)
	var info struct {
		State string `json:"state"`
	}
	if err = errors.Join(err, json.Unmarshal([]byte(b), &info)); err != nil || code != 200 {
		p.t.Fatalf("vm.info: got %d %s, %v", code, b, err)
	}
	return info.State
}

// seen are the events so far.
func (p *process) seen() []string {
	p.t.Helper()
	f, err := os.Open(p.events)
	if err != nil {
		p.t.Fatal(err)
	}
	defer f.Close()
	var out []string
	for dec := json.NewDecoder(f); ; {
		var e event
		err := dec.Decode(&e)
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			p.t.Fatal(err)
		}
		if e.Source != "virtio-device" {
			out = append(out, e.Source+" "+e.Event)
		}
	}
}

func (p *process) exits(code int) {
	p.t.Helper()
	select {
	case <-p.ended:
	case <-time.After(patience):
		p.t.Fatal("it does not end")
	}
	if got := p.cmd.ProcessState.ExitCode(); got != code {
		p.t.Errorf("it ended with %s, want %d; it says %s", p.cmd.ProcessState, code, p.errs.String())
	}
}

func (p *process) path(name string) string { return filepath.Join(p.dir, name) }

// file makes a file of a size with something at its beginning.
func (p *process) file(name string, size int64, content string) string {
	p.t.Helper()
	path := p.path(name)
	if err := errors.Join(os.WriteFile(path, []byte(content), 0o600), os.Truncate(path, size)); err != nil {
		p.t.Fatal(err)
	}
	return path
}

type object = map[string]any

// config describes a VM on a base.
func (p *process) config(base string) object {
	return object{
		"memory":  object{"size": 0, "zones": []object{{"id": "mem0", "size": ramBytes, "file": base, "shared": false}}},
		"payload": object{"kernel": p.file("kernel", 4096, kernelHead), "cmdline": "console=ttyS0"},
		"disks":   []object{{"id": "root", "path": p.file("disk", mib, ""), "image_type": "Raw"}},
		"vsock":   object{"id": "vsock0", "cid": 3, "socket": p.path("vsock")},
		"serial":  object{"mode": "File", "file": p.path("serial")},
		"console": object{"mode": "Off"},
	}
}

// booted is a fake with a VM that runs.
func booted(t *testing.T, program string) *process {
	t.Helper()
	p := start(t, program)
	p.ok("vm.create", p.config(p.file("base", ramBytes, "")))
	p.ok("vm.boot", nil)
	return p
}

// guest connects to a port of the guest.
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
	ok, err := lines.ReadString('\n')
	if err != nil || !strings.HasPrefix(ok, "OK 10737418") {
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

// order asks for what may keep the guest from answering.
func (p *process) order(request string) {
	p.t.Helper()
	conn, lines := p.dial("1024")
	defer conn.Close()
	if ok, err := lines.ReadString('\n'); err != nil {
		p.t.Fatalf("CONNECT: got %q, %v", ok, err)
	}
	if _, err := fmt.Fprintln(conn, request); err != nil {
		p.t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(lines, 3)) // "ok\n", or the end
}

func chainOf(words ...string) string { return string(encode(words)) }

// The words were taken from cloud-hypervisor v53.0 itself where no VM must run for them, and from its source elsewhere.
func TestWithoutVM(t *testing.T) {
	t.Parallel()
	p := start(t, testvm.BuildFakeCloudHypervisor(t).Path)
	url := func(path string) object { return object{"source_url": "file://" + path} }
	p.want(400, `["Bad Request"]`, "PUT", "vmm.ping", nil)
	p.want(404, `["Not Found"]`, "GET", "vm.nothing", nil)
	p.want(404, chainOf("Error from API", "The VM could not boot", "VM config is missing"), "PUT", "vm.boot", nil)
	p.want(404, chainOf("Error from API", "The VM info is not available", "VM is not created"), "GET", "vm.info", nil)
	p.want(500, chainOf("Error from API", "The VM could not be paused", "VM is not running"), "PUT", "vm.pause", nil)
	p.want(500, chainOf("Error from API", "The VM could not resume", "VM is not running"), "PUT", "vm.resume", nil)
	p.want(400, `["Bad Request"]`, "PUT", "vm.pause", "{}")
	p.want(400, `["Bad Request"]`, "GET", "vm.pause", nil)
	p.want(400, "", "PUT", "vm.create", nil)
	p.want(204, "", "PUT", "vm.delete", nil)
	p.want(500, chainOf("Error from API", "The VM could not shutdown", "VM is not running"), "PUT", "vm.shutdown", nil)
	for body, words := range map[string]string{
		`{`:                              "EOF while parsing an object at line 1 column 1",
		`nonsense`:                       "expected ident at line 1 column 2",
		`{"cpus": {"boot_vcpus": 1}}`:    "missing field `max_vcpus` at line 1 column 26",
		`{"memory": {"size": "x"}}`:      `invalid type: string "x", expected u64 at line 1 column 23`,
		`{"cpus": {"boot_vcpus": -1}}`:   "invalid value: integer `-1`, expected u32 at line 1 column 26",
		`{"memory": {"zones": [{"id":"m`: "EOF while parsing a string at line 1 column 30",
	} {
		p.want(400, chainOf("Failed to deserialize JSON", words), "PUT", "vm.create", body)
	}
	failed := func(words ...string) string {
		return chainOf(append([]string{"Error from API", "The VM could not be restored", "Cannot restore VM"}, words...)...)
	}
	const receive = "Failed to receive migratable component snapshot"
	p.want(500, failed("Failed to send migratable component snapshot", "Could not extract path from URL: /x"), "PUT", "vm.restore", object{"source_url": "/x"})
	p.want(500, failed("Failed to send migratable component snapshot", `Destination is not a directory: "/nowhere"`), "PUT", "vm.restore", url("/nowhere"))
	p.want(500, failed(receive, fmt.Sprintf("Error opening VM config snapshot file %q", p.path("config.json")), "No such file or directory (os error 2)"), "PUT", "vm.restore", url(p.dir))
	p.file("config.json", 5, `{"mem`)
	p.want(500, failed(receive, "Error deserialising VM config snapshot", "EOF while parsing a string at line 1 column 5"), "PUT", "vm.restore", url(p.dir))
	p.file("config.json", 2, `{}`)
	for state, words := range map[string][]string{
		"":                             {receive, "Error deserialising VM state snapshot", "EOF while parsing a value at line 1 column 0"},
		`{"snapshots":{},"snapshot_da`: {receive, "Error deserialising VM state snapshot", "EOF while parsing a string at line 1 column 28"},
		`this is no state`:             {receive, "Error deserialising VM state snapshot", "expected ident at line 1 column 2"},
		`{"snapshots":{}}`:             {"Failed to restore migratable component", "Could not find VM config snapshot section"},
		`{"snapshots":{},"snapshot_data":{"state":"{}"}}`: {"Failed to restore migratable component", "Error deserialising: missing field `common_cpuid` at line 1 column 2"},
	} {
		p.file("state.json", int64(len(state)), state)
		p.want(500, failed(words...), "PUT", "vm.restore", url(p.dir))
	}
	p.want(400, `["Bad Request"]`, "PUT", "vm.restore", object{"source_url": "file://" + p.dir, "net_fds": []object{{"id": "net0", "num_fds": 1}}})
	p.want(200, "", "PUT", "vmm.shutdown", nil)
	p.exits(0)
	if got, want := p.seen(), []string{"vmm starting", "vm booting", "vmm shutdown"}; !slices.Equal(got, want) {
		t.Errorf("the events are %q, want %q", got, want)
	}
}

func TestStates(t *testing.T) {
	t.Parallel()
	program := testvm.BuildFakeCloudHypervisor(t).Path
	p := start(t, program)
	c := p.config(p.file("base", ramBytes, ""))
	p.ok("vm.create", c)
	p.want(500, chainOf("Error from API", "The VM could not be created", "VM is already created"), "PUT", "vm.create", c)
	if got := p.state(); got != "Created" {
		t.Errorf("the state is %s", got)
	}
	p.ok("vm.boot", nil)
	p.want(500, chainOf("Error from API", "The VM could not boot", "VM is already created"), "PUT", "vm.boot", nil)
	p.want(500, chainOf("Error from API", "The VM could not resume", "Cannot resume VM", "Failed to resume migratable component", "Invalid transition: InvalidStateTransition(Running, Running)"), "PUT", "vm.resume", nil)
	p.want(500, chainOf("Error from API", "The VM could not be snapshotted", "Cannot snapshot VM", "Failed to snapshot migratable component", "Trying to snapshot while VM is running"), "PUT", "vm.snapshot", object{"destination_url": "file://" + p.dir})
	if got := p.ask("inc"); got != "1" {
		t.Errorf("the guest counts %s", got)
	}
	p.ok("vm.pause", nil)
	if got := p.state(); got != "Paused" {
		t.Errorf("the state is %s", got)
	}
	p.want(500, chainOf("Error from API", "The VM could not be paused", "Cannot pause VM", "Failed to pause migratable component", "Invalid transition: InvalidStateTransition(Paused, Paused)"), "PUT", "vm.pause", nil)
	p.ok("vm.resume", nil)
	p.ok("vm.shutdown", nil)
	if _, err := os.Stat(p.path("vsock")); err == nil {
		t.Error("the socket of the vsock is left")
	}
	p.ok("vm.delete", nil)
	if err := p.cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.exits(0)
	want := []string{
		"vmm starting", "vm booting", "vm booted", "vm resuming", "vm snapshotting", "vm pausing", "vm paused", "vm pausing",
		"vm resuming", "vm resumed", "vm shutdown", "vm deleted", "vmm shutdown",
	}
	if got := p.seen(); !slices.Equal(got, want) {
		t.Errorf("the events are %q, want %q", got, want)
	}
}

// TestBootFails has VMs that cannot be made: the words come from the source.
func TestBootFails(t *testing.T) {
	t.Parallel()
	program := testvm.BuildFakeCloudHypervisor(t).Path
	for name, c := range map[string]struct {
		change func(p *process, c object)
		words  []string
	}{
		"no base": {func(_ *process, c object) {
			c["memory"] = object{"size": 0, "zones": []object{{"id": "mem0", "size": ramBytes, "file": "/nowhere"}}}
		}, []string{"Memory manager error", "Failed to stat filesystem", "No such file or directory (os error 2)"}},
		"a directory for a base": {func(_ *process, c object) {
			c["memory"] = object{"size": 0, "zones": []object{{"id": "mem0", "size": ramBytes, "file": "/tmp"}}}
		}, []string{"Memory manager error", "Using a directory as a backing file for memory is not supported"}},
		"no zones": {func(_ *process, c object) { c["memory"] = object{"size": 0} }, []string{"Memory manager error", "No memory zones found"}},
		"no kernel": {func(_ *process, c object) { c["payload"] = object{"kernel": "/nowhere"} }, []string{
			"Cannot open kernel file", "No such file or directory (os error 2)",
		}},
		"no kernel but a file": {func(p *process, c object) { c["payload"] = object{"kernel": p.path("disk")} }, []string{
			"Cannot load the kernel into memory", "Kernel Loader: failed to load bzImage kernel image: Kernel Loader: Invalid bzImage", "Kernel Loader: Invalid bzImage",
		}},
		"no payload": {func(_ *process, c object) { delete(c, "payload") }, []string{
			"Failed to validate config", "Payload configuration is not bootable", "No bootitem provided: neither firmware nor kernel",
		}},
		"a special CID": {func(_ *process, c object) { c["vsock"] = object{"cid": 2, "socket": "/x"} }, []string{
			"Failed to validate config", "2 is a special VSOCK CID",
		}},
		"a vsock that is there": {func(p *process, _ object) { p.file("vsock", 0, "") }, []string{
			"Error from device manager", "Cannot create virtio-vsock backend", "Error binding to the host-side Unix socket", "Address already in use (os error 98)",
		}},
		"no disk": {func(_ *process, c object) { c["disks"] = []object{{"path": "/nowhere"}} }, []string{
			"Error from device manager", "Cannot open disk path", "I/O error (path=/nowhere op=open)", "No such file or directory (os error 2)",
		}},
		"a disk of another type": {func(p *process, c object) {
			c["disks"] = []object{{"path": p.path("disk"), "image_type": "Qcow2"}}
		}, []string{"Error from device manager", "Disk image type does not match expected type: specified = qcow2, detected = raw"}},
		"an id twice": {func(p *process, c object) {
			c["disks"] = []object{{"id": "a", "path": p.path("disk")}, {"id": "a", "path": p.path("disk")}}
		}, []string{"Failed to validate config", "Identifier a is not unique"}},
	} {
		p := start(t, program)
		config := p.config(p.file("base", ramBytes, ""))
		c.change(p, config)
		p.ok("vm.create", config)
		p.want(500, chainOf(append([]string{"Error from API", "The VM could not boot"}, c.words...)...), "PUT", "vm.boot", nil)
		if got := p.state(); got != "Created" {
			t.Errorf("%s: the state is %s", name, got)
		}
	}
	// A disk that another VM writes is locked, and the VM that could not lock it is there, good for nothing.
	one, two := booted(t, program), start(t, program)
	config := two.config(two.file("base", ramBytes, ""))
	config["disks"] = []object{{"id": "root", "path": one.path("disk"), "image_type": "Raw"}}
	two.ok("vm.create", config)
	two.want(500, chainOf("Error from API", "The VM could not boot", "Error locking disk images: Another instance likely holds a lock",
		"Cannot lock images of all block devices", "Failed to get Write lock for disk image: "+one.path("disk"), "The file is already locked"), "PUT", "vm.boot", nil)
	two.want(500, chainOf("Error from API", "The VM could not boot", "VM is already created"), "PUT", "vm.boot", nil)
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
	if _, err := fmt.Fprintln(conn, "hi you"); err != nil {
		t.Fatal(err)
	}
	if b, err := lines.ReadString('\n'); err != nil || b != "hi you\n" {
		t.Errorf("the guest says %q, %v", b, err)
	}
}

// TestEnds ends VMs from within: one that powers off ends the process, one that was reset boots again.
func TestEnds(t *testing.T) {
	t.Parallel()
	program := testvm.BuildFakeCloudHypervisor(t).Path
	p := booted(t, program)
	p.ask("say famous last words")
	p.order("off")
	p.exits(0)
	if b, err := os.ReadFile(p.path("serial")); err != nil || string(b) != "famous last words\r\n" {
		t.Errorf("the console has %q, %v", b, err)
	}
	if got, want := p.seen(), []string{"vmm starting", "vm booting", "vm booted", "vm shutdown", "vm deleted", "vmm shutdown"}; !slices.Equal(got, want) {
		t.Errorf("the events are %q, want %q", got, want)
	}
	p = booted(t, program)
	p.ask("inc")
	p.order("crash")
	eventually.True(t, "it has rebooted", func() bool { return slices.Contains(p.seen(), "vm rebooted") })
	if got := p.ask("count"); got != "0" {
		t.Errorf("the guest counts %s after a reset", got)
	}
	if err := os.Remove(p.path("kernel")); err != nil {
		t.Fatal(err)
	}
	p.order("crash")
	p.exits(1)
	if !strings.Contains(p.errs.String(), "Cannot open kernel file") {
		t.Errorf("it says %q", p.errs.String())
	}
}

func TestSerialSocket(t *testing.T) {
	t.Parallel()
	p := start(t, testvm.BuildFakeCloudHypervisor(t).Path)
	c := p.config(p.file("base", ramBytes, ""))
	c["serial"] = object{"mode": "Socket", "socket": p.path("serial")}
	p.ok("vm.create", c)
	p.ok("vm.boot", nil)
	p.ask("say before anyone listens")
	var d net.Dialer
	for i := range 3 { // each takes the place of the one before
		conn, err := d.DialContext(t.Context(), "unix", p.path("serial"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if i > 0 {
			eventually.True(t, "the guest prints to the new client", func() bool {
				p.ask("say before anyone listens")
				_ = conn.SetReadDeadline(time.Now().Add(10 * time.Millisecond)) // fails only when it is closed
				_, err := conn.Read(make([]byte, 1))
				return err == nil
			})
			continue
		}
		if l, err := bufio.NewReader(conn).ReadString('\n'); err != nil || l != "before anyone listens\r\n" {
			t.Errorf("the console says %q, %v", l, err)
		}
	}
	p.want(200, "", "PUT", "vmm.shutdown", nil)
	p.exits(0)
	if _, err := os.Stat(p.path("serial")); err == nil {
		t.Error("the console's socket is left")
	}
}

// TestDescriptors passes files with requests: as many as are expected, and taps.
func TestDescriptors(t *testing.T) {
	t.Parallel()
	p := start(t, testvm.BuildFakeCloudHypervisor(t).Path)
	p.ok("vm.create", p.config(p.file("base", ramBytes, "")))
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: p.path("api"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	body := `{"id":"net0","mac":"02:00:00:00:00:01"}`
	req := fmt.Sprintf("PUT /api/v1/vm.add-net HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	if _, _, err := conn.WriteMsgUnix([]byte(req), unix.UnixRights(int(null.Fd())), nil); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		t.Errorf("vm.add-net is answered %d", resp.StatusCode)
	}
	p.want(500, chainOf("Error from API", "The network device could not be added to the VM", "Failed to validate config", "Identifier net0 is not unique"), "PUT", "vm.add-net", body)
	code, b, err := p.call(http.MethodPut, "vm.boot", nil)
	if err != nil || code != 500 || !strings.Contains(b, `"Using existing tap"`) {
		t.Errorf("a VM whose tap is none: got %d %s, %v", code, b, err)
	}
}

func TestFaults(t *testing.T) {
	t.Parallel()
	fake := testvm.BuildFakeCloudHypervisor(t)
	ping := func(t *testing.T, fault string) (int, string, error) {
		t.Helper()
		p := start(t, fake.With(t, fault))
		return p.call(http.MethodGet, "vmm.ping", nil)
	}
	for fault, want := range map[string]string{"500:vmm.ping": "told to fail", "version=99.0": `"99.0.0"`, "500:vmm.ping@2": `"53.0.0"`} {
		if _, b, err := ping(t, fault); err != nil || !strings.Contains(b, want) {
			t.Errorf("%s: got %q, %v", fault, b, err)
		}
	}
	if _, b, err := ping(t, "cut:vmm.ping"); err != nil || json.Valid([]byte(b)) {
		t.Errorf("a cut answer is %q, %v", b, err)
	}
	for _, fault := range []string{"drop:vmm.ping", "garbage:vmm.ping", "die:vmm.ping"} {
		if _, b, err := ping(t, fault); err == nil {
			t.Errorf("%s: got %q", fault, b)
		}
	}
	if _, b, err := ping(t, "endless:vmm.ping"); err != nil || len(b) != 8*mib {
		t.Errorf("an endless answer has %d bytes, %v", len(b), err)
	}
	for _, args := range [][]string{{"--version"}, {"-V", "-v"}} {
		out, err := exec.CommandContext(t.Context(), fake.With(t, "version=52.0"), args...).Output()
		if err != nil || !strings.HasPrefix(string(out), "cloud-hypervisor v52.0\nMigration Protocol Versions: 0\n") {
			t.Errorf("%q: got %q, %v", args, out, err)
		}
	}
	hangs := start(t, fake.With(t, "hang:vm.info"))
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost/api/v1/vm.info", nil)
	if err != nil {
		t.Fatal(err)
	}
	if resp, err := hangs.client.Do(req); err == nil {
		_ = resp.Body.Close()
		t.Error("a call that hangs was answered")
	}
	req, err = http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost/api/v1/vmm.ping", nil)
	if err != nil {
		t.Fatal(err)
	}
	if resp, err := hangs.client.Do(req); err == nil {
		_ = resp.Body.Close()
		t.Error("a ping was answered while a call hangs")
	}
}
