package controller_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
)

// vault is a service that has a master key, or is away.
type vault struct {
	id   string
	away error
}

func (v *vault) Current() string { return v.id }

func (v *vault) Wrap(_ context.Context, name string, key core.DataKey) ([]byte, error) {
	return append([]byte(v.id+" "+name+" "), key[:]...), v.away
}

func (v *vault) Unwrap(_ context.Context, master, name string, wrapped []byte) (core.DataKey, error) {
	b, ok := bytes.CutPrefix(wrapped, []byte(master+" "+name+" "))
	if !ok {
		return core.DataKey{}, errors.New("it was wrapped under another name")
	}
	return core.DataKey(b), v.away
}

func (w *world) encrypt(p controller.EncryptionPatch) {
	w.t.Helper()
	if _, err := w.Tenancy.PatchProject(w.t.Context(), w.admin(), w.project, controller.QuotasPatch{}, p); err != nil {
		w.t.Fatal(err)
	}
}

// TestSealKeys: a runner is given the key of its attempt and those of what the reference needs, and no other.
func TestSealKeys(t *testing.T) {
	t.Parallel()
	files, store := withStore(t)
	keys := &vault{id: "a"}
	w := newWorld(t, store, func(c *controller.Config, _ *runnertest.Config) { c.Wrapper = keys })
	ws := w.create("a")
	plain := w.checkpoint(ws.ID)
	w.seal(files, plain.ID)
	a := w.checkpoint(ws.ID)
	began := w.begin(files, a.ID) // unencrypted
	w.encrypt(controller.EncryptionPatch{Mode: controller.EncryptionEnvelope})
	if err := began.Write(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if err := began.End(t.Context()); core.CodeOf(err) != core.CodeInvalidField || !strings.Contains(err.Error(), "unencrypted") {
		t.Fatalf("what was begun unencrypted is sealed: %v", err)
	}
	u := w.begin(files, a.ID)
	if u.Begun.KeyVersion != 1 || u.Begun.Key == nil || u.Begun.Reference != nil || len(u.Begun.Keys) > 0 {
		t.Fatalf("%+v", u.Begun)
	}
	first := *u.Begun.Key
	if err := u.Write(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if err := u.End(t.Context()); err != nil {
		t.Fatal(err)
	}
	b := w.checkpoint(ws.ID)
	w.encrypt(controller.EncryptionPatch{KeyVersion: 2})
	u = w.begin(files, b.ID)
	prefix := envelope.Prefix(u.Begun.Reference.Manifest)
	if u.Begun.KeyVersion != 2 || *u.Begun.Key == first || u.Begun.Reference.CheckpointID != a.ID || len(u.Begun.Keys) != 1 || u.Begun.Keys[prefix] != first {
		t.Errorf("%+v", u.Begun)
	}
	// What failed is seen, and begun again when the keys are back.
	keys.away = core.Errorf(core.FailedPrecondition, core.CodeKeyUnavailable, "the vault is sealed")
	if _, err := w.runner.BeginSeal(t.Context(), w, files, w.epoch, b.ID); core.CodeOf(err) != core.CodeKeyUnavailable {
		t.Errorf("without keys: %v", err)
	}
	if got := w.get(b.ID); got.Seal == nil || got.Seal.State != controller.SealFailed || got.Seal.Problem.Code != core.CodeKeyUnavailable {
		t.Errorf("%+v", got.Seal)
	}
	keys.away = nil
	w.seal(files, b.ID)
	// In clear again: nothing is built on what is encrypted.
	w.encrypt(controller.EncryptionPatch{Mode: controller.EncryptionNone})
	c := w.checkpoint(ws.ID)
	if u := w.begin(files, c.ID); u.Begun.KeyVersion != 0 || u.Begun.Key != nil || u.Begun.Reference == nil || u.Begun.Reference.CheckpointID != plain.ID {
		t.Errorf("%+v", u.Begun)
	}
	// Keys that are gone are not replaced by nothing.
	w.encrypt(controller.EncryptionPatch{Mode: controller.EncryptionEnvelope})
	w.exec(`DELETE FROM project_keys`)
	if _, err := w.runner.BeginSeal(t.Context(), w, files, w.epoch, c.ID); core.CodeOf(err) != core.CodeKeyUnavailable {
		t.Errorf("without a key of the project: %v", err)
	}
}

// TestRewrap: a controller that has another master key has it wrap everything; one without any encrypts nothing.
func TestRewrap(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.Wrapper = &vault{id: "a"} })
	w.encrypt(controller.EncryptionPatch{Mode: controller.EncryptionEnvelope})
	masters := func() (list []string) {
		t.Helper()
		err := w.store.InTx(t.Context(), controller.System(), func(tx controller.AllTx) error {
			rows, err := tx.ProjectKeys(t.Context(), []core.ProjectID{w.project})
			for _, r := range rows {
				list = append(list, r.Master+strings.SplitN(string(r.Wrapped), " ", 2)[0])
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return list
	}
	start := func(v controller.Wrapper) *controller.Controller {
		t.Helper()
		c, _ := w.start(controller.Config{Wrapper: v, Bootstrap: controller.Bootstrap{Key: "coppice-test-key"}})
		if _, err := c.Bootstrap(t.Context()); err != nil {
			t.Fatal(err)
		}
		return c
	}
	start(&vault{id: "b", away: core.Errorf(core.FailedPrecondition, core.CodeKeyUnavailable, "it has no a")})
	if got := masters(); len(got) != 1 || got[0] != "aa" {
		t.Errorf("one that cannot unwrap has left %v", got)
	}
	start(&vault{id: "b"})
	if got := masters(); len(got) != 1 || got[0] != "bb" {
		t.Errorf("%v", got)
	}
	none := start(nil)
	_, err := none.Tenancy.PatchProject(t.Context(), w.admin(), w.project, controller.QuotasPatch{}, controller.EncryptionPatch{KeyVersion: 2})
	if core.CodeOf(err) != core.CodeKeyUnavailable || !strings.Contains(err.Error(), "--master-key-file") {
		t.Errorf("without a master key: %v", err)
	}
}
