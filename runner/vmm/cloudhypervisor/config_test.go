package cloudhypervisor

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm"
)

const bootConfig = `{
  "cpus": {"boot_vcpus": 2, "max_vcpus": 2, "nested": false},
  "memory": {"size": 0, "thp": false, "zones": [{"id": "mem0", "size": 268435456, "file": "/proc/self/fd/7", "shared": false}]},
  "payload": {"kernel": "/proc/self/fd/9", "initramfs": "/proc/self/fd/10", "cmdline": "console=ttyS0"},
  "disks": [
    {"id": "disk0", "path": "/proc/self/fd/11", "readonly": true, "image_type": "Raw", "serial": "root", "num_queues": 1, "queue_size": 128},
    {"id": "disk1", "path": "/proc/self/fd/12", "readonly": false, "image_type": "Raw", "serial": "overlay", "num_queues": 1, "queue_size": 128}],
  "rng": {"src": "/dev/urandom"},
  "vsock": {"id": "vsock0", "cid": 3, "socket": "/proc/self/fd/5/vsock.sock"},
  "serial": {"mode": "Socket", "socket": "/proc/self/fd/5/serial.sock"},
  "console": {"mode": "Off"},
  "landlock_enable": true,
  "landlock_rules": [{"path": "/proc/self/fd/5", "access": "rw"}]
}`

func TestConfig(t *testing.T) {
	t.Parallel()
	spec := vmm.Spec{
		ID: core.NewID[core.SandboxID](), Dir: "/run/x", VCPUs: 2, MemoryMiB: 256, CommandLine: "console=ttyS0", Tap: os.Stdin, MAC: "02:00:00:00:00:01",
		Disks: []vmm.Disk{{ReadOnly: true, Serial: "root"}, {Serial: "overlay"}},
	}
	fd := descriptors{kernel: 9, initrd: 10, disks: []int{11, 12}}
	check := func(what string, got any, want string) {
		t.Helper()
		b, err := json.Marshal(got)
		if err != nil {
			t.Fatal(err)
		}
		var g, w any
		if err := json.Unmarshal(b, &g); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal([]byte(want), &w); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(w, g); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
	check("to boot", config(spec, fd, true), bootConfig)

	spec.Restore = true
	restore := strings.Replace(bootConfig, `{"kernel": "/proc/self/fd/9", "initramfs": "/proc/self/fd/10", "cmdline": "console=ttyS0"}`, `{"kernel": "/dev/null"}`, 1)
	restore = strings.Replace(restore, `"rng"`, `"net": [{"id": "net0", "mac": "02:00:00:00:00:01", "fds": [-1], "num_queues": 2, "queue_size": 256}], "rng"`, 1)
	check("to restore", config(spec, fd, true), restore)

	spec.Tap = nil
	if c := config(spec, fd, false); len(c.Net) > 0 || c.LandlockEnable || len(c.LandlockRules) > 0 {
		t.Errorf("without a network and Landlock: %+v", c)
	}
}

func TestIsOf(t *testing.T) {
	t.Parallel()
	id := string(core.NewID[core.SandboxID]())
	for name, c := range map[string]struct {
		args []string
		want bool
	}{
		"ours":               {[]string{"cloud-hypervisor:coppice-a-" + id, "--api-socket", "fd=3"}, true},
		"another cluster's":  {[]string{"cloud-hypervisor:coppice-b-" + id}, false},
		"of a longer name":   {[]string{"cloud-hypervisor:coppice-a-b-" + id}, false},
		"a probe":            {[]string{"cloud-hypervisor:coppice-probe"}, false},
		"somebody's":         {[]string{"cloud-hypervisor", "--api-socket", "coppice-a-" + id}, false},
		"an editor":          {[]string{"vi", "cloud-hypervisor:coppice-a-" + id}, false},
		"one without a name": {[]string{""}, false},
	} {
		if got := isOf("a", c.args); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestChannel(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		sent []string
		want string // what is read
		err  string
	}{
		"accepted":            {[]string{"OK 1073741824\n", "hello"}, "hello", ""},
		"all at once":         {[]string{"OK 1073741824\nhello\nOK 2\n"}, "hello\nOK 2\n", ""},
		"byte by byte":        {strings.Split("OK 7\nhello", ""), "hello", ""},
		"refused":             {nil, "", "EOF"},
		"cut short":           {[]string{"OK 10"}, "", "EOF"},
		"something else":      {[]string{"NO 1\n"}, "", `answers a connection to the guest with "NO 1"`},
		"a line without end":  {[]string{strings.Repeat("O", 1000)}, "", "answers a connection to the guest with"},
		"nothing but the end": {[]string{"\n"}, "", "answers a connection to the guest with"},
	} {
		host, vmmEnd := net.Pipe()
		go func() {
			line, _ := bufio.NewReader(io.LimitReader(vmmEnd, 13)).ReadString('\n')
			if line != "CONNECT 1024\n" {
				t.Errorf("%s: it was asked %q", name, line)
			}
			for _, s := range c.sent {
				if _, err := vmmEnd.Write([]byte(s)); err != nil {
					break // it has hung up
				}
			}
			_ = vmmEnd.Close()
		}()
		conn, err := connectVsock(host)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(conn)
		if string(got) != c.want || (err == nil) != (c.err == "" || c.err == "EOF") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: got %q, %v, want %q, %q", name, got, err, c.want, c.err)
		}
		_ = conn.Close()
	}
}

func TestEvents(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), eventsFIFO)
	vmmEnd, err := makeEvents(path)
	if err != nil {
		t.Fatal(err)
	}
	defer vmmEnd.Close()
	said := func(text string) {
		t.Helper()
		if _, err := vmmEnd.WriteString(text); err != nil {
			t.Fatal(err)
		}
	}
	said("{\n  \"timestamp\": {\n    \"secs\": 0\n  },\n  \"source\": \"vmm\",\n  \"event\": \"starting\",\n  \"properties\": null\n}\n\n") // before anybody reads
	for _, want := range []event{{"vmm", "starting"}, {"vm", "rebooting"}} {
		e, err := openEvents(path)
		if err != nil {
			t.Fatal(err)
		}
		got, done := make(chan event), make(chan struct{})
		go func() {
			if err := e.follow(func(e event) { got <- e }); err != nil {
				t.Error(err)
			}
			close(done)
		}()
		select {
		case one := <-got:
			if one != want {
				t.Errorf("got %+v, want %+v", one, want)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("the event %+v does not come", want)
		}
		e.close()
		select {
		case <-done:
		case <-time.After(10 * time.Second):
			t.Fatal("the reading does not end")
		}
		said("{not JSON\n\n{\n  \"source\": \"vm\",\n  \"event\": \"rebooting\"\n}\n\n") // while nobody reads
	}
}

// TestEndlessEvent: an event without an end costs bounded memory, and is an error, because a restart could come behind it.
func TestEndlessEvent(t *testing.T) {
	t.Parallel()
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for i := 0; i <= maxEvent; i += 4096 {
			if _, err := write.Write(bytes.Repeat([]byte("x"), 4096)); err != nil {
				break // nobody reads any more
			}
		}
		_ = write.Close()
	}()
	e := &events{read}
	defer e.close()
	if err := e.follow(func(e event) { t.Errorf("it was taken for %+v", e) }); !errors.Is(err, bufio.ErrTooLong) {
		t.Errorf("got %v", err)
	}
}
