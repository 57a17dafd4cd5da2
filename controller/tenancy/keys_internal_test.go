package tenancy

import (
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
)

// TestCachedKeysAreBounded: of however many keys are used, 4,096 are in the cache, the last of them among them.
func TestCachedKeysAreBounded(t *testing.T) {
	t.Parallel()
	k := new(keyring)
	for i := range uint64(3 * maxCachedKeys) {
		var hash [32]byte
		binary.BigEndian.PutUint64(hash[:], i)
		id := core.KeyID(fmt.Sprint("key_", i))
		k.put(hash, model.Key{ID: id}, time.Hour)
		if got, ok := k.get(hash, 0); !ok || got.ID != id || len(k.byHash) > maxCachedKeys {
			t.Fatalf("key %d: %+v, %v; %d are in the cache", i, got, ok, len(k.byHash))
		}
	}
}

func TestSecretForm(t *testing.T) {
	t.Parallel()
	id := core.NewID[core.KeyID]()
	prefix, secret := newSecret(id)
	for s, want := range map[string]bool{
		secret: true, prefix: false, secret + "0": false, secret[:len(secret)-1]: false, prefix + "_": false, "cpk_": false, "": false, "own-form": true,
		string(make([]byte, maxSecret+1)): false,
	} {
		if wellFormed(s) != want {
			t.Errorf("%q: %v", s, !want)
		}
	}
}

// FuzzWellFormed takes whatever a client may send for a key.
func FuzzWellFormed(f *testing.F) {
	_, secret := newSecret(core.NewID[core.KeyID]())
	f.Add(secret)
	f.Add("cpk_x_y")
	f.Add("cpk_\x00_")
	f.Fuzz(func(t *testing.T, s string) {
		if wellFormed(s) && (s == "" || len(s) > maxSecret) {
			t.Errorf("%q passes", s)
		}
	})
}
