package coppice_test

import (
	"fmt"
	"net/http"
	"testing"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestStartBuild: a build that goes on, one that has ended at once, and one that is refused. None is waited for.
func TestStartBuild(t *testing.T) {
	t.Parallel()
	const op = "op_06e5bqv7z0f3m8k2h1t9r4w6xc"
	for name, c := range map[string]struct {
		status int
		body   string
		state  coppice.OperationState
	}{
		"it goes on":   {http.StatusAccepted, `{"id":"` + op + `","state":"running"}`, "running"},
		"it has ended": {http.StatusOK, `{"operation_id":"` + op + `","image":{"name":"app"}}`, "succeeded"},
		"refused":      {http.StatusBadRequest, `{"code":"DOCKERFILE_INVALID","status":400}`, ""},
	} {
		mux := http.NewServeMux()
		mux.HandleFunc("POST /v1/images", func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Query().Get("wait") != "0" || r.Header.Get("Idempotency-Key") == "" {
				t.Errorf("%s: %s, %v", name, r.URL, r.Header)
			}
			w.WriteHeader(c.status)
			fmt.Fprint(w, c.body)
		})
		mux.HandleFunc("GET /v1/operations/"+op, func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, `{"id":"`+op+`","state":"succeeded"}`)
		})
		got, err := serve(t, mux).StartBuild(t.Context(), coppice.BuildImageRequest{Name: "app"})
		if got.State != c.state || (err == nil) != (c.state != "") || err == nil && got.ID != op {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}
