package guest

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// TestFeatures: an agent is asked once what it can, and never for what it cannot.
func TestFeatures(t *testing.T) {
	t.Parallel()
	for name, has := range map[string][]string{"an early agent": nil, "an agent of another time": {"something"}, "an agent of now": guestapi.Features()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var asked, served atomic.Int64
			c := serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				if r.URL.Path == guestapi.PathHealth {
					asked.Add(1)
					_ = json.NewEncoder(w).Encode(guestapi.Health{Version: 1, Features: has})
					return
				}
				served.Add(1)
				_, _ = w.Write([]byte("{}"))
			})
			send := func(method, target string) error {
				req, err := http.NewRequestWithContext(t.Context(), method, guestURL+target, strings.NewReader("{}"))
				if err != nil {
					t.Fatal(err)
				}
				res, err := c.Transport().RoundTrip(req)
				if err == nil {
					_ = res.Body.Close()
				}
				return err
			}
			for _, old := range []string{guestapi.PathFiles + "?path=/x&mode=0644", guestapi.PathFiles + "?path=/x&untar=1"} {
				if err := send(http.MethodPut, old); err != nil {
					t.Errorf("%s: %v", old, err)
				}
			}
			if asked.Load() != 0 {
				t.Error("the agent was asked for features that nobody needs")
			}
			current := slices.Contains(has, guestapi.FeatureFileWork)
			for target, method := range map[string]string{
				guestapi.PathFiles + "?path=/x&user=a": http.MethodPut, guestapi.PathFiles + "?path=/x&in_place=1": http.MethodPut,
				guestapi.PathFiles + "?path=/x&user=": http.MethodDelete, guestapi.PathFileContent + "?path=/x": http.MethodGet,
				guestapi.PathMakeDir: http.MethodPost, guestapi.PathRename: http.MethodPost, guestapi.PathXAttrs: http.MethodPost,
				guestapi.PathSessions + "?need=" + guestapi.FeatureFileWork: http.MethodPost,
			} {
				before := served.Load()
				err := send(method, target)
				switch {
				case current && err != nil:
					t.Errorf("%s: %v", target, err)
				case !current && (core.CodeOf(err) != core.CodeUnsupported || served.Load() != before):
					t.Errorf("%s: %v, sent %t", target, err, served.Load() != before)
				}
			}
			if err := send(http.MethodPost, guestapi.PathSessions+"?need=no_such_feature"); core.CodeOf(err) != core.CodeUnsupported {
				t.Errorf("a feature of the future: %v", err)
			}
			if asked.Load() != 1 {
				t.Errorf("the agent was asked %d times", asked.Load())
			}
		})
	}
}

// TestFeaturesAreBounded: what an agent says of itself is cut.
func TestFeaturesAreBounded(t *testing.T) {
	t.Parallel()
	h := guestapi.Health{}
	for range 100 {
		h.Features = append(h.Features, strings.Repeat("x", 1000))
	}
	if h = cleanHealth(h); len(h.Features) != 64 || len(h.Features[0]) > 200 {
		t.Errorf("%d features, the first of %d bytes", len(h.Features), len(h.Features[0]))
	}
}
