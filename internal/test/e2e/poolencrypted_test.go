package e2e

import (
	"bytes"
	"encoding/hex"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/minio/minio-go/v7"

	"github.com/coppice-dev/coppice/core"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// masterKey makes the file that --master-key-file takes.
func masterKey(t *testing.T) string {
	t.Helper()
	key := core.NewDataKey()
	path := filepath.Join(t.TempDir(), "master.key")
	if err := os.WriteFile(path, []byte(hex.EncodeToString(key[:])+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// encrypt has the checkpoints of the client's project encrypted from now on.
func (p *pool) encrypt(t *testing.T) {
	t.Helper()
	self, err := p.Client.Self(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	got, err := p.Client.PatchProject(t.Context(), self.ProjectID, coppice.PatchProjectRequest{Encryption: coppice.EncryptionEnvelope})
	if err != nil || got.Encryption != coppice.EncryptionEnvelope {
		t.Fatalf("%+v, %v", got, err)
	}
}

// zstdMagic begins every frame that is in clear.
var zstdMagic = []byte{0x28, 0xb5, 0x2f, 0xfd}

// checkEncrypted looks through the bucket: what a template has stored is in clear, all else is encrypted, and there is no frame in it that could be
// seen. Both are there.
func (p *pool) checkEncrypted(t *testing.T) {
	t.Helper()
	client := p.store.Client(t)
	var plain, boxed, frames, seen int
	for o := range client.Client.ListObjects(t.Context(), p.Bucket, minio.ListObjectsOptions{Recursive: true}) {
		if o.Err != nil {
			t.Fatal(o.Err)
		}
		r, err := client.Client.GetObject(t.Context(), p.Bucket, o.Key, minio.GetObjectOptions{})
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil || r.Close() != nil {
			t.Fatal(err)
		}
		n := bytes.Count(b, zstdMagic)
		if strings.HasSuffix(o.Key, ".k1") {
			boxed++
			seen += n
		} else {
			plain++
			frames += n
		}
	}
	t.Logf("%d objects in clear with %d frames, %d encrypted with %d", plain, frames, boxed, seen)
	const chance = 2 // four bytes of some hundred million may look like a frame
	if plain == 0 || boxed == 0 || frames < 100 || seen > chance {
		t.Errorf("%d objects are in clear with %d frames, and %d are encrypted, in which %d can be seen", plain, frames, boxed, seen)
	}
}
