package netns

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netns"

	"github.com/coppice-dev/coppice/core"
)

// churnForever is the process that TestReconcileAfterKill kills: it makes and uses namespaces in every way, as fast
// as it can, and writes a byte to standard output for each life.
func churnForever(cluster string) {
	ctx := context.Background()
	p, err := NewPool(Config{ClusterID: cluster, Warm: 4, Max: 16, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	go func() { _ = p.Run(ctx) }()
	for w := range 3 {
		go func() {
			for i := 0; ; i++ {
				if err := churnOnce(ctx, p, w*1000+i%1000); err != nil {
					fmt.Fprintln(os.Stderr, err)
					os.Exit(1)
				}
				_, _ = os.Stdout.Write([]byte{'.'})
			}
		}()
	}
	select {}
}

func churnOnce(ctx context.Context, p *Pool, i int) error {
	n, err := p.Acquire(ctx)
	if err != nil {
		return err
	}
	policy := core.EgressDenyAll
	if i%2 == 0 {
		policy = core.EgressAllowAll
	}
	if err := errors.Join(n.Assign(ctx, identity(i+1)), n.Open(ctx, policy)); err != nil {
		return err
	}
	if _, err := n.Listen(ctx, "tcp", ":0"); err != nil {
		return err
	}
	return n.Release(ctx)
}

// TestReconcileAfterKill kills a busy process at random moments, again and again, and expects Reconcile to remove
// all of it, and nothing of another cluster that lives on the same host.
func TestReconcileAfterKill(t *testing.T) {
	t.Parallel()
	needNetns(t)
	host := newTestSpace(t)
	cluster, foreign := "killed "+newID(), "foreign "+newID()
	neighbour := openTestPool(t, host, foreign, nil)
	neighbour.checkCleanAtEnd(t)
	theirs := acquireOpen(t, neighbour, identity(1), core.EgressAllowAll)
	before := tracesOf(t, neighbour.names, host)
	if len(before) != 4 { // file, mount, link, table
		t.Fatalf("the neighbour shows %v", before)
	}
	const rounds = 8
	for round := range rounds {
		killChurn(t, host, cluster, round)
		p := openTestPool(t, host, cluster, nil)
		left := tracesOf(t, p.names, host)
		must(t, p.Reconcile(t.Context(), nil))
		if still := tracesOf(t, p.names, host); len(still) != 0 {
			t.Fatalf("round %d: of %d traces Reconcile left %v", round, len(left), still)
		}
		must(t, p.Close(t.Context()))
	}
	if after := tracesOf(t, neighbour.names, host); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("the neighbour had %v and has %v", before, after)
	}
	if _, open := theirs.IsOpen(); !open {
		t.Error("the neighbour's namespace is not open any more")
	}
	must(t, theirs.pool.checkUplink(theirs.space))
}

// killChurn runs churnForever on the host and kills it after some lives and a random while.
func killChurn(t *testing.T, host netns.NsHandle, cluster string, round int) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), crashVariable+"="+cluster)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, inside(host, cmd.Start))
	_, err = io.ReadFull(out, make([]byte, 1+round))
	if err != nil {
		t.Errorf("the child ended by itself: %s", stderr.String())
	}
	<-time.After(rand.N(20 * time.Millisecond)) // the random moment is the point
	must(t, cmd.Process.Kill())
	_ = cmd.Wait() // says that it was killed
}
