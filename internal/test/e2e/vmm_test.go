package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/userdata"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// machine is what the host has of one sandbox.
type machine struct {
	pid       int    // of the VMM
	namespace string // path
}

// The name of the tap in every namespace.
const tapName = "tap0"

// inside opens netlink in a namespace.
func inside(path string) (*netlink.Handle, error) {
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = ns.Close() }()
	return netlink.NewHandleAt(ns)
}

// machineOf finds the VMM and the namespace of the sandbox that has a MAC address. The rules of a namespace name that of its guest from
// the moment it is assigned, in quarantine, on.
func (s *stack) machineOf(mac string) (machine, error) {
	paths, err := s.namespaces()
	if err != nil {
		return machine{}, err
	}
	for _, path := range paths {
		ok, err := rulesName(path, mac)
		if err != nil || !ok {
			continue // it may have just been removed
		}
		pid, err := s.vmmIn(path)
		if err != nil {
			return machine{}, err
		}
		return machine{pid, path}, nil
	}
	return machine{}, fmt.Errorf("no namespace's rules name %s", mac)
}

// rulesName reports whether a comment on the rules of a namespace has the word.
func rulesName(path, word string) (bool, error) {
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return false, err
	}
	defer func() { _ = ns.Close() }()
	conn, err := nftables.New(nftables.WithNetNSFd(int(ns)))
	if err != nil {
		return false, err
	}
	chains, err := conn.ListChains()
	if err != nil {
		return false, err
	}
	for _, chain := range chains {
		rules, err := conn.GetRules(chain.Table, chain)
		if err != nil {
			return false, err
		}
		for _, rule := range rules {
			comment, _ := userdata.GetString(rule.UserData, userdata.TypeComment)
			if slices.Contains(strings.Fields(comment), word) {
				return true, nil
			}
		}
	}
	return false, nil
}

// vmmIn finds the VMM that lives in a namespace.
func (s *stack) vmmIn(path string) (int, error) {
	want, err := os.Stat(path)
	if err != nil {
		return 0, err
	}
	for pid := range s.vmms() {
		if got, err := os.Stat(filepath.Join("/proc", strconv.Itoa(pid), "ns/net")); err == nil && os.SameFile(got, want) {
			return pid, nil
		}
	}
	return 0, fmt.Errorf("no VMM lives in %s", path)
}

// mustMachine is machineOf of a workspace that runs.
func (s *stack) mustMachine(t *testing.T, ws coppice.WorkspaceID) machine {
	t.Helper()
	w, err := s.client.Workspace(t.Context(), ws)
	if err != nil {
		t.Fatal(err)
	}
	m, err := s.machineOf(w.Network.MAC)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// awaitQuarantined waits until a fork that is being made has a VMM and an address, and returns its VMM.
func (s *stack) awaitQuarantined(t *testing.T, name string) int {
	t.Helper()
	pid := 0
	until(t, name+" is quarantined", func() (bool, error) {
		list, err := coppice.Collect(s.client.Workspaces(t.Context(), coppice.WorkspaceFilter{Name: name}))
		if err != nil || len(list) != 1 || list[0].Network.IP == "" {
			return false, err
		}
		m, err := s.machineOf(list[0].Network.MAC)
		pid = m.pid
		return err == nil, nil
	})
	return pid
}

// killVMM kills a process that is a VMM of this server.
func (s *stack) killVMM(t *testing.T, pid int) {
	t.Helper()
	if cmdline, ok := s.vmms()[pid]; !ok || !strings.Contains(cmdline, s.cluster) {
		t.Fatalf("process %d is no VMM of this server", pid)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}
