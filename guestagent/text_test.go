//go:build linux

package guestagent

import (
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/guesttest"
)

func TestProcessesAndPorts(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	list := guesttest.Must[guestapi.Processes](t)(guesttest.Ask[guestapi.Processes](a, http.MethodGet, guestapi.PathProcesses, nil))
	found := false
	for _, p := range list.Processes {
		found = found || p.PID == os.Getpid() && p.PPID == os.Getppid() && strings.Contains(p.Cmdline, "-test.")
	}
	if !found {
		t.Errorf("this process is not in %+v", list)
	}
	ports := guesttest.Must[guestapi.Ports](t)(guesttest.Ask[guestapi.Ports](a, http.MethodGet, guestapi.PathPorts, nil))
	found = false
	for _, p := range ports.Ports {
		found = found || p.PID == os.Getpid() && strings.HasSuffix(a.URL, ":"+itoa(p.Port)) && p.Address.String() == "127.0.0.1"
	}
	if !found {
		t.Errorf("the test's own server %s is not in %+v", a.URL, ports)
	}
}

func TestFindPort(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, content := range map[string]string{"vport1p1": "other\n", "vport2p7": guestapi.PortName + "\n"} {
		if err := os.MkdirAll(dir+"/"+name, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(dir+"/"+name+"/name", []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got := findPort(dir); got != "/dev/vport2p7" {
		t.Errorf("got %q", got)
	}
	if got := findPort(t.TempDir()); got != "" {
		t.Errorf("without ports: %q", got)
	}
}
