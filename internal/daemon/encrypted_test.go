package daemon_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/klauspost/compress/zstd"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/masterkey"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// formsOf are ways in which bytes could be written somewhere.
func formsOf(b []byte) [][]byte {
	forms := [][]byte{b, []byte(hex.EncodeToString(b)), []byte(strings.ToUpper(hex.EncodeToString(b)))}
	for skip := range 3 { // base64 of what begins in any place of three bytes
		text := base64.StdEncoding.EncodeToString(b[skip:])
		forms = append(forms, []byte(text[:len(text)-4]))
	}
	return forms
}

// unpacked is what a file has, and what comes out of the zstd frames that are in it.
func unpacked(b []byte) []byte {
	z, err := zstd.NewReader(nil, zstd.WithDecoderMaxMemory(16<<20))
	if err != nil {
		panic(err) // the options are constants
	}
	defer z.Close()
	out := bytes.Clone(b)
	for rest := b; ; {
		i := bytes.Index(rest, []byte{0x28, 0xb5, 0x2f, 0xfd})
		if i < 0 {
			return out
		}
		plain, _ := z.DecodeAll(rest[i:], nil) // as far as it is frames
		out, rest = append(out, plain...), rest[i+4:]
	}
}

// filesWith names the files below directories that have bytes in any form.
func filesWith(t *testing.T, b []byte, dirs ...string) []string {
	t.Helper()
	var found []string
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return nil //nolint:nilerr // it went while others work there
			}
			content, err := os.ReadFile(path)
			content = unpacked(content)
			for _, form := range formsOf(b) {
				if err == nil && bytes.Contains(content, form) {
					found = append(found, path)
					break
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return found
}

// dump is everything that a database has, as text.
func dump(t *testing.T, dsn string) []byte {
	t.Helper()
	db, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close(context.WithoutCancel(t.Context())) }()
	if _, err := db.Exec(t.Context(), `SELECT set_config('coppice.project_id', 'system', false)`); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	rows, err := db.Query(t.Context(), `SELECT format('%I.%I', schemaname, tablename) FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')`)
	if err != nil {
		t.Fatal(err)
	}
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(tables) < 20 {
		t.Fatalf("%d tables, %v", len(tables), err)
	}
	for _, table := range tables {
		rows, err := db.Query(t.Context(), "SELECT t::text FROM "+table+" t")
		if err != nil {
			t.Fatal(err)
		}
		text, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(&out, table, text)
	}
	return out.Bytes()
}

// dataKeys are the keys of a project, as only who has the master key can know them.
func dataKeys(t *testing.T, dsn, master string) (keys [][]byte) {
	t.Helper()
	ring, err := masterkey.OpenRing(master)
	if err != nil {
		t.Fatal(err)
	}
	db, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close(context.WithoutCancel(t.Context())) }()
	if _, err := db.Exec(t.Context(), `SELECT set_config('coppice.project_id', 'system', false)`); err != nil {
		t.Fatal(err)
	}
	rows, err := db.Query(t.Context(), `SELECT master_id, format('key %s of project %s', version, project_id), sealed_key FROM project_keys`)
	if err != nil {
		t.Fatal(err)
	}
	var id, name string
	var wrapped []byte
	if _, err := pgx.ForEachRow(rows, []any{&id, &name, &wrapped}, func() error {
		k, err := ring.Unwrap(t.Context(), id, name, wrapped)
		keys = append(keys, bytes.Clone(k[:]))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return keys
}

func newMaster(t *testing.T, lines ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "master.key")
	if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestEncryptedPool makes a tree in a project that encrypts: what a guest has written is unencrypted only on the hosts that run it, another
// runner goes on with nothing but PostgreSQL, the store and the master key, and without that key nothing is started.
func TestEncryptedPool(t *testing.T) {
	t.Parallel()
	files := t.TempDir()
	store := daemon.StoreConfig{URL: "dir:" + files, CacheSize: 1 << 30}
	old, fresh := daemon.NewSecret(), daemon.NewSecret()
	c := newClusterOf(t, func(cfg *daemon.ControllerConfig) {
		cfg.Store, cfg.Tune.RunnerLease, cfg.MasterKeys = store, 3*time.Second, newMaster(t, old)
	})
	ctx := t.Context()
	inStore := func(rc *daemon.RunnerConfig) { rc.Store = store }
	first := c.join(inStore)
	self, err := c.client.Self(ctx)
	if err != nil {
		t.Fatal(err)
	}
	ws := create(t, c.client)
	canary := func() []byte {
		k := core.NewDataKey()
		return append(k[:], k[:]...)
	}
	sealed := func(content []byte) coppice.CheckpointID {
		t.Helper()
		if _, err := c.client.WriteFile(ctx, ws.ID, "/note", bytes.NewReader(content), coppice.WriteOptions{}); err != nil {
			t.Fatal(err)
		}
		cp, err := c.client.CreateCheckpoint(ctx, ws.ID, coppice.CreateCheckpointRequest{})
		if err != nil {
			t.Fatal(err)
		}
		got, err := c.client.WaitSealed(ctx, cp.ID)
		if err != nil || got.State != coppice.CheckpointSealed {
			t.Fatalf("%+v, %v", got, err)
		}
		return cp.ID
	}
	objects := func(id coppice.CheckpointID, suffix string) {
		t.Helper()
		list, err := filepath.Glob(filepath.Join(files, "v1", self.ProjectID, id, "*", "*"))
		if err != nil || len(list) < 2 {
			t.Fatalf("%s: %q, %v", id, list, err)
		}
		for _, path := range list {
			if strings.HasSuffix(path, suffix) != (suffix != "") && strings.Contains(filepath.Base(path), ".k") {
				t.Errorf("%s: %s", suffix, path)
			}
		}
	}
	// Unencrypted, it can be found: else this test would show nothing.
	open, secret, later := canary(), canary(), canary()
	plain := sealed(open)
	objects(plain, "")
	if found := filesWith(t, open[:32], files); len(found) == 0 {
		t.Fatal("what is stored unencrypted is not found in the store")
	}
	p, err := c.client.PatchProject(ctx, self.ProjectID, coppice.PatchProjectRequest{Encryption: coppice.EncryptionEnvelope})
	if err != nil || p.Encryption != coppice.EncryptionEnvelope || p.KeyVersion != 1 {
		t.Fatalf("%+v, %v", p, err)
	}
	cp := sealed(secret)
	objects(cp, ".k1")
	for range 2 { // to say it twice changes nothing
		if p, err = c.client.PatchProject(ctx, self.ProjectID, coppice.PatchProjectRequest{KeyVersion: 2}); err != nil || p.KeyVersion != 2 {
			t.Fatalf("%+v, %v", p, err)
		}
	}
	next := sealed(later)
	objects(next, ".k2")
	second := c.join(inStore)
	first.kill()
	forkHas := func(id coppice.CheckpointID, want []byte) {
		t.Helper()
		var forked coppice.ForkResult
		until(t, "it is forked on the runner that lives", func() (bool, error) {
			var err error
			forked, err = c.client.ForkCheckpoint(ctx, id, coppice.ForkCheckpointRequest{})
			return err == nil, err
		})
		got, err := c.client.ReadFile(ctx, forked.Children[0].Workspace.ID, "/note", 100)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("a child of %s has %d other bytes, %v", id, len(got), err)
		}
	}
	forkHas(next, later)
	forkHas(cp, secret)
	forkHas(plain, open)
	// An export is unencrypted.
	file, _, err := c.client.ExportCheckpoint(ctx, cp)
	if err != nil {
		t.Fatal(err)
	}
	exported, err := io.ReadAll(file)
	if err != nil || !bytes.Contains(unpacked(exported), []byte(base64.StdEncoding.EncodeToString(secret))) {
		t.Errorf("an export of %d bytes, %v", len(exported), err)
	}
	_ = file.Close()
	caches := []string{filepath.Join(filepath.Dir(first.cfg.Runner.DataDir), "cache"), filepath.Join(first.cfg.Runner.DataDir, "cache"), filepath.Join(second.cfg.Runner.DataDir, "cache")}
	logs := []string{c.log, first.log, second.log}
	rows := dump(t, c.cfg.Database)
	for name, b := range map[string][]byte{"memory": secret[:32], "memory under the next key": later[:32]} {
		if found := filesWith(t, b, append(append([]string{files}, caches...), logs...)...); len(found) > 0 {
			t.Errorf("%s is in %q", name, found)
		}
		for _, form := range formsOf(b) {
			if bytes.Contains(rows, form) {
				t.Errorf("%s is in the database", name)
			}
		}
	}
	for _, k := range dataKeys(t, c.cfg.Database, c.cfg.MasterKeys) {
		if found := filesWith(t, k, append([]string{files, first.cfg.Runner.DataDir, second.cfg.Runner.DataDir, first.cfg.RunDir, second.cfg.RunDir}, logs...)...); len(found) > 0 {
			t.Errorf("a project's key is in %q", found)
		}
		for _, form := range formsOf(k) {
			if bytes.Contains(rows, form) {
				t.Error("a project's key is in the database")
			}
		}
	}

	// Without the master key nothing is started; what is unencrypted goes on.
	restart := func(lines ...string) {
		t.Helper()
		c.stop(t)
		c.cfg.MasterKeys = newMaster(t, lines...)
		c.start()
	}
	restart(fresh)
	second.kill()
	third := c.join(inStore)
	until(t, "it is refused", func() (bool, error) {
		_, err := c.client.ForkCheckpoint(ctx, next, coppice.ForkCheckpointRequest{})
		return errors.Is(err, coppice.CodeKeyUnavailable), err
	})
	if _, _, err := c.client.ExportCheckpoint(ctx, cp); !errors.Is(err, coppice.CodeKeyUnavailable) {
		t.Errorf("an export: %v", err)
	}
	check := func() (sum coppice.StoreData) {
		t.Helper()
		for next := ""; ; next = sum.Next {
			page, err := c.client.CheckStoreData(ctx, coppice.StorePart{Which: 1, Of: 1}, next)
			if err != nil {
				t.Fatal(err)
			}
			page.Problems = append(sum.Problems, page.Problems...)
			if sum = page; sum.Next == "" {
				return sum
			}
		}
	}
	if got := check(); len(got.Problems) != 2 || got.Problems[0].Code != string(core.CodeKeyUnavailable) {
		t.Errorf("a check without keys: %+v", got)
	}
	forkHas(plain, open)
	log, err := os.ReadFile(third.log)
	if err != nil {
		t.Fatal(err)
	}
	fetched := 0
	for line := range strings.Lines(string(log)) {
		if strings.Contains(line, "checkpoint fetched from the store") {
			fetched++
		}
	}
	if fetched != 2 { // the template and plain
		t.Errorf("it has fetched %d checkpoints:\n%s", fetched, log)
	}

	// Another master key takes over, and then the first is not needed any more.
	restart(fresh, old)
	forkHas(next, later)
	restart(fresh)
	forkHas(cp, secret)
	if got := check(); len(got.Problems) > 0 || got.Frames == 0 {
		t.Errorf("a check: %+v", got)
	}
	paths, err := filepath.Glob(filepath.Join(files, "v1", self.ProjectID, cp, "*", "*.k1"))
	if err != nil || len(paths) < 2 {
		t.Fatal(paths, err)
	}
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		b[len(b)/2] ^= 1
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		got := check()
		if len(got.Problems) == 0 || got.Problems[0].Code != string(core.CodeCheckpointCorrupt) || !strings.HasSuffix(path, got.Problems[0].Object) {
			t.Errorf("%s: %+v", path, got)
		}
		b[len(b)/2] ^= 1
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
