package devstack

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/test/require"
)

func TestClearHTTPOnlyOnLoopback(t *testing.T) {
	t.Parallel()
	for listen, refused := range map[string]bool{
		"127.0.0.1:0": false, "127.9.9.9:7070": false, "[::1]:7070": false, "localhost:7070": false,
		"0.0.0.0:7196": true, ":7070": true, "[::]:7070": true, "10.0.0.1:7070": true, "example.com:7070": true,
	} {
		err := Config{Listen: listen}.Check()
		if refused != (err != nil) || err != nil && !strings.Contains(err.Error(), "--plain-http") {
			t.Errorf("%s: %v", listen, err)
		}
		if err := (Config{Listen: listen, PlainHTTP: true}).Check(); err != nil {
			t.Errorf("%s with --plain-http: %v", listen, err)
		}
	}
	for _, listen := range []string{"", "7070", "127.0.0.1"} {
		if err := (Config{Listen: listen, PlainHTTP: true}).Check(); core.CodeOf(err) != core.CodeInvalidField {
			t.Errorf("%q: %v", listen, err)
		}
	}
}

// TestNoKeyOnlyOnLoopback: clients of Arrakis need no key where only this host reaches them.
func TestNoKeyOnlyOnLoopback(t *testing.T) {
	t.Parallel()
	for listen, refused := range map[string]bool{"127.0.0.1:0": false, "[::1]:7000": false, "localhost:7000": false, "0.0.0.0:7000": true, ":7000": true, "10.0.0.1:7000": true} {
		cfg := Config{Listen: "127.0.0.1:0", PlainHTTP: true, Arrakis: daemon.ArrakisConfig{Listen: listen}}
		if err := cfg.Check(); refused != (err != nil) || err != nil && !strings.Contains(err.Error(), "--arrakis-listen") {
			t.Errorf("%s: %v", listen, err)
		}
		cfg.ArrakisNeedsKey = true
		if err := cfg.Check(); err != nil {
			t.Errorf("%s with --arrakis-require-key: %v", listen, err)
		}
	}
}

// TestTakenPortLeavesNothing starts on an address that is taken: nothing was made when it is noticed.
func TestTakenPortLeavesNothing(t *testing.T) {
	t.Parallel()
	require.Root(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	taken := l.Addr().String()
	for name, cfg := range map[string]Config{
		"the API": {Listen: taken},
		"metrics": {Listen: "127.0.0.1:0", Metrics: taken},
	} {
		dir := filepath.Join(t.TempDir(), "data")
		cfg.HostConfig = daemon.HostConfig{DataDir: dir, Log: slog.New(slog.DiscardHandler)}
		err := Run(t.Context(), cfg, func(Ready) error {
			t.Error("it is ready")
			return nil
		})
		if err == nil || !strings.Contains(err.Error(), taken) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: the data directory was made: %v", name, err)
		}
	}
}

// TestOneDevPerDirectory starts a second one on the directory of the first: it names the cause and the cure, without an error of the kernel.
func TestOneDevPerDirectory(t *testing.T) {
	t.Parallel()
	require.Root(t)
	cfg := Config{Listen: "127.0.0.1:0", HostConfig: daemon.HostConfig{DataDir: t.TempDir(), Log: slog.New(slog.DiscardHandler)}}
	first := &stack{cfg: cfg}
	if err := first.openData(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = first.steps.Undo(t.Context()) }()
	err := (&stack{cfg: cfg}).openData(t.Context())
	if core.CodeOf(err) != core.CodeStateConflict || !strings.HasSuffix(err.Error(), "give this one another --data-dir") {
		t.Errorf("got %v", err)
	}
}
