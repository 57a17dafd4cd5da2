package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/test/testleak"
)

func TestMain(m *testing.M) { testleak.Main(m) }

// The tests of the driver use everything that a VMM must do. These tests show that the fake refuses what a driver must
// not do: without that, the tests of the driver would find less.

const ramBytes = 4 << 20

// fake is a fake within the test's process.
type fake struct {
	*vmm
	t   *testing.T
	dir string // short
}

func newFake(t *testing.T) *fake {
	t.Helper()
	dir, err := os.MkdirTemp("", "fch") //nolint:usetesting // t.TempDir is too long for the path of a unix socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = null.Close() })
	f := &fake{vmm: &vmm{events: &events{fd: int(null.Fd())}, calls: map[string]int{}, exit: make(chan error, 1)}, t: t, dir: dir}
	t.Cleanup(func() {
		if f.vm != nil {
			f.vm.close()
		}
		if f.console != nil {
			_ = f.console.listener.Close()
		}
	})
	f.file("kernel", 4096, "\x7fELF")
	f.file("base", ramBytes, "")
	f.file("disk", 1<<20, "")
	return f
}

func (f *fake) path(name string) string { return filepath.Join(f.dir, name) }

// file makes a file of a size with something at its beginning.
func (f *fake) file(name string, size int64, content string) {
	f.t.Helper()
	if err := os.WriteFile(f.path(name), []byte(content), 0o600); err != nil {
		f.t.Fatal(err)
	}
	if err := os.Truncate(f.path(name), size); err != nil {
		f.t.Fatal(err)
	}
}

// config is the body of vm.create as the driver sends it.
func (f *fake) config() string {
	const form = `{"cpus":{"boot_vcpus":1,"max_vcpus":1,"nested":false},
		"memory":{"size":0,"thp":false,"zones":[{"id":"mem0","size":%d,"file":"DIR/base","shared":false}]},
		"payload":{"kernel":"DIR/kernel"},
		"disks":[{"id":"disk0","path":"DIR/disk","readonly":false,"image_type":"Raw","serial":"own","num_queues":1,"queue_size":128}],
		"rng":{"src":"/dev/urandom"},"vsock":{"id":"vsock0","cid":3,"socket":"DIR/vsock"},
		"serial":{"mode":"Socket","socket":"DIR/serial"},"console":{"mode":"Off"},"landlock_enable":true,"landlock_rules":[{"path":"DIR","access":"rw"}]}`
	return strings.ReplaceAll(fmt.Sprintf(form, ramBytes), "DIR", f.dir)
}

// put makes a call and returns the words of its error, or nothing.
func (f *fake) put(name, body string, files ...int) string {
	f.t.Helper()
	req := request{method: http.MethodPut, name: name, files: files}
	if body != "" {
		req.body = []byte(body)
	}
	if r := f.handle(req); r.status >= 300 {
		return fmt.Sprint(r.status) + " " + string(r.body)
	}
	return ""
}

func (f *fake) ok(name, body string, files ...int) {
	f.t.Helper()
	if words := f.put(name, body, files...); words != "" {
		f.t.Fatalf("%s: %s", name, words)
	}
}

func (f *fake) refuses(what, words, name, body string, files ...int) {
	f.t.Helper()
	if got := f.put(name, body, files...); !strings.Contains(got, words) || got == "" {
		f.t.Errorf("%s: %s says %q, want %q", what, name, got, words)
	}
}

// TestRefusesConfigs has configurations that v53.0 refuses too, except for the words that begin with fakech.
func TestRefusesConfigs(t *testing.T) {
	t.Parallel()
	memfd, err := unix.MemfdCreate("coppice-base", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(memfd) })
	for name, c := range map[string]struct{ old, new, words string }{
		"a field that is not known": {`"nested":false`, `"nesting":false`, `unknown field`},
		"a field of another type":   {`"boot_vcpus":1`, `"boot_vcpus":"1"`, `400 ["Failed to deserialize JSON"`},
		"more vCPUs than possible":  {`"max_vcpus":1`, `"max_vcpus":0`, "lower than boot CPUs"},
		"no zone":                   {`"shared":false}]`, `"shared":false}],"zones":[]`, "No memory zones found"},
		"RAM outside of the zone":   {`"size":0,"thp"`, `"size":4096,"thp"`, "Memory configuration is not valid"},
		"a base that is shared":     {`"shared":false`, `"shared":true`, "changes the base"},
		"no base":                   {`/base"`, `/bass"`, "No such file or directory (os error 2)"},
		"no kernel":                 {`/kernel"`, `/colonel"`, "Cannot open kernel file"},
		"a kernel that is none":     {`/kernel"`, `/disk"`, "Invalid bzImage"},
		"a special CID":             {`"cid":3`, `"cid":2`, "2 is a special VSOCK CID"},
		"an id twice":               {`"vsock0"`, `"disk0"`, "Identifier disk0 is not unique"},
		"no id":                     {`"vsock0"`, `""`, "is not unique"},
		"no disk":                   {`/disk"`, `/disc"`, "Cannot open disk path"},
		"a disk of a guessed type":  {`"Raw"`, `"Unknown"`, "raw disks only"},
		"a serial number too long":  {`"own"`, `"` + strings.Repeat("x", 21) + `"`, "exceeds maximum allowed length"},
		"a queue for no vCPU":       {`"num_queues":1`, `"num_queues":2`, "must not exceed boot vCPUs"},
		"an odd queue":              {`"queue_size":128`, `"queue_size":127`, "power of 2"},
		"a console":                 {`"console":{"mode":"Off"`, `"console":{"mode":"Tty"`, "no console"},
		"a rule for no file":        {`[{"path":"`, `[{"path":"/nowhere`, "does not exist"},
		"a rule for anything":       {`"access":"rw"`, `"access":"rwx"`, "Invalid landlock access"},
		"a memfd under Landlock":    {`/dev/urandom`, fmt.Sprintf("/proc/self/fd/%d", memfd), "failed to add a rule"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFake(t)
			config := strings.Replace(f.config(), c.old, c.new, 1)
			if config == f.config() {
				t.Fatalf("the configuration has no %s", c.old)
			}
			got := f.put("vm.create", config)
			if got == "" {
				got = f.put("vm.boot", "")
			}
			if !strings.Contains(got, c.words) || got == "" {
				t.Errorf("it says %q, want %q", got, c.words)
			}
		})
	}
}

// TestRefusesCalls makes calls in states in which they are refused, and with bodies and descriptors that are wrong.
func TestRefusesCalls(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	const net0 = `{"id":"net0","mac":"02:00:00:00:00:01","fds":[-1],"num_queues":2,"queue_size":256}`
	f.refuses("an unknown call", `404 ["Not Found"]`, "vm.nothing", "")
	f.refuses("a call of another method", `400 ["Bad Request"]`, "vm.info", "")
	f.refuses("nothing", `404 ["Error from API","The VM could not boot","VM config is missing"]`, "vm.boot", "")
	f.refuses("nothing", "VM is not running", "vm.pause", "")
	f.refuses("nothing", "VM is not created", "vm.add-net", net0)
	f.ok("vm.create", f.config())
	f.refuses("a second VM", "VM is already created", "vm.create", f.config())
	f.refuses("a card without a tap", "does not match the number of FDs (0)", "vm.add-net", net0)
	f.refuses("a body where there is none", `400 ["Bad Request"]`, "vm.boot", "{}")
	f.refuses("no body where there is one", `400 ["Bad Request"]`, "vm.snapshot", "")
	f.ok("vm.boot", "")
	f.refuses("a VM that runs", "VM is already created", "vm.boot", "")
	f.refuses("a VM that runs", "InvalidStateTransition(Running, Running)", "vm.resume", "")
	f.refuses("a VM that runs", "Trying to snapshot while VM is running", "vm.snapshot", `{"destination_url":"file://`+f.dir+`"}`)
	f.refuses("a disk that is not there", "Failed to find device", "vm.resize-disk", `{"id":"disk1","desired_size":4096}`)
	f.refuses("half a sector", "not a multiple of 512", "vm.resize-disk", `{"id":"disk0","desired_size":4097}`)
	f.ok("vm.pause", "")
	f.refuses("a paused VM", "InvalidStateTransition(Paused, Paused)", "vm.pause", "")
	// Another VM that writes to the same disk cannot lock it.
	two := newFake(t)
	two.ok("vm.create", strings.Replace(two.config(), two.path("disk"), f.path("disk"), 1))
	two.refuses("a disk of another VM", "The file is already locked", "vm.boot", "")
	// What is no tap is not taken for one.
	three := newFake(t)
	three.ok("vm.create", three.config())
	three.ok("vm.add-net", net0, three.events.fd)
	three.refuses("a card twice", "Identifier net0 is not unique", "vm.add-net", net0, three.events.fd)
	three.refuses("a tap that is none", "Using existing tap", "vm.boot", "")
}

// TestRefusesSnapshots: a restore takes only what a snapshot has saved, except for one flag of the clock.
func TestRefusesSnapshots(t *testing.T) {
	t.Parallel()
	source := newFake(t)
	source.ok("vm.create", source.config())
	source.ok("vm.boot", "")
	source.ok("vm.pause", "")
	source.file("memory-ranges", 0, "")
	to := `{"destination_url":"file://` + source.dir + `"}`
	placeholder := fmt.Sprintf(`"Error creating memory snapshot file \"%s\"","File exists (os error 17)"]`, source.path("memory-ranges"))
	source.refuses("a placeholder", placeholder, "vm.snapshot", to)
	source.refuses("a state that is there", `"Error creating VM config snapshot file","File exists (os error 17)"]`, "vm.snapshot", to)
	state, err := os.ReadFile(source.path("state.json"))
	if err != nil || !json.Valid(state) {
		t.Fatalf("the state is %q, %v", state, err)
	}
	// restored restores from an edited state, with a file for memory that is one hole.
	restored := func(t *testing.T, edit func(string) string, config func(string) string) (*fake, string) {
		t.Helper()
		f := newFake(t)
		f.file("memory-ranges", ramBytes, "")
		own := config(f.config())
		edited := edit(string(state))
		f.file("config.json", int64(len(own)), own)
		f.file("state.json", int64(len(edited)), edited)
		return f, f.put("vm.restore", `{"source_url":"file://`+f.dir+`"}`)
	}
	same := func(s string) string { return s }
	replace := func(old, with string) func(string) string {
		return func(s string) string {
			if !strings.Contains(s, old) {
				t.Errorf("%s has no %s", s, old)
			}
			return strings.Replace(s, old, with, 1)
		}
	}
	const clock = `\"clock\":{\"Kvm\":[`
	flag := func(s string) string {
		before, after, _ := strings.Cut(s, clock)
		numbers := strings.SplitN(after, ",", clockFlags+2)
		if numbers[clockFlags] != "14" {
			t.Errorf("the flags of the clock are %s", numbers[clockFlags])
		}
		numbers[clockFlags] = "10"
		return before + clock + strings.Join(numbers, ",")
	}
	for name, c := range map[string]struct {
		edit, config func(string) string
		words        string
	}{
		"nothing changed":           {same, same, ""},
		"the flag of the clock":     {flag, same, ""},
		"a number that lost digits": {replace("18446744073709551615", "18446744073709552000"), same, "more differs"},
		"one of the vCPU": {func(s string) string {
			return strings.ReplaceAll(s, `\"rax\":18446744073709551615`, `\"rax\":18446744073709552000`)
		}, same, "more differs"},
		"a device less":        {replace(`"disk0":{`, `"disk1":{`), same, "more differs"},
		"no sum":               {replace(sumNode, "_other"), same, "was not made by it"},
		"cut off":              {func(s string) string { return s[:len(s)/2] }, same, "Error deserialising VM state snapshot"},
		"another device":       {same, replace(`"disk0"`, `"disk1"`), "the devices are"},
		"other RAM":            {same, replace(fmt.Sprint(ramBytes), fmt.Sprint(ramBytes/2)), "RAM is in"},
		"a card without a tap": {same, replace(`"rng"`, `"net":[{"id":"net0","mac":"02:00:00:00:00:01","fds":[-1],"num_queues":2,"queue_size":256}],"rng"`), "Net FDs passed"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, got := restored(t, c.edit, c.config)
			if !strings.Contains(got, c.words) || (got == "") != (c.words == "") {
				t.Fatalf("it says %q, want %q", got, c.words)
			}
			if got == "" {
				f.ok("vm.resume", "")
				conn, err := net.Dial("unix", f.path("vsock"))
				if err != nil {
					t.Fatal(err)
				}
				_ = conn.Close()
			} else if f.vm != nil {
				t.Error("there is a VM")
			}
		})
	}
	late, got := restored(t, same, same)
	if got != "" {
		t.Fatal(got)
	}
	late.vm.memory.maps[0].mem[0]++ // from outside, after the devices have read their positions
	late.ok("vm.resume", "")
	if conn, err := net.Dial("unix", late.path("vsock")); err == nil {
		t.Error("a guest whose memory came after the restore has its channel", conn.Close())
	}
}

// TestDamagedCommands: a CONNECT that is wrong gets no answer.
func TestDamagedCommands(t *testing.T) {
	t.Parallel()
	for command, want := range map[string]bool{
		"CONNECT 1024\n": true, "connect 1024\nhello": true, "CONNECT x\n": false, "CONNECT \n": false, "HELLO 1024\n": false,
		"CONNECT 1024": false, "CONNECT " + strings.Repeat("1", 40) + "\n": false,
	} {
		if port, ok := readCommand(strings.NewReader(command)); ok != want || ok && port != 1024 {
			t.Errorf("%q: %d, %v", command, port, ok)
		}
	}
}
