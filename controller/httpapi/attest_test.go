package httpapi_test

import (
	"bytes"
	"encoding/pem"
	"testing"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/attest"
)

// TestAttestation: the answer is the envelope byte for byte, and verifies with what /v1/authority gives.
func TestAttestation(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	var authority api.Authority
	w.want(200, "GET", "/v1/authority", nil, &authority)
	block, _ := pem.Decode([]byte(authority.Certificate))
	if block == nil || core.DigestOf(block.Bytes).Hex() != authority.SHA256 {
		t.Fatalf("%+v", authority)
	}
	trust, err := attest.NewAuthority(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	path := "/v1/workspaces/" + ws.ID + "/attestation"
	body := w.want(200, "GET", path, nil, nil).body
	got, err := trust.Verify(bytes.TrimSuffix(body, []byte("\n")))
	if err != nil {
		t.Fatal(err)
	}
	if p := got.Statement.Predicate; string(p.WorkspaceID) != ws.ID || p.Epoch != 1 {
		t.Errorf("%+v", p)
	}
	if again := w.want(200, "GET", path+"?epoch=1", nil, nil).body; !bytes.Equal(again, body) {
		t.Error("the second time it is another")
	}
	w.want(404, "GET", path+"?epoch=2", nil, nil)
	w.want(400, "GET", path+"?epoch=0", nil, nil)
	w.want(404, "GET", "/v1/workspaces/"+string(core.NewID[core.WorkspaceID]())+"/attestation", nil, nil)
	if got := w.do(call{method: "GET", path: "/v1/authority", key: "-"}); got.status != 200 {
		t.Errorf("the authority, without a key: %d", got.status)
	}
	if got := w.do(call{method: "GET", path: path, key: "-"}); got.status != 401 {
		t.Errorf("an attestation, without a key: %d", got.status)
	}
}
