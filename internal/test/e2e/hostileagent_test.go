package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// hostileGrowth bounds how much the server's process may grow while hostile agents answer. The
// controller and the runner are one process in this test. It grew by 36 to 52 MiB in five runs.
const hostileGrowth = 192 << 20

// hostileFile is how many bytes of an endless file the test reads before it closes the answer.
const hostileFile = 16 << 20

// TestHostileAgent has agents in real VMs answer with JSON without end, with millions of elements
// and with nonsense. A fork fails if its reseal or its release is answered so. A later call fails
// with GUEST_PROTOCOL. The memory of the server stays bounded, and another workspace goes on.
func TestHostileAgent(t *testing.T) {
	s := theStack(t)
	from := checkpoint(t, s, doctored(t, s))
	bystander := forkOne(t, s, seed(t))
	before := s.memory(t, "VmRSS")
	s.forgetPeak(t)
	began := time.Now()
	heard := s.whileHeard(t, bystander, func() {
		limit := make(chan struct{}, 3)
		var wg sync.WaitGroup
		for _, kind := range []string{"long", "many", "malformed"} {
			for _, stage := range []string{"reseal", "release", "wait", "public"} {
				wg.Go(func() {
					limit <- struct{}{}
					defer func() { <-limit }()
					began := time.Now()
					if stage == "reseal" || stage == "release" {
						s.wantNoFork(t, from.ID, kind, stage)
					} else {
						s.wantErrors(t, from.ID, kind, stage)
					}
					t.Logf("%s at %s: %.1f s", kind, stage, time.Since(began).Seconds())
				})
			}
		}
		wg.Wait()
	})
	peak := s.memory(t, "VmHWM")
	t.Logf("all took %.1f s; the process had %d MiB, and at most %d MiB; the bystander was heard %d times",
		time.Since(began).Seconds(), before>>20, peak>>20, heard)
	if peak-before > hostileGrowth {
		t.Errorf("the process grew by %d MiB, more than %d MiB", (peak-before)>>20, hostileGrowth>>20)
	}
	compareAlive(t, s, bystander)
	fork(t, s, from.ID, coppiceFork{}) // the checkpoint still works
}

// whileHeard runs do. Meanwhile it runs programs in a workspace, and returns how many. Each must
// end within two minutes.
func (s *stack) whileHeard(t *testing.T, ws coppice.WorkspaceID, do func()) int {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	heard := 0
	watching.Go(func() {
		for ; ctx.Err() == nil; heard++ {
			began := time.Now()
			res, err := s.client.Exec(t.Context(), ws, coppice.ExecRequest{Command: []string{"true"}})
			if took := time.Since(began); err != nil || res.ExitCode != 0 || took > 2*time.Minute {
				t.Errorf("a bystander, after %s: %+v, %v", took, res, err)
				return
			}
		}
	})
	do()
	stop()
	watching.Wait()
	if heard == 0 {
		t.Error("the bystander was never heard")
	}
	return heard
}

// forkHostile forks a workspace whose agent gives answers of a kind at a stage.
func (s *stack) forkHostile(t *testing.T, from coppice.CheckpointID, name, kind, stage string) (coppice.ForkResult, error) {
	t.Helper()
	return s.client.ForkCheckpoint(t.Context(), from, coppice.ForkCheckpointRequest{
		BranchName: name, Env: coppice.Env{faultVariable: "answers:" + kind + ":" + stage},
	})
}

// wantNoFork wants a fork to fail because the agent broke the protocol, and the failure to name
// the stage.
func (s *stack) wantNoFork(t *testing.T, from coppice.CheckpointID, kind, stage string) {
	t.Helper()
	name := fmt.Sprintf("hostile-%s-%s", kind, stage)
	_, err := s.forkHostile(t, from, name, kind, stage)
	var e *coppice.Error
	if !errors.As(err, &e) || e.Code != coppice.CodeForkFailed {
		t.Errorf("%s: %v, want FORK_FAILED", name, err)
		return
	}
	failed, err := coppice.Collect(s.client.Workspaces(t.Context(), coppice.WorkspaceFilter{
		Name: name, ParentCheckpointID: from, States: []coppice.WorkspaceState{coppice.WorkspaceFailed},
	}))
	if err != nil || len(failed) != 1 || failed[0].Failure == nil || !failed[0].ReadyAt.IsZero() {
		t.Errorf("%s: the failed workspaces are %+v, %v", name, failed, err)
		return
	}
	says := "its answer to /v1/" + stage + " is too long"
	if kind == "malformed" {
		says = "its answer to /v1/" + stage + " is not understood"
	}
	if f := failed[0].Failure; !strings.Contains(f.Message, says) || strings.ContainsRune(f.Message, '\x1b') {
		t.Errorf("%s: the problem is %s %q, want %q in it", name, f.Code, f.Message, says)
	}
}

// wantErrors wants a fork to succeed and all that is asked of it to fail with GUEST_PROTOCOL.
func (s *stack) wantErrors(t *testing.T, from coppice.CheckpointID, kind, stage string) {
	t.Helper()
	name := fmt.Sprintf("hostile-%s-%s", kind, stage)
	res, err := s.forkHostile(t, from, name, kind, stage)
	if err != nil {
		t.Errorf("%s: %v", name, err)
		return
	}
	ws := res.Children[0].Workspace.ID
	defer func() {
		if _, err := s.client.TerminateWorkspace(context.WithoutCancel(t.Context()), ws); err != nil {
			t.Errorf("%s: it cannot be ended: %v", name, err)
		}
	}()
	// The wait of a program that ends at once may never be asked for.
	s.wantProtocol(t, name, http.MethodPost, ws, "exec", `{"command":["sleep","600"]}`)
	if stage != "public" {
		return
	}
	s.wantProtocol(t, name, http.MethodGet, ws, "sessions", "")
	s.wantProtocol(t, name, http.MethodGet, ws, "processes", "")
	s.wantStream(t, name, ws)
}

// wantProtocol makes one request of a workspace, without the repeats of the SDK, and wants it to
// fail with GUEST_PROTOCOL.
func (s *stack) wantProtocol(t *testing.T, name, method string, ws coppice.WorkspaceID, what, body string) {
	t.Helper()
	began := time.Now()
	status, b, err := s.answerOf(t, method, ws, what, body, 1<<20)
	var p coppice.Problem
	if err == nil {
		err = json.Unmarshal(b, &p)
	}
	took := time.Since(began)
	t.Logf("%s, %s: %s (%.1f s)", name, what, p.Code, took.Seconds())
	if err != nil || status != http.StatusServiceUnavailable || p.Code != "GUEST_PROTOCOL" {
		t.Errorf("%s, %s: after %s: %.300q, %v; want GUEST_PROTOCOL", name, what, took, b, err)
	}
}

// wantStream reads a file. Its bytes are the guest's own, so they pass as they come. The server
// must hold few of them, which the bound of its memory shows.
func (s *stack) wantStream(t *testing.T, name string, ws coppice.WorkspaceID) {
	t.Helper()
	began := time.Now()
	status, b, err := s.answerOf(t, http.MethodGet, ws, "files?path=/etc/hostname", "", hostileFile)
	if err != nil || status != http.StatusOK || len(b) == 0 {
		t.Errorf("%s, file: status %d, %d bytes, %v", name, status, len(b), err)
		return
	}
	t.Logf("%s, file: %d KiB passed (%.1f s)", name, len(b)>>10, time.Since(began).Seconds())
}

// answerOf makes one request of a workspace and reads at most limit bytes of the answer's body.
func (s *stack) answerOf(t *testing.T, method string, ws coppice.WorkspaceID, what, body string, limit int64) (int, []byte, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	req := s.request(t, method, "/v1/workspaces/"+ws+"/"+what, strings.NewReader(body))
	res, err := http.DefaultClient.Do(req.WithContext(ctx))
	if err != nil {
		return 0, nil, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, limit))
	return res.StatusCode, b, err
}

// memory reads a size of the server's process.
func (s *stack) memory(t *testing.T, name string) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`(?m)^` + name + `:\s+(\d+) kB$`).FindSubmatch(b)
	if found == nil {
		t.Fatalf("the kernel says no %s", name)
	}
	kb, err := strconv.ParseInt(string(found[1]), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return kb << 10
}

// forgetPeak makes the kernel measure the server's largest memory (VmHWM) from now on.
func (s *stack) forgetPeak(t *testing.T) {
	t.Helper()
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", s.cmd.Process.Pid), []byte("5"), 0); err != nil {
		t.Fatal(err)
	}
}
