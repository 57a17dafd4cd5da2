//go:build linux

package guestagent

import (
	"encoding/json"
	"net/http"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

func (a *Agent) createWatch(w http.ResponseWriter, r *http.Request) error {
	var req guestapi.CreateWatch
	if err := answer.ReadJSON(w, r, answer.MaxControlBody, &req); err != nil {
		return err
	}
	do, err := a.files.Caller(r.Context(), req.User, &req.Path)
	if err != nil {
		return err
	}
	out, err := a.watches.Create(r.Context(), do, req)
	if err != nil {
		return answer.FileError(err, "watch", req.Path)
	}
	answer.WriteJSON(w, http.StatusCreated, out)
	return nil
}

func (a *Agent) listWatches(w http.ResponseWriter, _ *http.Request) error {
	answer.WriteJSON(w, http.StatusOK, a.watches.List())
	return nil
}

func (a *Agent) deleteWatch(w http.ResponseWriter, r *http.Request) error {
	if err := a.watches.Delete(core.WatchID(r.PathValue("id"))); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// watchEvents sends the events of a watch, one a line.
func (a *Agent) watchEvents(w http.ResponseWriter, r *http.Request) error {
	id := core.WatchID(r.PathValue("id"))
	after, err := answer.IntParam(r, "after", 0)
	if err != nil {
		return err
	}
	if err := a.watches.Has(id); err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.WriteHeader(http.StatusOK)
	flush := http.NewResponseController(w).Flush
	if flush() != nil {
		return nil //nolint:nilerr // the reader is gone
	}
	lines := json.NewEncoder(w)
	_ = a.watches.Read(r.Context(), id, after, answer.BoolParam(r, "follow"), func(e guestapi.WatchEvent) error {
		if err := lines.Encode(e); err != nil {
			return err
		}
		return flush()
	}) // an error means that the reader is gone, or the watch
	return nil
}
