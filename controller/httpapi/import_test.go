package httpapi_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/dir"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

const filePage = manifest.PageSize

// machine is a checkpoint as a runner writes it. What h does not say of it is made up.
func machine(ctx context.Context, blobs blob.Blobs, prefix string, h manifest.Header, seed byte) (*snapshotstore.Written, error) {
	if h.GuestImage == "" {
		class := runnerapi.RunnerClass{Arch: "amd64", Accelerator: "tcg", VMM: "qemu", VMMVersion: "7.2", MachineType: "pc-q35-7.2"}
		h.GuestImage, h.Class, h.Resources = core.DigestOf([]byte{seed}), class.Fields(), core.Resources{VCPUs: 1, MemoryMiB: 128, DiskGiB: 1}
	}
	return runnertest.WriteMachine(ctx, blobs, prefix, h, seed)
}

// exportedFile is a file of another cluster.
func exportedFile(seed byte) []byte {
	fail := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	ctx := context.Background()
	at, err := os.MkdirTemp("", "exported-*")
	fail(err)
	defer os.RemoveAll(at)
	blobs, err := dir.Open(at)
	fail(err)
	defer blobs.Close()
	w, err := machine(ctx, blobs, "v1/x/", manifest.Header{ProjectID: "prj_00000000000000000000000004", CheckpointID: "ckpt_00000000000000000000000008"}, seed)
	fail(err)
	e, err := snapshotstore.NewExport(w.Snapshot, "debian")
	fail(err)
	var b bytes.Buffer
	fail(e.Write(ctx, blobs, &b))
	return b.Bytes()
}

// sealed is a checkpoint of the fake runner's with a manifest as a real one writes it.
func (w *world) sealed(seed byte) api.Checkpoint {
	w.t.Helper()
	cp := w.checkpoint(w.create(fmt.Sprintf("of-%d", seed)).ID)
	u, err := w.runner.BeginSeal(w.t.Context(), sealer{w}, w.blobs, 1, core.CheckpointID(cp.ID))
	if err != nil {
		w.t.Fatal(err)
	}
	held, _ := w.runner.Held(core.CheckpointID(cp.ID))
	out, err := machine(w.t.Context(), w.blobs, u.Begun.Prefix, manifest.Header{
		ProjectID: u.Begun.ProjectID, CheckpointID: held.ID, Parent: held.Parent, GuestImage: held.Image, Class: held.Class.Fields(), Resources: held.Resources,
	}, seed)
	if err != nil {
		w.t.Fatal(err)
	}
	u.Commit.Stored.Manifest, u.Commit.Stored.Digest, u.Commit.Stored.Bytes, u.Commit.Needs = out.Manifest.Key, out.Manifest.Digest, out.Manifest.Bytes, out.Needs
	for _, o := range out.Objects {
		u.Commit.Written = append(u.Commit.Written, runnerapi.StoredObject{Key: o.Key, Bytes: o.Bytes})
	}
	if err := u.End(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
	w.want(200, "GET", "/v1/checkpoints/"+cp.ID, nil, &cp)
	return cp
}

func (w *world) importFile(query string, file []byte, header ...string) reply {
	w.t.Helper()
	h := map[string]string{"Content-Type": "application/octet-stream"}
	for i := 0; i < len(header); i += 2 {
		h[header[i]] = header[i+1]
	}
	return w.do(call{method: "POST", path: "/v1/checkpoints" + query, body: string(file), header: h})
}

// nothingLeft waits for nothing: it collects what attempts have left, and finds no object but those that were there.
func (w *world) nothingLeft(objects int) {
	w.t.Helper()
	w.sql(`UPDATE store_debris SET since = now() - interval '1 day'`)
	for range 2 {
		if _, err := w.control.CollectGarbage(w.t.Context(), false); err != nil {
			w.t.Fatal(err)
		}
	}
	var report api.StoreReport
	w.want(200, "GET", "/v1/store/check", nil, &report)
	if !report.Sound || report.Objects != objects || report.Uploading+report.Debris != 0 {
		w.t.Errorf("in the store: %+v, want %d objects", report, objects)
	}
	var imports, debris int
	if err := w.conn().QueryRow(w.t.Context(), `SELECT (SELECT count(*) FROM imports), (SELECT count(*) FROM store_debris)`).Scan(&imports, &debris); err != nil {
		w.t.Fatal(err)
	}
	if imports+debris != 0 {
		w.t.Errorf("%d imports and %d prefixes are left", imports, debris)
	}
}

func TestExportAndImport(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	young := w.checkpoint(w.create("young").ID)
	if p := w.do(call{method: "GET", path: "/v1/checkpoints/" + young.ID + "/export"}).problem(t); p.Status != 409 || p.Code != string(core.CodeCheckpointNotReady) {
		t.Errorf("before it is sealed: %+v", p)
	}
	cp := w.sealed(1)
	got := w.do(call{method: "GET", path: "/v1/checkpoints/" + cp.ID + "/export"})
	if got.status != 200 || got.header.Get("Content-Length") != fmt.Sprint(len(got.body)) || got.header.Get("Content-Disposition") == "" {
		t.Fatalf("%d %v", got.status, got.header)
	}
	if again := w.do(call{method: "GET", path: "/v1/checkpoints/" + cp.ID + "/export"}); !bytes.Equal(again.body, got.body) {
		t.Error("two exports differ")
	}
	if other := w.do(call{method: "GET", path: "/v1/checkpoints/" + cp.ID + "/export", key: w.secondProject()}); other.status != 404 {
		t.Errorf("another project: %d", other.status)
	}
	answer := w.importFile("?name=back", got.body)
	var in api.Checkpoint
	if err := json.Unmarshal(answer.body, &in); err != nil || answer.status != 201 {
		t.Fatalf("%d %s", answer.status, answer.body)
	}
	switch {
	case in.State != api.CheckpointSealed, in.Name != "back", in.ParentID != "", in.RunnerID != "", in.WorkspaceID != "", in.ID == cp.ID, in.Kind != api.CheckpointKindUser:
		t.Errorf("%+v", in)
	case in.Imported == nil || in.Imported.CheckpointID != cp.ID || in.Imported.ImageDigest != cp.Image.Digest || in.Image.Digest == in.Imported.ImageDigest:
		t.Errorf("imported: %+v, image %+v", in.Imported, in.Image)
	case in.Resources != cp.Resources || in.RunnerClass == nil || *in.RunnerClass != *cp.RunnerClass:
		t.Errorf("resources %+v, class %+v", in.Resources, in.RunnerClass)
	case in.DeltaBytes != 40*filePage || in.DiskBytes != 80*filePage || in.DeviceStateBytes != 9000 || in.PauseMS != 4.5:
		t.Errorf("sizes: %+v", in)
	case len(in.StalePRNGProcesses) != 1 || in.StalePRNGProcesses[0].Command != "a?b":
		t.Errorf("processes: %+v", in.StalePRNGProcesses)
	}
	var story []string
	var list api.AuditRecordList
	w.want(200, "GET", "/v1/audit?object_id="+in.ID, nil, &list)
	for _, r := range list.Items {
		story = append(story, r.Action+" "+r.After)
	}
	if fmt.Sprint(story) != "[importCheckpoint sealed importCheckpoint captured importCheckpoint capturing]" {
		t.Errorf("audit: %q", story)
	}
	w.want(200, "GET", "/v1/audit?object_id="+cp.ID+"&action=exportCheckpoint", nil, &list)
	if len(list.Items) == 0 {
		t.Error("an export is not recorded")
	}
	if again := w.importFile("?name=back", got.body); again.problem(t).Code != string(core.CodeNameTaken) {
		t.Errorf("the name again: %s", again.body)
	}
	if bad := w.importFile("?name=Back", got.body); bad.status != 400 {
		t.Errorf("a bad name: %d", bad.status)
	}
	if bad := w.importFile("", got.body, "Content-Type", "application/json"); bad.status != 415 {
		t.Errorf("another type: %d", bad.status)
	}
	w.nothingLeft(4)
	// What was imported can be exported, and means the same.
	out := w.do(call{method: "GET", path: "/v1/checkpoints/" + in.ID + "/export"})
	third := w.importFile("", out.body)
	var last api.Checkpoint
	if err := json.Unmarshal(third.body, &last); err != nil || last.Image.Digest != in.Image.Digest {
		t.Errorf("%d %s", third.status, third.body)
	}
	for _, id := range []string{in.ID, last.ID, cp.ID} {
		w.want(204, "DELETE", "/v1/checkpoints/"+id, nil, nil)
	}
	if _, err := w.control.CollectGarbage(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	w.sql(`UPDATE store_objects SET condemned_at = now() - interval '1 day' WHERE condemned_at IS NOT NULL`)
	w.nothingLeft(0)
}

// TestImportRefused: what cannot be imported changes nothing, and says why in the client's words.
func TestImportRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	file := exportedFile('a')
	before := w.dump()
	r := rand.New(rand.NewPCG(1, 2))
	check := func(what string, status int, code core.Code, file []byte) {
		t.Helper()
		if got := w.importFile("", file); got.status != status || got.problem(t).Code != string(code) {
			t.Errorf("%s: %d %s", what, got.status, got.body)
		}
	}
	for range 40 {
		at, n := 8+r.IntN(len(file)-8), r.IntN(len(file))
		b := bytes.Clone(file)
		b[at] ^= 1 << r.IntN(8)
		check(fmt.Sprintf("byte %d flipped", at), 400, core.CodeImportInvalid, b)
		check(fmt.Sprintf("cut off after %d", n), 400, core.CodeImportInvalid, file[:n])
	}
	check("nothing", 400, core.CodeImportInvalid, nil)
	check("another version", 400, core.CodeUnsupported, append([]byte("COPPEXP9"), file[8:]...))
	w.sql(`UPDATE quotas SET max_checkpoint_bytes = 300000`)
	check("too much", 429, core.CodeQuotaExceeded, file)
	w.sql(`UPDATE quotas SET max_checkpoint_bytes = 1 << 40, max_checkpoints = 0`)
	check("too many", 429, core.CodeQuotaExceeded, file)
	w.sql(`UPDATE quotas SET max_checkpoints = 1000000`)
	key := w.newKey("plain")
	got := w.do(call{method: "POST", path: "/v1/checkpoints", body: string(file), header: map[string]string{"Content-Type": "application/octet-stream"}, key: key.Secret})
	if got.status != 403 || !strings.Contains(string(got.body), "checkpoint:import") {
		t.Errorf("a key that was made without naming scopes: %d %s", got.status, got.body)
	}
	w.sql(`UPDATE quotas SET max_checkpoint_bytes = 109951162777600`)
	w.nothingLeft(0)
	if after := w.dump(); after != before && !strings.Contains(after, key.Key.ID) {
		t.Errorf("rows have changed:\n%s\n%s", before, after)
	}
	// A key is free again when its request has come to nothing.
	if bad := w.importFile("", file[:len(file)-1], "Idempotency-Key", "once"); bad.status != 400 {
		t.Errorf("%d %s", bad.status, bad.body)
	}
	if good := w.importFile("", file, "Idempotency-Key", "once"); good.status != 201 {
		t.Errorf("%d %s", good.status, good.body)
	}
}

// storedBytes is what is in the bucket, whatever the rows say.
func (w *world) storedBytes() (n int64) {
	w.t.Helper()
	for info, err := range w.blobs.List(w.t.Context(), "v1/") {
		if err != nil {
			w.t.Fatal(err)
		}
		n += info.Size
	}
	return n
}

// TestFailedImportsKeepNoBytes: no quota counts what an import has stored that fails at its last byte, so it is removed at once, not after
// the store's grace.
func TestFailedImportsKeepNoBytes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	file := exportedFile('a')
	before := w.storedBytes()
	bad := bytes.Clone(file)
	bad[len(bad)-1] ^= 1
	for range 5 {
		if got := w.importFile("", bad); got.status != 400 {
			t.Fatalf("%d %s", got.status, got.body)
		}
	}
	if n := w.storedBytes() - before; n != 0 {
		t.Errorf("five files of %d bytes that were refused left %d bytes in the store", len(bad), n)
	}
	w.nothingLeft(0)
}

// TestDeletedImportsAreBounded: what a project imports and deletes stays in the store for the grace, and the quota of live checkpoints does
// not count it. A loop of imports and deletions ends at a bound of its own, and goes on when the store has removed what was deleted.
func TestDeletedImportsAreBounded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	file := exportedFile('a')
	const quota = 700_000 // one import is charged 500 KB
	w.sql(fmt.Sprintf(`UPDATE quotas SET max_checkpoint_bytes = %d`, quota))
	before, most := w.storedBytes(), 0
	for ; most < 20; most++ {
		got := w.importFile("", file)
		if got.status == 429 {
			if p := got.problem(t); p.Code != string(core.CodeQuotaExceeded) || !strings.Contains(p.Detail, "deleted") {
				t.Errorf("%+v", p)
			}
			break
		}
		var cp api.Checkpoint
		if err := json.Unmarshal(got.body, &cp); got.status != 201 || err != nil {
			t.Fatalf("import %d: %d %s", most, got.status, got.body)
		}
		w.want(204, "DELETE", "/v1/checkpoints/"+cp.ID, nil, nil)
	}
	if n := w.storedBytes() - before; most < 1 || most == 20 || n > 3*quota {
		t.Errorf("%d imports and deletions were taken, and %d bytes are stored, with a quota of %d", most, n, quota)
	}
	if _, err := w.control.CollectGarbage(t.Context(), false); err != nil { // condemns them
		t.Fatal(err)
	}
	if got := w.importFile("", file); got.status != 429 {
		t.Errorf("what is condemned still takes room: %d %s", got.status, got.body)
	}
	w.sql(`UPDATE store_objects SET condemned_at = now() - interval '1 day' WHERE condemned_at IS NOT NULL`)
	if _, err := w.control.CollectGarbage(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	if got := w.importFile("", file); got.status != 201 {
		t.Errorf("after the store has removed them: %d %s", got.status, got.body)
	}
}

// TestImportsTakeTurns: as many as there may be, and one that was cut off has left nothing.
func TestImportsTakeTurns(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	file := exportedFile('a')
	ctx, cancel := context.WithCancel(t.Context())
	var writers []*io.PipeWriter
	done := make(chan struct{}, 16)
	for range 4 {
		r, out := io.Pipe()
		writers = append(writers, out)
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.url+"/v1/checkpoints", r)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+apiKey)
		go func() {
			if res, err := http.DefaultClient.Do(req); err == nil {
				_ = res.Body.Close()
			}
			done <- struct{}{}
		}()
		if _, err := out.Write(file[:len(file)-100]); err != nil { // so it has begun
			t.Fatal(err)
		}
	}
	w.importsUnderWay(4)
	if got := w.importFile("", file); got.status != 429 || got.problem(t).Code != string(core.CodeCapacity) {
		t.Errorf("%d %s", got.status, got.body)
	}
	cancel()
	for _, out := range writers {
		_ = out.CloseWithError(context.Canceled)
		<-done
	}
	w.importsUnderWay(0)
	if got := w.importFile("", file); got.status != 201 {
		t.Errorf("%d %s", got.status, got.body)
	}
	w.nothingLeft(2)
}

// importsUnderWay waits until there are so many.
func (w *world) importsUnderWay(want int) {
	w.t.Helper()
	conn, got, until := w.conn(), -1, time.Now().Add(watchdog)
	for got != want && time.Now().Before(until) {
		<-time.After(10 * time.Millisecond)
		if err := conn.QueryRow(w.t.Context(), `SELECT count(*) FROM imports`).Scan(&got); err != nil {
			w.t.Fatal(err)
		}
	}
	if got != want {
		w.t.Fatalf("%d imports are under way, not %d", got, want)
	}
}

// TestImportAbandoned: an import whose controller died is given up when nobody renews it, and its key is free.
func TestImportAbandoned(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	project, err := w.control.Bootstrap(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	id := core.NewID[core.CheckpointID]()
	w.sql(`INSERT INTO imports (checkpoint_id, project_id, lease_expires_at) VALUES ($1, $2, now())`, id, project.ID)
	w.sql(`INSERT INTO idempotency_keys (project_id, key, hash, object_id, expires_at) VALUES ($1, 'k', sha256('x'), $2, now() + interval '1 day')`, project.ID, id)
	if _, err := machine(t.Context(), w.blobs, fmt.Sprintf("v1/%s/%s/1/", project.ID, id), manifest.Header{ProjectID: project.ID, CheckpointID: id}, 1); err != nil {
		t.Fatal(err)
	}
	w.importsUnderWay(0) // the periodic job runs
	var keys int
	if err := w.conn().QueryRow(t.Context(), `SELECT count(*) FROM idempotency_keys`).Scan(&keys); err != nil || keys > 0 {
		t.Errorf("%d keys are taken, %v", keys, err)
	}
	w.nothingLeft(0)
}

// TestKilledImport kills a controller process in the middle of an import. Nothing of it is a checkpoint; the client repeats its request, with its
// key, and in the end there is one and nothing else.
func TestKilledImport(t *testing.T) {
	t.Parallel()
	for _, point := range []string{"controller.import_begun", "controller.import_written"} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			file := exportedFile('a')
			url, cmd := w.killed(point)
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/checkpoints", bytes.NewReader(file))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Authorization", "Bearer "+apiKey)
			req.Header.Set("Idempotency-Key", "k")
			if res, err := http.DefaultClient.Do(req); err == nil {
				t.Errorf("it answered %s", res.Status)
				_ = res.Body.Close()
			}
			_ = cmd.Wait()
			w.importsUnderWay(1)
			if got := w.importFile("", file, "Idempotency-Key", "k"); got.status != 409 || got.problem(t).Code != string(core.CodeIdempotencyInProgress) {
				t.Errorf("while nobody knows that it died: %d %s", got.status, got.body)
			}
			var report api.StoreReport
			w.want(200, "GET", "/v1/store/check", nil, &report)
			if !report.Sound || report.Objects != 0 || (report.Uploading > 0) != (point == "controller.import_written") {
				t.Errorf("in the store: %+v", report)
			}
			w.sql(`UPDATE imports SET lease_expires_at = now()`)
			w.importsUnderWay(0)
			if got := w.importFile("", file, "Idempotency-Key", "k"); got.status != 201 {
				t.Errorf("%d %s", got.status, got.body)
			}
			w.nothingLeft(2)
		})
	}
}

// TestImportLost: one that was given up meanwhile is no checkpoint, and says that it can be repeated.
func TestImportLost(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	file := exportedFile('a')
	r, out := io.Pipe()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, w.url+"/v1/checkpoints", r)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+apiKey)
	status := make(chan int, 1)
	go func() {
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Error(err)
			status <- 0
			return
		}
		_ = res.Body.Close()
		status <- res.StatusCode
	}()
	if _, err := out.Write(file[:len(file)-100]); err != nil {
		t.Fatal(err)
	}
	w.importsUnderWay(1)
	w.sql(`DELETE FROM imports`)
	w.nothingLeft(0) // what it writes from now on is found again
	if _, err := out.Write(file[len(file)-100:]); err != nil {
		t.Fatal(err)
	}
	_ = out.Close()
	if got := <-status; got != http.StatusServiceUnavailable {
		t.Errorf("it answered %d", got)
	}
	w.nothingLeft(0)
}

// TestExportScope: a key that sees the tree does not get what guests hold.
func TestExportScope(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	path := "/v1/checkpoints/" + string(core.NewID[core.CheckpointID]()) + "/export"
	reader, both := w.newKey("reader", core.ScopeCheckpointRead), w.newKey("both", core.ScopeCheckpointRead, core.ScopeWorkspaceExec)
	if got := w.do(call{method: "GET", path: path, key: reader.Secret}); got.status != 403 || !strings.Contains(string(got.body), "workspace:exec") {
		t.Errorf("without workspace:exec: %d %s", got.status, got.body)
	}
	if got := w.do(call{method: "GET", path: path, key: both.Secret}); got.status != 404 {
		t.Errorf("with it: %d %s", got.status, got.body)
	}
}
