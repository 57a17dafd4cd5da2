package guest_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/images/build"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testvm"
	"github.com/coppice-dev/coppice/runner/guest"
)

// The tests of this file boot the real agent in a real guest, under TCG, and talk to it through the real client.

// vm is a QEMU process with our guest.
type vm struct {
	t       *testing.T
	dir     string
	cmd     *exec.Cmd
	done    chan struct{}
	qmp     net.Conn
	replies *bufio.Reader
	overlay string
}

// options of a VM.
type vmOptions struct {
	incoming string // restore from this file
	overlay  string // copy the writable disk from here instead of the image
	diskSize int64  // grow it to this
	cmdline  string // added
	noAgent  bool   // without the virtio-serial port
}

func startVM(t *testing.T, o vmOptions) *vm {
	t.Helper()
	require.Root(t)
	qemu, err := exec.LookPath("qemu-system-x86_64")
	require.That(t, "vm", err == nil && runtime.GOARCH == "amd64" && len(build.MissingPrograms()) == 0, "make setup")
	_, img := testvm.Image(t)
	v := &vm{t: t, dir: t.TempDir(), done: make(chan struct{})}
	v.overlay = filepath.Join(v.dir, "overlay")
	from := img.Overlay
	if o.overlay != "" {
		from = o.overlay
	}
	if out, err := exec.Command("cp", "--sparse=always", from, v.overlay).CombinedOutput(); err != nil {
		t.Fatalf("copy the disk: %v\n%s", err, out)
	}
	if o.diskSize > 0 {
		if err := os.Truncate(v.overlay, o.diskSize); err != nil {
			t.Fatal(err)
		}
	}
	args := []string{
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-M", "pc,usb=off,vmport=off,smm=off,hpet=off",
		// What emulation does badly is left out, as runner/vmm/qemu does.
		"-accel", "tcg", "-cpu", "max,erms=off,fsrm=off", "-m", "256M", "-smp", "1",
		"-kernel", img.Kernel, "-initrd", img.Initrd, "-append", strings.TrimSpace(img.CommandLine + " mitigations=off no_timer_check " + o.cmdline),
		"-chardev", "file,id=con,path=" + v.file("console"), "-serial", "chardev:con",
		"-qmp", "unix:" + v.file("qmp") + ",server=on,wait=off",
		"-drive", "if=none,id=root,format=raw,readonly=on,file=" + img.RootFS, "-device", "virtio-blk-pci,drive=root",
		"-drive", "if=none,id=disk,format=raw,cache=writeback,file=" + v.overlay, "-device", "virtio-blk-pci,drive=disk",
		"-netdev", "hubport,id=net,hubid=0", "-device", "virtio-net-pci,netdev=net,mac=52:54:00:12:34:56,guest_announce=off",
		"-object", "filter-dump,id=dump,netdev=net,file=" + v.file("pcap"),
	}
	if !o.noAgent {
		args = append(args, "-device", "virtio-serial-pci,max_ports=2",
			"-chardev", "socket,id=ag,path="+v.file("agent")+",server=on,wait=off", "-device", "virtserialport,chardev=ag,name=coppice.agent")
	}
	if o.incoming != "" {
		args = append(args, "-S", "-incoming", "exec:cat "+o.incoming)
	}
	v.cmd = exec.Command(qemu, args...)
	var stderr bytes.Buffer
	v.cmd.Stderr = &stderr
	if err := v.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = v.cmd.Wait()
		close(v.done)
	}()
	t.Cleanup(func() {
		_ = v.cmd.Process.Kill()
		<-v.done
		if t.Failed() {
			t.Logf("console:\n%s\nqemu: %s", v.console(), stderr.String())
		}
	})
	v.monitor()
	if o.incoming != "" {
		v.untilStatus("query-migrate", "completed")
		v.ask("cont", nil)
	}
	return v
}

func (v *vm) file(name string) string { return filepath.Join(v.dir, name) }

func (v *vm) console() string {
	b, _ := os.ReadFile(v.file("console"))
	if len(b) > 8<<10 {
		b = b[len(b)-8<<10:]
	}
	return string(b)
}

// monitor connects to QMP.
func (v *vm) monitor() {
	v.t.Helper()
	v.qmp = v.connect("qmp")
	v.t.Cleanup(func() { _ = v.qmp.Close() })
	v.replies = bufio.NewReader(v.qmp)
	if _, err := v.replies.ReadBytes('\n'); err != nil {
		v.t.Fatal(err)
	}
	v.ask("qmp_capabilities", nil)
}

// connect waits for a socket that QEMU makes.
func (v *vm) connect(name string) net.Conn {
	v.t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(5 * time.Minute)
	for {
		c, err := net.Dial("unix", v.file(name))
		if err == nil {
			return c
		}
		select {
		case <-tick.C:
		case <-v.done:
			v.t.Fatalf("qemu has ended")
		case <-limit:
			v.t.Fatal(err)
		}
	}
}

func (v *vm) ask(command string, args any) json.RawMessage {
	v.t.Helper()
	req := map[string]any{"execute": command}
	if args != nil {
		req["arguments"] = args
	}
	b, err := json.Marshal(req)
	if err != nil {
		v.t.Fatal(err)
	}
	if _, err := v.qmp.Write(b); err != nil {
		v.t.Fatal(err)
	}
	for {
		line, err := v.replies.ReadBytes('\n')
		if err != nil {
			v.t.Fatalf("%s: %v", command, err)
		}
		var reply struct {
			Return json.RawMessage `json:"return"`
			Error  json.RawMessage `json:"error"`
		}
		if err := json.Unmarshal(line, &reply); err != nil {
			v.t.Fatal(err)
		}
		if reply.Error != nil {
			v.t.Fatalf("%s: %s", command, reply.Error)
		}
		if reply.Return != nil {
			return reply.Return
		}
	}
}

func (v *vm) untilStatus(query, want string) {
	v.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for range tick.C {
		var got struct{ Status string }
		if err := json.Unmarshal(v.ask(query, nil), &got); err != nil {
			v.t.Fatal(err)
		}
		if got.Status == want {
			return
		}
		if got.Status == "failed" {
			v.t.Fatalf("%s: failed", query)
		}
	}
}

// save stops the VM and writes its whole state to a file. The disk is at rest from then on.
func (v *vm) save() string {
	v.t.Helper()
	state := v.file("state")
	v.ask("stop", nil)
	v.ask("migrate-set-parameters", map[string]any{"max-bandwidth": int64(10 << 30)})
	v.ask("migrate", map[string]any{"uri": "exec:cat > " + state})
	v.untilStatus("query-migrate", "completed")
	return state
}

// dial connects to the agent.
func (v *vm) dial() *guest.Client {
	v.t.Helper()
	ctx, cancel := context.WithTimeoutCause(v.t.Context(), 90*time.Second, errors.New("the agent has not answered in 90 s"))
	defer cancel()
	stop := context.AfterFunc(ctx, func() {})
	defer stop()
	c, err := guest.Dial(ctx, func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", v.file("agent"))
	})
	if err != nil {
		v.t.Fatalf("dial: %v (%v)\n%s", err, errors.Unwrap(err), v.console())
	}
	v.t.Cleanup(func() { _ = c.Close() })
	return c
}
