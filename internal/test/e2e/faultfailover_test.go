package e2e

import (
	"context"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/runner/trash"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// failOver has the database fail over to an asynchronous standby that lacks a workspace that became ready, and a checkpoint of the parent.
// The machine of that workspace ends, and the bytes of the checkpoint are in the trash until an operator has its row again. The parent goes
// on, and no fork draws what another has drawn.
func failOver(t *testing.T, in *installation) {
	t.Helper()
	in.giveStandby(t)
	in.awaitParent(t)
	parent := in.host.mustMachine(t, in.parent)
	drawn := owners{}
	drawn.note(t, in, in.parent)

	in.pair.Cut()
	res, err := in.host.client.ForkCheckpoint(t.Context(), in.base(), coppice.ForkCheckpointRequest{})
	if err != nil || len(ids(res)) != 1 {
		t.Fatalf("%+v, %v", res, err)
	}
	lost := ids(res)[0]
	machine := in.host.mustMachine(t, lost)
	drawn.note(t, in, lost)
	in.step(t, "in the tail")
	stray := checkpoint(t, in.host, in.parent)
	strayPath := slices.Clone(in.path)
	row := in.sql(t, `SELECT to_jsonb(c)::text FROM checkpoints c WHERE id = $1`, stray.ID)[0]
	in.failOver(t)

	for i, c := range in.controllers {
		_, err := c.client.Workspace(t.Context(), lost)
		_ = wantCode(t, err, coppice.CodeWorkspaceNotFound)
		_, err = c.client.Checkpoint(t.Context(), stray.ID)
		_ = wantCode(t, err, coppice.CodeCheckpointNotFound)
		if w, err := c.client.Workspace(t.Context(), in.parent); err != nil || w.State != coppice.WorkspaceReady {
			t.Errorf("controller %d says that the parent is %s, %v", i, w.State, err)
		}
	}
	until(t, "the machine of the workspace that the database does not know has ended", func() (bool, error) {
		_, lives := in.host.vmms()[machine.pid]
		return !lives, nil
	})
	until(t, "the bytes that the database does not know are in the trash", func() (bool, error) { return in.inTrash(t, stray.ID), nil })
	if now := in.host.mustMachine(t, in.parent); now.pid != parent.pid {
		t.Errorf("the parent's VMM was %d and is %d", parent.pid, now.pid)
	}
	in.step(t, "after the failover")
	next := in.capture(t)
	for _, c := range fork(t, in.host, next, coppiceFork{count: 2}) {
		drawn.note(t, in, c.Workspace.ID)
		compare(t, "a fork of the parent after the failover", after(in.first, in.path...), look(t, in.host, c.Workspace.ID))
	}
	drawn.note(t, in, forkOne(t, in.host, in.base()))

	if out := in.operate(t, "runner-trash", "--data-dir", in.host.data); !strings.Contains(out, stray.ID) {
		t.Errorf("runner-trash does not list checkpoint %s:\n%s", stray.ID, out)
	}
	in.operate(t, "runner-trash", "keep", stray.ID, "--data-dir", in.host.data)
	in.recoverRow(t, row)
	in.checkCheckpoint(t, acknowledged{stray.ID, strayPath})
	if in.inTrash(t, stray.ID) {
		t.Error("the checkpoint was forked and is in the trash")
	}
	in.acked = append(in.acked, acknowledged{stray.ID, strayPath}) // it stays from now on
}

// giveStandby gives the database a standby, and both controllers the addresses of both servers.
func (in *installation) giveStandby(t *testing.T) {
	t.Helper()
	in.pair = testpg.PairOf(t, in.database, in.pgConfig.Dir, filepath.Join(in.dir, "standby"))
	for i, c := range in.controllers {
		c.kill()
		c.args[slices.Index(c.args, "--database")+1] = in.pair.DSN("postgres")
		in.startController(t, i, "")
	}
}

// failOver ends the primary and waits until both controllers use the standby.
func (in *installation) failOver(t *testing.T) {
	t.Helper()
	in.pair.Failover()
	in.database, in.pgConfig.Dir = in.pair.Primary(), filepath.Join(in.dir, "standby")
	for _, c := range in.controllers {
		until(t, "the controllers have gone over", func() (bool, error) {
			_, err := c.client.Ready(t.Context())
			return err == nil, nil
		})
	}
}

// owners are values that no two sandboxes may have, and the workspace that has each.
type owners map[string]coppice.WorkspaceID

// note has a workspace's guest draw random numbers, and wants nobody to have had them, or its identity.
func (d owners) note(t *testing.T, in *installation, id coppice.WorkspaceID) {
	t.Helper()
	w := workspace(t, in.host, id)
	drawn := execute(t, in.host, id, "cat", "/proc/sys/kernel/random/uuid", "/etc/machine-id")
	for _, v := range append(strings.Fields(drawn), w.Network.Generation, w.Network.MAC) {
		if other, taken := d[v]; taken {
			t.Errorf("%s and %s both have %s", other, id, v)
		}
		d[v] = id
	}
}

func (in *installation) inTrash(t *testing.T, id coppice.CheckpointID) bool {
	t.Helper()
	list, err := trash.List(trash.Dir(in.files()))
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(list, func(e trash.Entry) bool { return e.ID == core.CheckpointID(id) })
}

// operate runs a command of an operator on the runner's host.
func (in *installation) operate(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), in.runner.binary, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%q: %v\n%s", args, err, out)
	}
	return string(out)
}

// recoverRow writes the row of a checkpoint, as an operator does who has the data of the old primary. Triggers are off, because a checkpoint
// never begins as captured; so the quota is counted here.
func (in *installation) recoverRow(t *testing.T, row string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), in.database.DSN("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	if _, err := conn.Exec(t.Context(), `SET session_replication_role = replica`); err != nil {
		t.Fatal(err)
	}
	done, err := conn.Exec(t.Context(), `
		WITH c AS (INSERT INTO checkpoints SELECT * FROM jsonb_populate_record(NULL::checkpoints, $1::jsonb) RETURNING *)
		UPDATE quotas q SET checkpoints = q.checkpoints + 1, checkpoint_bytes = q.checkpoint_bytes + c.delta_bytes + c.device_state_bytes + c.disk_bytes
		FROM c WHERE q.project_id = c.project_id`, row)
	if err != nil || done.RowsAffected() != 1 {
		t.Fatalf("%s, %v", done, err)
	}
}
