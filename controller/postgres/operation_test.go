package postgres_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

func TestOperationIsFenced(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	op := d.operation(controller.OpForkCheckpoint, "first", time.Hour)
	if op.State != core.OperationRunning || op.LeaseEpoch != 1 || op.LeaseOwner != "first" || op.StartedAt.IsZero() {
		t.Errorf("%+v", op)
	}
	claim := func(owner string) []controller.Operation {
		var list []controller.Operation
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			var err error
			list, err = tx.ClaimOperations(ctx, owner, nil, time.Hour, 10)
			return err
		})
		return list
	}
	if got := claim("second"); len(got) != 0 {
		t.Errorf("claimed under a living lease: %+v", got)
	}
	d.exec(`UPDATE operations SET lease_expires_at = now() - interval '1 s'`)
	// Nobody took it: the owner may still renew, but only what it says it works on.
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		held, err := tx.RenewOperations(ctx, "first", nil, time.Hour)
		if len(held) != 0 {
			t.Errorf("renewed without being named: %v", held)
		}
		return err
	})
	got := claim("second")
	if len(got) != 1 || got[0].LeaseEpoch != 2 || got[0].LeaseOwner != "second" {
		t.Fatalf("claimed: %+v", got)
	}
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		held, err := tx.RenewOperations(ctx, "first", []core.OperationID{op.ID}, time.Hour)
		if len(held) != 0 {
			t.Errorf("the first owner renewed: %v", held)
		}
		return err
	})
	// The first owner wakes up: its step and its end change nothing.
	op.State, op.Result = core.OperationSucceeded, []byte(`{}`)
	for name, fn := range map[string]func(context.Context, controller.AllTx) error{
		"step": func(ctx context.Context, tx controller.AllTx) error { return tx.StepOperation(ctx, op, "fork") },
		"finish": func(ctx context.Context, tx controller.AllTx) error {
			_, err := tx.FinishOperation(ctx, op)
			return err
		},
	} {
		if err := d.try(controller.InProject(d.project), fn); !errors.Is(err, controller.ErrLeaseLost) {
			t.Errorf("%s under an old lease: %v", name, err)
		}
	}
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		if err := tx.StepOperation(ctx, got[0], "fork"); err != nil {
			return err
		}
		got[0].State, got[0].Problem, got[0].Timings = core.OperationFailed, core.Errorf(core.Unavailable, core.CodeForkFailed, "no"), []core.Timing{{Stage: "x", DurationMS: 1}}
		end, err := tx.FinishOperation(ctx, got[0])
		if err != nil || end.State != core.OperationFailed || end.Problem.Category != core.Unavailable || end.EndedAt.IsZero() || len(end.Timings) != 1 {
			t.Errorf("finished: %+v, %v", end, err)
		}
		return nil
	})
	if err := d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.FinishOperation(ctx, got[0])
		return err
	}); !errors.Is(err, controller.ErrLeaseLost) {
		t.Errorf("finished twice: %v", err)
	}
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		w := core.NewID[core.WorkspaceID]()
		list, err := tx.Operations(ctx, controller.OperationFilter{Page: controller.Page{Limit: 1}, WorkspaceID: w, Kinds: []controller.OperationKind{controller.OpTerminateWorkspace}})
		if len(list) > 0 {
			t.Errorf("operations on nothing: %+v", list)
		}
		return err
	})
}

// TestClaimsSkipEachOther lets four connections claim at once: every operation is claimed once.
func TestClaimsSkipEachOther(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	const n = 40
	for range n {
		d.operation(controller.OpForkCheckpoint, "gone", -time.Second)
	}
	var mu sync.Mutex
	claimed := map[core.OperationID]int{}
	var group sync.WaitGroup
	for _, owner := range []string{"a", "b", "c", "d"} {
		group.Go(func() {
			for {
				var list []controller.Operation
				if err := d.try(controller.System(), func(ctx context.Context, tx controller.AllTx) error {
					var err error
					list, err = tx.ClaimOperations(ctx, owner, nil, time.Hour, 3)
					return err
				}); err != nil {
					t.Error(err)
				}
				mu.Lock()
				for _, op := range list {
					claimed[op.ID]++
				}
				total := len(claimed)
				mu.Unlock()
				if len(list) == 0 && total == n || t.Failed() {
					return
				}
			}
		})
	}
	group.Wait()
	for id, times := range claimed {
		if times != 1 {
			t.Errorf("%s was claimed %d times", id, times)
		}
	}
	released := map[core.OperationID]bool{}
	d.system(func(ctx context.Context, tx controller.AllTx) error { return tx.ReleaseOperations(ctx, "a") })
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		list, err := tx.ClaimOperations(ctx, "e", nil, time.Hour, 100)
		for _, op := range list {
			released[op.ID] = true
			if op.LeaseEpoch != 3 {
				t.Errorf("%+v", op)
			}
		}
		return err
	})
	d.system(func(ctx context.Context, tx controller.AllTx) error { return tx.ReleaseOthers(ctx, "e") })
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		list, err := tx.ClaimOperations(ctx, "f", nil, time.Hour, 100)
		for _, op := range list {
			if op.LeaseEpoch != 2 && op.LeaseEpoch != 3 || released[op.ID] {
				t.Errorf("claimed though its owner had not released it: %+v", op)
			}
		}
		if len(list) != n-len(released) {
			t.Errorf("%d of %d were claimed", len(list), n-len(released))
		}
		return err
	})
}

func TestNotify(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	ctx, cancel := context.WithCancel(t.Context())
	heard, done := make(chan core.OperationID, 2), make(chan error, 1)
	go func() { done <- d.store.Listen(ctx, func(id core.OperationID) { heard <- id }, func(core.KeyID) {}) }()
	ids := []core.OperationID{core.NewID[core.OperationID](), core.NewID[core.OperationID]()}
	// Whether it listens already cannot be seen: say it until it was heard.
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	got := map[core.OperationID]bool{}
	for len(got) < 2 {
		select {
		case id := <-heard:
			got[id] = true
		case <-tick.C:
			if err := d.store.Notify(t.Context(), ids); err != nil {
				t.Fatal(err)
			}
		}
	}
	cancel()
	for {
		select {
		case <-heard:
		case err := <-done:
			if !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			return
		}
	}
}

var manySessions = controller.SessionQuota{Workspace: 1000, Project: 1000}

func TestSessions(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	w := d.ready(d.project, d.template())
	inherited := []core.SessionID{core.NewID[core.SessionID](), core.NewID[core.SessionID]()}
	own := controller.Session{ID: core.NewID[core.SessionID](), ProjectID: d.project, WorkspaceID: w.ID, SandboxID: w.Sandbox.ID}
	own.GuestID = own.ID
	var first []controller.Session
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		if err := tx.InsertSession(ctx, own, manySessions); err != nil {
			return err
		}
		var err error
		first, err = tx.MapSessions(ctx, w.Sandbox, append(inherited, own.GuestID), 10, manySessions)
		return err
	})
	public := map[core.SessionID]core.SessionID{}
	for _, s := range first {
		public[s.GuestID] = s.ID
	}
	if len(public) != 3 || public[own.GuestID] != own.ID || public[inherited[0]] == inherited[0] {
		t.Errorf("mapped: %v", public)
	}
	// Many list at once: the ids stay.
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			d.mine(func(ctx context.Context, tx controller.AllTx) error {
				again, err := tx.MapSessions(ctx, w.Sandbox, inherited, 10, manySessions)
				for _, s := range again {
					if public[s.GuestID] != s.ID {
						t.Errorf("%s has another id now", s.GuestID)
					}
				}
				return err
			})
		})
	}
	group.Wait()
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		got, err := tx.Session(ctx, own.ID)
		if got.SandboxID != w.Sandbox.ID {
			t.Errorf("%+v", got)
		}
		return err
	})
}

func TestAttachTokens(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	w := d.ready(d.project, d.template())
	s := controller.Session{ID: core.NewID[core.SessionID](), ProjectID: d.project, WorkspaceID: w.ID, SandboxID: w.Sandbox.ID}
	s.GuestID = s.ID
	d.mine(func(ctx context.Context, tx controller.AllTx) error { return tx.InsertSession(ctx, s, manySessions) })
	issue := func(secret string, ttl time.Duration) [32]byte {
		hash := sha256.Sum256([]byte(secret))
		d.mine(func(ctx context.Context, tx controller.AllTx) error {
			got, err := tx.InsertAttachToken(ctx, controller.AttachToken{Hash: hash, ProjectID: d.project, SessionID: s.ID, SandboxID: w.Sandbox.ID}, ttl)
			if got.Hash != hash || got.ExpiresAt.IsZero() {
				t.Errorf("%+v", got)
			}
			return err
		})
		return hash
	}
	use := func(hash [32]byte, id core.SessionID) error {
		return d.try(controller.System(), func(ctx context.Context, tx controller.AllTx) error {
			_, err := tx.UseAttachToken(ctx, hash, id)
			return err
		})
	}
	once := issue("once", time.Minute)
	wantCode(t, use(once, core.NewID[core.SessionID]()), core.CodeUnauthenticated) // another session's
	var group sync.WaitGroup
	var mu sync.Mutex
	won := 0
	for range 8 {
		group.Go(func() {
			if use(once, s.ID) == nil {
				mu.Lock()
				defer mu.Unlock()
				won++
			}
		})
	}
	group.Wait()
	if won != 1 {
		t.Errorf("%d used a token that works once", won)
	}
	wantCode(t, use(issue("old", -time.Second), s.ID), core.CodeUnauthenticated)
	wantCode(t, use(sha256.Sum256([]byte("unknown")), s.ID), core.CodeUnauthenticated)
	d.exec(`UPDATE attach_tokens SET expires_at = now() - interval '2 h'`)
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.SweepTokens(ctx, 10)
		return err
	})
	var left int
	if err := d.conn().QueryRow(t.Context(), `SELECT count(*) FROM attach_tokens`).Scan(&left); err != nil || left != 0 {
		t.Errorf("%d tokens left, %v", left, err)
	}
}

func TestPorts(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	w := d.ready(d.project, d.template())
	p := controller.Port{ID: core.NewID[core.PortID](), ProjectID: d.project, WorkspaceID: w.ID, GuestPort: 80, Listen: "127.0.0.1:0"}
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		if _, err := tx.InsertPort(ctx, p); err != nil {
			return err
		}
		got, err := tx.UpdatePort(ctx, p.ID, "127.0.0.1:8080")
		if got.Listen != "127.0.0.1:8080" || got.CreatedAt.IsZero() {
			t.Errorf("%+v", got)
		}
		list, listErr := tx.Ports(ctx, w.ID)
		if len(list) != 1 || list[0] != got {
			t.Errorf("%+v", list)
		}
		return errors.Join(err, listErr)
	})
	remove := func() error {
		return d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error { return tx.DeletePort(ctx, w.ID, p.ID) })
	}
	if err := remove(); err != nil {
		t.Error(err)
	}
	wantCode(t, remove(), core.CodePortNotFound)
	wantCode(t, d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.UpdatePort(ctx, p.ID, "x")
		return err
	}), core.CodePortNotFound)
}

// TestSessionQuotas fills a workspace and a project. Rows of a machine that has been replaced go, those of the present one stay.
func TestSessionQuotas(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	w := d.ready(d.project, d.template())
	insert := func(quota controller.SessionQuota) (err error) {
		s := controller.Session{ID: core.NewID[core.SessionID](), ProjectID: d.project, WorkspaceID: w.ID, SandboxID: w.Sandbox.ID}
		s.GuestID = s.ID
		d.mine(func(ctx context.Context, tx controller.AllTx) error {
			err = tx.InsertSession(ctx, s, quota)
			return nil
		})
		return err
	}
	small := controller.SessionQuota{Workspace: 3, Project: 5}
	for i := range 4 {
		if err := insert(small); (core.CodeOf(err) == core.CodeQuotaExceeded) != (i == 3) {
			t.Errorf("row %d: %v", i, err)
		}
	}
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.CountSessions(ctx, "", 10)
		return err
	})
	if err := insert(controller.SessionQuota{Workspace: 4, Project: 3}); err != nil {
		t.Errorf("a row of a project with room for all its workspaces: %v", err)
	}
	d.exec(`UPDATE quotas SET max_workspaces = 0 WHERE project_id = $1`, d.project)
	if err := insert(controller.SessionQuota{Workspace: 100, Project: 3}); core.CodeOf(err) != core.CodeQuotaExceeded {
		t.Errorf("a row beyond the project's: %v", err)
	}
	invented := make([]core.SessionID, 50)
	for i := range invented {
		invented[i] = core.NewID[core.SessionID]()
	}
	slices.Sort(invented)
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		got, err := tx.MapSessions(ctx, w.Sandbox, invented, 10, manySessions)
		if len(got) != 10 {
			t.Errorf("%d of 50 were mapped", len(got))
		}
		if again, err := tx.MapSessions(ctx, w.Sandbox, invented, 100, controller.SessionQuota{Workspace: 20, Project: 100}); err != nil || len(again) != 16 {
			t.Errorf("%d are mapped in a workspace of 20, %v", len(again), err)
		}
		return err
	})
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		n, err := tx.ForgetSessions(ctx, w.Sandbox, invented[:40], 0)
		if want := 4 + len(invented[40:]); n != want {
			t.Errorf("%d were forgotten, want %d: the newest were mapped first", n, want)
		}
		return err
	})
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		_, n, err := tx.SweepSessions(ctx, "", 0, 100)
		if n != 0 {
			t.Errorf("%d rows of a machine that runs were removed", n)
		}
		return err
	})
}
