package e2e

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm/cloudhypervisor"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// learnNames finds out what the things of this installation are called on the host.
func (s *stack) learnNames() error {
	b, err := os.ReadFile(filepath.Join(s.data, "cluster-id"))
	if err != nil {
		return err
	}
	id := strings.TrimSpace(string(b))
	s.cluster = core.DigestOf([]byte(id)).Hex()[:8]
	sum := sha256.Sum256([]byte("coppice network namespaces of cluster " + id))
	s.network = hex.EncodeToString(sum[:])[:8]
	return nil
}

// things is what an installation has on a host, by kind.
type things map[string][]string

// find looks for everything of this installation on the host. TestLeakSearchFinds shows that it finds what is there.
func (s *stack) find() (things, error) {
	out := things{}
	var errs []error
	for kind, look := range map[string]func() ([]string, error){
		"process":           s.processes,
		"network namespace": s.namespaces,
		"link":              s.links,
		"nftables table":    s.tables,
		"mount":             s.mounts,
		"loop device":       s.loops,
		"cgroup":            s.cgroups,
		"socket directory":  s.sockets,
	} {
		found, err := look()
		errs = append(errs, err)
		if len(found) > 0 {
			out[kind] = found
		}
	}
	return out, errors.Join(errs...)
}

// remains returns a sentence for each thing that is left of a server that has ended. The kernel frees a loop device when the
// last copy of its mount has gone, which may be in the namespace of a program that knows nothing of us and soon ends.
func (s *stack) remains() []string {
	const patience = time.Minute
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	found, err := s.find()
	for begun := time.Now(); err == nil && len(found) == 1 && len(found["loop device"]) > 0 && time.Since(begun) < patience; <-again.C {
		found, err = s.find()
	}
	if err != nil {
		return []string{err.Error()}
	}
	var out []string
	for kind, list := range found {
		for _, what := range list {
			out = append(out, fmt.Sprintf("left behind: %s %s", kind, what))
		}
	}
	slices.Sort(out)
	return out
}

// processes are those that name the data directory or the cluster in their arguments, or work below the directory.
func (s *stack) processes() ([]string, error) {
	var out []string
	for pid, cmdline := range allProcesses() {
		cwd, _ := os.Readlink(filepath.Join("/proc", strconv.Itoa(pid), "cwd"))
		if bytes.Contains(cmdline, []byte(s.data)) || bytes.Contains(cmdline, []byte(s.cluster)) || strings.HasPrefix(cwd, s.data) {
			out = append(out, fmt.Sprintf("%d %s", pid, core.Clip(string(bytes.ReplaceAll(cmdline, []byte{0}, []byte{' '})))))
		}
	}
	return out, nil
}

// allProcesses yields the id and arguments of every process that is no zombie.
func allProcesses() map[int][]byte {
	out := map[int][]byte{}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if cmdline, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline")); err == nil && len(cmdline) > 0 {
			out[pid] = cmdline
		}
	}
	return out
}

func (s *stack) namespaces() ([]string, error) {
	return filepath.Glob("/run/netns/coppice-" + s.network + "-*")
}

func (s *stack) links() ([]string, error) {
	all, err := net.Interfaces()
	var out []string
	for _, l := range all {
		if strings.HasPrefix(l.Name, "cp"+s.network) {
			out = append(out, l.Name)
		}
	}
	return out, err
}

func (s *stack) tables() ([]string, error) {
	c, err := nftables.New()
	if err != nil {
		return nil, err
	}
	all, err := c.ListTables()
	var out []string
	for _, t := range all {
		if strings.HasPrefix(t.Name, "coppice_"+s.network+"_") {
			out = append(out, t.Name)
		}
	}
	return out, err
}

func (s *stack) mounts() ([]string, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	var out []string
	for line := range strings.Lines(string(b)) {
		for _, name := range []string{s.data, s.runDir(), "coppice-" + s.network} {
			if strings.Contains(line, name) {
				out = append(out, strings.TrimSpace(line))
				break
			}
		}
	}
	return out, err
}

func (s *stack) loops() ([]string, error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	var out []string
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(b), s.dir) {
			out = append(out, f+" "+strings.TrimSpace(string(b)))
		}
	}
	return out, err
}

func (s *stack) cgroups() ([]string, error) {
	var out []string
	err := filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.Contains(d.Name(), s.cluster) {
			out = append(out, path)
		}
		return nil // groups come and go
	})
	return out, err
}

func (s *stack) runDir() string { return "/run/coppice/" + s.cluster }

func (s *stack) sockets() ([]string, error) {
	var out []string
	err := filepath.WalkDir(s.runDir(), func(path string, _ fs.DirEntry, err error) error {
		if err == nil {
			out = append(out, path)
		}
		return nil // VMs come and go
	})
	return out, err
}

// vmms are the processes of virtual machines, by pid.
func (s *stack) vmms() map[int]string {
	out := map[int]string{}
	for pid, cmdline := range allProcesses() {
		exe, _, _ := bytes.Cut(cmdline, []byte{0})
		name := filepath.Base(string(exe))
		if bytes.Contains(cmdline, []byte(s.cluster)) && (strings.HasPrefix(name, "qemu-system") || strings.HasPrefix(name, cloudhypervisor.Program+":")) {
			out[pid] = string(cmdline)
		}
	}
	return out
}

// TestLeakSearchFinds shows that the search after the last test would have found what is left: it finds all of it while it is
// in use.
func TestLeakSearchFinds(t *testing.T) {
	s := theStack(t)
	ws, err := s.client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{
		Image: string(baseImage(t)), Resources: small(), Network: coppice.NetworkRequest{EgressPolicy: coppice.EgressAllowAll},
	})
	if err != nil {
		t.Fatal(err)
	}
	endWithTest(t, s, ws.ID)
	found, err := s.find()
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"process", "network namespace", "link", "nftables table", "socket directory"}
	if _, err := os.Stat(filepath.Join(s.data, "volume.xfs")); err == nil {
		want = append(want, "mount", "loop device")
	}
	for _, kind := range want {
		if len(found[kind]) == 0 {
			t.Errorf("no %s of the running server was found", kind)
		}
	}
	if len(s.vmms()) == 0 {
		t.Error("no VMM of the running server was found")
	}
}
