package e2e

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// proveChecks breaks on purpose what the attacks must not break, and wants the checks to see it: a check that sees nothing would call every
// attack held. Of the disk it breaks the bound of the store, of leaks that of open files. It comes last, for it leaves a stack that is no longer the one that was attacked.
func (x *assault) proveChecks() {
	a, w := x.alice, x.alice.watch
	sees := func(what string, err error) {
		x.t.Helper()
		if err == nil {
			x.t.Errorf("the checks of this test do not see %s", what)
			return
		}
		x.t.Logf("seen on purpose: %s: %v", what, err)
	}
	clean := func(what string, err error) {
		x.t.Helper()
		if err != nil {
			x.t.Errorf("before %s: %v", what, err)
		}
	}

	clean("the secret was taken", x.leaked())
	x.take([]byte("x=" + x.secret))
	sees("a secret that the attacker has", x.leaked())

	clean("bytes were stored", w.disk())
	big := filepath.Join(x.store, "more")
	more := w.allowed("store") - (w.sizes()["store"] - w.base["store"]) + 1<<20
	if err := os.WriteFile(big, bytes.Repeat([]byte{1}, int(more)), 0o600); err != nil {
		x.t.Fatal(err)
	}
	sees(fmt.Sprintf("%d MiB more in the store", more>>20), w.disk())
	if err := os.Remove(big); err != nil {
		x.t.Fatal(err)
	}

	clean("a part may take less memory", w.fault())
	w.mu.Lock()
	for part, n := range w.peak {
		w.bounds[part] = n - 1
	}
	w.mu.Unlock()
	sees("memory above the bounds", w.fault())
	w.mu.Lock()
	w.bounds = memoryBounds
	w.mu.Unlock()

	p := w.first["egress"]
	w.remember("egress", lived{p.pid, p.start, p.files - moreFiles - 1, p.threads})
	sees("files that are kept open", w.leaks(time.Second))
	w.remember("egress", p)

	clean("the server stood still", a.fault())
	a.mu.Lock()
	longest := 2*a.bounds.calm + time.Second
	a.bounds.worst = longest
	a.mu.Unlock()
	x.standStill(longest + time.Second)
	sees("a server that stands still", a.fault())
	a.mu.Lock()
	a.bounds = waits{median: time.Minute, worst: time.Minute}
	a.mu.Unlock()

	clean("the egress process was killed", w.fault())
	if err := syscall.Kill(p.pid, syscall.SIGKILL); err != nil {
		x.t.Fatal(err)
	}
	x.awaitEnd(p)
	sees("an egress process that was killed", w.fault())

	if _, err := a.client.TerminateWorkspace(x.t.Context(), a.ws); err != nil {
		x.t.Fatal(err)
	}
	sees("a program of hers that has ended", a.lives())
	a.await(2)
	sees("a workspace of hers that is gone", a.fault())
}

func (w *watch) remember(part string, p lived) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.first[part] = p
}

// standStill stops the server for a while in which a round of Alice's is under way.
func (x *assault) standStill(d time.Duration) {
	pid := x.s.cmd.Process.Pid
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		x.t.Fatal(err)
	}
	<-time.After(d)
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
		x.t.Fatal(err)
	}
	x.alice.await(2)
}

// awaitEnd waits for the end of a process.
func (x *assault) awaitEnd(p lived) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for range 1000 {
		if start, err := startOf(p.pid); err != nil || start != p.start {
			return
		}
		<-tick.C
	}
	x.t.Fatal("the egress process does not end")
}
