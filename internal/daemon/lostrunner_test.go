package daemon_test

import (
	"context"
	"crypto/tls"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/mtls"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// joinedInTheTail loses that a runner joined, with everything that it did since: the new primary has never heard of it. The runner is taken in
// again by its certificate, under its own id. Nobody else becomes that runner by the token that is unspent again.
func joinedInTheTail(t *testing.T, f *overFailover) {
	t.Helper()
	known := f.token("") // to both servers; that it is spent is lost
	var late *member
	var ws coppice.Workspace
	var cp coppice.Checkpoint
	var unheard string // a token of the tail
	f.lose(func() {
		late = f.joinWith(known)
		f.drain(f.runner, true)
		ws = create(t, f.client)
		cp = f.capture(ws.ID)
		unheard = f.token("")
		if got := late.machines(t); len(got) != 1 {
			t.Fatalf("the runner that joined runs %q, so the test shows nothing", got)
		}
		for _, table := range []string{"runners WHERE id", "runner_identities WHERE runner_id"} {
			if f.pair.Number(f.pair.Standby(), `SELECT count(*) FROM `+table+` = $1`, late.ready.RunnerID) != 0 {
				t.Fatal("the standby knows the runner, so the test shows nothing")
			}
		}
	})
	id, was := late.ready.RunnerID, load(t, late).Identity.Leaf()
	f.waitForLate(late)

	until(t, "its machine has ended", func() (bool, error) { return !slices.Contains(late.machines(t), f.sandboxOf(ws)), nil })
	_, err := f.client.Workspace(t.Context(), ws.ID)
	wantCode(t, err, core.CodeWorkspaceNotFound)
	until(t, "the bytes are in its trash", func() (bool, error) {
		e, err := entryIn(trashOf(t, late), cp.ID)
		return e != nil, err
	})
	_, err = f.client.Checkpoint(t.Context(), cp.ID)
	wantCode(t, err, core.CodeCheckpointNotFound)
	for name, token := range map[string]string{"a token that was spent in the tail": known, "a token of the tail": unheard} {
		if code := joinAgain(t, f, token); code != core.CodeJoinTokenRefused {
			t.Errorf("%s: %q, want it refused", name, code)
		}
	}
	f.whole()

	f.worksAsBefore(late)
	if now := load(t, late); now.RunnerID != id || !now.Identity.Leaf().Equal(was) {
		t.Errorf("the runner was %s and is %s; the same certificate: %v", id, now.RunnerID, now.Identity.Leaf().Equal(was))
	}
	late.stop(t) // it leaves its machines to the next process, which needs no token
	late.cfg.Runner.JoinToken = ""
	late.process = begin(t, "runner", late.cfg, &late.ready)
	if late.ready.RunnerID != id {
		t.Errorf("the runner started again as %s, it was %s", late.ready.RunnerID, id)
	}
	f.worksAsBefore(late)
	f.removed(late)
}

// removedInTheTail loses that a runner was removed: its certificate lets it in again, until it is removed again.
func removedInTheTail(t *testing.T, f *overFailover) {
	t.Helper()
	m := f.joinWith(f.token(""))
	f.lose(func() { f.removed(m) })
	id := m.ready.RunnerID
	m.cfg.Runner.JoinToken = ""
	m.process = begin(t, "runner", m.cfg, &m.ready)
	f.joined = append(f.joined, m)
	if m.ready.RunnerID != id {
		t.Errorf("the runner started again as %s, it was %s", m.ready.RunnerID, id)
	}
	f.worksAsBefore(m)
	f.removed(m)
	f.whole()
}

// joinedAndRemovedInTheTail loses both, so the new primary has never heard of the runner. Its removal is repeated, answers that there is no such
// runner, and keeps it out all the same.
func joinedAndRemovedInTheTail(t *testing.T, f *overFailover) {
	t.Helper()
	known := f.token("") // to both servers; that it is spent is lost
	var m *member
	f.lose(func() {
		m = f.joinWith(known)
		f.removed(m)
	})
	id := string(m.ready.RunnerID)
	if f.pair.Number(f.pair.Primary(), `SELECT count(*) FROM runner_identities WHERE runner_id = $1`, id) != 0 {
		t.Fatal("the new primary knows the runner, so the test shows nothing")
	}
	wantCode(t, f.client.DeleteRunner(t.Context(), id, true), core.CodeRunnerNotFound)
	m.cfg.Runner.JoinToken = ""
	again := begin(t, "runner", m.cfg, nil)
	if status := again.wait(t); status == 0 || !strings.Contains(again.text(t), string(core.CodeRunnerRevoked)) {
		t.Errorf("the runner that was removed ended with status %d:\n%s", status, again.text(t))
	}
	if code := joinAgain(t, f, known); code != core.CodeJoinTokenRefused {
		t.Errorf("its token: %q, want it refused", code)
	}
	f.whole()
}

// joinWith starts a runner with a token. It lives as long as the installation.
func (f *overFailover) joinWith(token string) *member {
	f.t.Helper()
	m := &member{cfg: f.runnerConfig()}
	m.cfg.Runner.JoinToken = token
	f.toBoth(&m.cfg.Runner)
	m.process = begin(f.t, "runner", m.cfg, &m.ready)
	f.joined = append(f.joined, m)
	return m
}

func (f *overFailover) drain(m *member, on bool) {
	f.t.Helper()
	if _, err := f.client.DrainRunner(f.t.Context(), string(m.ready.RunnerID), on); err != nil {
		f.t.Fatal(err)
	}
}

// waitForLate waits until the new primary has a lease of a runner that it did not know. The process of the runner has gone on.
func (f *overFailover) waitForLate(m *member) {
	f.t.Helper()
	until(f.t, "the runner has registered again by itself", func() (bool, error) {
		return f.pair.Number(f.pair.Primary(), `SELECT count(*) FROM runners r JOIN runner_identities i ON i.runner_id = r.id
			WHERE r.id = $1 AND i.revoked_at IS NULL AND r.lease_expires_at > now() AND r.beat > 0`, m.ready.RunnerID) == 1, nil
	})
	select {
	case <-m.ended:
		f.t.Fatalf("the runner has ended with status %d", m.status)
	default:
	}
	if epoch := f.pair.Number(f.pair.Primary(), `SELECT lease_epoch FROM runners WHERE id = $1`, m.ready.RunnerID); epoch < 2 {
		f.t.Errorf("the lease has epoch %d, which the runner has had before", epoch)
	}
	if n := f.pair.Number(f.pair.Primary(), `SELECT count(*) FROM audit_records WHERE actor = $1 AND action = 'rejoin' AND object_id = $1`, m.ready.RunnerID); n != 1 {
		f.t.Errorf("%d audit records say that the runner was taken in again", n)
	}
}

// sandboxOf is what a workspace of the tail ran in.
func (f *overFailover) sandboxOf(ws coppice.Workspace) string {
	for what, id := range f.known {
		if what == ws.Network.Generation {
			return id
		}
	}
	f.t.Fatalf("no sandbox has the generation of %+v", ws)
	return ""
}

// joinAgain is another host that tries to join with a token.
func joinAgain(t *testing.T, f *overFailover, token string) core.Code {
	t.Helper()
	key, err := mtls.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	request, err := mtls.Request(key)
	if err != nil {
		t.Fatal(err)
	}
	joining := &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13, ServerName: "join.coppice.internal"}
	return say(t, joining, f.ready.Runners+runnerapi.PathJoin, runnerapi.Join{Token: token, CertificateRequest: request})
}

// worksAsBefore has a runner make machines and checkpoints, and renew its certificate.
func (f *overFailover) worksAsBefore(m *member) {
	f.t.Helper()
	f.drain(f.runner, true)
	defer f.drain(f.runner, false)
	var ws coppice.Workspace
	until(f.t, "a workspace is made there", func() (bool, error) {
		var err error
		ws, err = f.client.CreateWorkspace(f.t.Context(), coppice.CreateWorkspaceRequest{Image: "base", Resources: coppice.ResourcesRequest{MemoryMiB: new(128)}})
		return err == nil, err
	})
	if got := m.machines(f.t); len(got) == 0 {
		f.t.Error("the runner runs nothing, but the other one is draining")
	}
	echo(f.t, f.other, ws.ID)
	if _, err := f.other.ForkCheckpoint(f.t.Context(), f.capture(ws.ID).ID, coppice.ForkCheckpointRequest{}); err != nil {
		f.t.Error(err)
	}
	f.identities()
	mine := load(f.t, m).Identity.Client(mtls.ControllerName)
	key, err := mtls.NewKey()
	if err != nil {
		f.t.Fatal(err)
	}
	request, err := mtls.Request(key)
	if err != nil {
		f.t.Fatal(err)
	}
	if code := say(f.t, mine, f.ready.Runners+at(runnerapi.PathRenew, m.ready.RunnerID), runnerapi.Renew{CertificateRequest: request}); code != "" {
		f.t.Errorf("its certificate is not renewed: %s", code)
	}
}

// removed removes a runner for good: that its certificate is good does not bring it back.
func (f *overFailover) removed(m *member) {
	f.t.Helper()
	if err := f.client.DeleteRunner(f.t.Context(), string(m.ready.RunnerID), true); err != nil {
		f.t.Fatal(err)
	}
	if status := m.wait(f.t); status == 0 || !strings.Contains(m.text(f.t), string(core.CodeRunnerRevoked)) {
		f.t.Errorf("the runner ended with status %d:\n%s", status, m.text(f.t))
	}
	mine := load(f.t, m).Identity.Client(mtls.ControllerName)
	if code := say(f.t, mine, f.ready.Runners+runnerapi.PathRegister, struct{}{}); code != core.CodeRunnerRevoked {
		f.t.Errorf("a registration of a removed runner: %q", code)
	}
	f.joined = slices.DeleteFunc(f.joined, func(other *member) bool { return other == m })
}

// TestForgottenRunner takes a runner's identity out of the database, as a failover does that loses when the runner joined. The next message
// brings it back.
func TestForgottenRunner(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	m := c.join(nil)
	ws := create(t, c.client)
	db, err := pgx.Connect(t.Context(), c.cfg.Database)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close(context.WithoutCancel(t.Context())) }()
	if _, err := db.Exec(t.Context(), `DELETE FROM runner_identities WHERE runner_id = $1`, m.ready.RunnerID); err != nil {
		t.Fatal(err)
	}
	until(t, "its identity is back", func() (bool, error) {
		var n int
		err := db.QueryRow(t.Context(), `SELECT count(*) FROM runner_identities WHERE runner_id = $1 AND revoked_at IS NULL`, m.ready.RunnerID).Scan(&n)
		return n == 1, err
	})
	echo(t, c.client, ws.ID)
	if err := c.client.DeleteRunner(t.Context(), string(m.ready.RunnerID), true); err != nil {
		t.Fatal(err)
	}
	if status := m.wait(t); status == 0 || !strings.Contains(m.text(t), string(core.CodeRunnerRevoked)) {
		t.Errorf("the runner ended with status %d:\n%s", status, m.text(t))
	}
}
