//go:build linux

package guestagent

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/guesttest"
	"github.com/coppice-dev/coppice/guestagent/procfs"
)

func TestFlush(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	flush := func(ms int) (guestapi.FlushResponse, error) {
		return guesttest.Ask[guestapi.FlushResponse](a, http.MethodPost, guestapi.PathFlush, guestapi.FlushRequest{TimeoutMS: ms})
	}
	if _, err := flush(-1); core.CodeOf(err) != core.CodeInvalidField {
		t.Errorf("got %v", err)
	}
	if _, err := flush(3_600_000); core.CodeOf(err) != core.CodeInvalidField {
		t.Errorf("got %v", err)
	}
	a.disk.path = filepath.Join(t.TempDir(), "absent")
	if out, err := flush(1000); err != nil || out.Flushed {
		t.Errorf("a disk that is not there: %+v, %v", out, err)
	}
	a.disk.path = t.TempDir()
	if out, err := flush(20_000); err != nil || !out.Flushed {
		t.Errorf("%+v, %v", out, err)
	}
	a.disk.busy <- struct{}{} // an earlier flush still runs in the kernel
	if out, err := flush(1); err != nil || out.Flushed {
		t.Errorf("while another is under way: %+v, %v", out, err)
	}
	<-a.disk.busy
	if out, err := flush(20_000); err != nil || !out.Flushed {
		t.Errorf("after it: %+v, %v", out, err)
	}
}

// TestQuiesceSaysWhatRuns: the answer to a quiesce names the processes and says whether the disk was flushed. A
// repeated quiesce gets the same answer.
func TestQuiesceSaysWhatRuns(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	a.disk.path = t.TempDir()
	s := a.StartSession(guestapi.SessionSpec{Command: []string{"sleep", "1000"}})
	b := a.StartSession(guestapi.SessionSpec{Command: []string{"sh", "-c", "exec cat"}, StdinOpen: true})
	started := func() error { // a starting program first has another name, and then, for a moment, its own name and no arguments
		for _, want := range []struct {
			pid  int
			comm string
		}{{s.PID, "sleep"}, {b.PID, "cat"}} {
			st, err := procfs.ReadStat("/proc", want.pid)
			args, argsErr := os.ReadFile(filepath.Join("/proc", strconv.Itoa(want.pid), "cmdline"))
			if err = errors.Join(err, argsErr); err != nil || st.Comm != want.comm || len(args) == 0 {
				return errors.Join(err, errors.New(want.comm+" does not run yet"))
			}
		}
		return nil
	}
	poll, deadline := time.NewTicker(time.Millisecond), time.After(guesttest.Watchdog)
	defer poll.Stop()
	for err := started(); err != nil; err = started() {
		select {
		case <-poll.C:
		case <-deadline:
			t.Fatal(err)
		}
	}
	for range 2 {
		out, err := guesttest.Ask[guestapi.QuiesceResponse](a, http.MethodPost, guestapi.PathQuiesce, guestapi.QuiesceRequest{CaptureID: "c", FlushMS: 20_000})
		if err != nil || !out.Flushed || out.WorkloadTruncated || len(out.Workload) != 2 {
			t.Fatalf("%+v, %v", out, err)
		}
		for i, want := range []core.WorkloadProcess{{PID: s.PID, Command: "sleep", Args: "sleep 1000"}, {PID: b.PID, Command: "cat", Args: "cat"}} {
			got := out.Workload[i]
			if want.StartTicks = got.StartTicks; got != want || got.StartTicks == 0 {
				t.Errorf("got %+v, want %+v", got, want)
			}
		}
	}
}
