//go:build linux

package guestagent

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/reseal"
)

// TestRecordedRequests: the agent understands the recorded requests of a host of version 1, and answers with the
// recorded status.
func TestRecordedRequests(t *testing.T) {
	t.Parallel()
	var list []struct {
		Method, Path    string
		Request, Answer json.RawMessage
		Status          int
	}
	b, err := os.ReadFile("guestapi/testdata/v1/exchange.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &list); err != nil {
		t.Fatal(err)
	}
	a := newTestAgent(t)
	a.withSteps(reseal.Step{Name: guestapi.StepEntropy}, reseal.Step{Name: guestapi.StepGeneration})
	replayed := 0
	for _, x := range list {
		if x.Path == guestapi.PathHealth && replayed == 0 {
			var h guestapi.Health
			if err := json.Unmarshal(x.Answer, &h); err != nil {
				t.Fatal(err)
			}
			if err := a.gate.set(gateState{State: guestapi.StateReleased, Generation: h.Generation}); err != nil {
				t.Fatal(err)
			}
		}
		if strings.HasPrefix(x.Path, guestapi.PathFiles) || strings.Contains(string(x.Request), "nobody") {
			continue // depends on the recorded guest's disk and users
		}
		if strings.HasPrefix(x.Path, guestapi.PathSessions+"/") {
			x.Status = http.StatusNotFound // the session was not started here
		}
		replayed++
		req, err := http.NewRequestWithContext(t.Context(), x.Method, a.URL+x.Path, bytes.NewReader(x.Request))
		if err != nil {
			t.Fatal(err)
		}
		res, err := http.DefaultTransport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
		if res.StatusCode != x.Status {
			t.Errorf("%s %s: status %d, was %d", x.Method, x.Path, res.StatusCode, x.Status)
		}
	}
	if replayed < 12 {
		t.Errorf("only %d requests were replayed", replayed)
	}
}
