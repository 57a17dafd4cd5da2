package e2b

import (
	"net/http"
	"strconv"
	"time"

	"github.com/coppice-dev/coppice/controller/compat/e2b/template"
	"github.com/coppice-dev/coppice/controller/compat/shared"
	"github.com/coppice-dev/coppice/internal/inprocess"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func (c call) builtImage(r *http.Request, name string) (coppice.BuiltImage, error) {
	return template.Find(r.Context(), c.Client, name)
}

// requestBuild answers the ids of a build. It keeps nothing.
func requestBuild(w http.ResponseWriter, r *http.Request, c call) error {
	var q template.New
	if err := readJSON(r, &q); err != nil {
		return err
	}
	if _, err := c.Self(r.Context()); err != nil {
		return err
	}
	ids, err := q.IDs()
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusAccepted, ids)
	return nil
}

// linkUpload says whether files are there, and where to send them.
func linkUpload(w http.ResponseWriter, r *http.Request, c call) error {
	hash := r.PathValue("hash")
	key, err := c.Self(r.Context())
	if err != nil {
		return err
	}
	present, err := template.Present(r.Context(), c.Client, hash)
	if err != nil {
		return err
	}
	scheme := "http"
	if r.TLS != nil || r.Header.Get("X-Forwarded-Proto") == "https" {
		scheme = "https"
	}
	link := scheme + "://" + r.Host + "/templates/files/" + hash + "?token=" + c.layer.links().New(hash, key.ID, time.Now())
	writeJSON(w, http.StatusCreated, map[string]any{"present": present, "url": link})
	return nil
}

func (l *layer) links() template.Links { return template.Links{Secret: l.tokens.secret} }

// takeUpload receives files at a link of linkUpload.
func (l *layer) takeUpload(w http.ResponseWriter, r *http.Request) {
	if err := l.upload(w, r); err != nil {
		l.fail(w, r, err)
	}
}

func (l *layer) upload(w http.ResponseWriter, r *http.Request) error {
	hash := r.PathValue("hash")
	key, err := l.links().Check(hash, rawQuery(r, "token"), time.Now())
	if err != nil {
		return err
	}
	ctx, done, err := l.HoldKey(inprocess.WithRemote(r.Context(), r.RemoteAddr), key)
	if err != nil {
		return err
	}
	defer done()
	shared.Unhurry(w) // the REST API bounds the upload
	_, err = l.client("").PutUpload(l.ActFor(ctx, key), template.UploadID(hash), r.Body)
	if err == nil {
		w.WriteHeader(http.StatusOK)
	}
	return err
}

func startBuild(w http.ResponseWriter, r *http.Request, c call) error {
	var q template.Build
	if err := readJSON(r, &q); err != nil {
		return err
	}
	opts := template.Options{User: c.layer.User, OpenEgress: c.layer.OpenEgress, Snapshot: checkpointID}
	err := q.Start(r.Context(), c.Client, c.sandbox, r.PathValue("bid"), opts)
	if err == nil {
		w.WriteHeader(http.StatusAccepted)
	}
	return err
}

func buildStatus(w http.ResponseWriter, r *http.Request, c call) error {
	offset := 0
	if text := rawQuery(r, "logsOffset"); text != "" {
		var err error
		if offset, err = strconv.Atoi(text); err != nil || offset < 0 {
			return shared.Failf(http.StatusBadRequest, "logsOffset: %q is not a number of entries", shared.Clip(text))
		}
	}
	if _, err := c.Self(r.Context()); err != nil {
		return err
	}
	status, err := template.StatusOf(r.Context(), c.Client, &c.layer.logs, c.sandbox, r.PathValue("bid"), offset)
	if err == nil {
		writeJSON(w, http.StatusOK, status)
	}
	return err
}

// listTemplates lists the images of the project as templates.
func listTemplates(w http.ResponseWriter, r *http.Request, c call) error {
	list, err := template.List(r.Context(), c.Client, envdVersion)
	if err == nil {
		writeJSON(w, http.StatusOK, list)
	}
	return err
}

func refuseTags(_ http.ResponseWriter, r *http.Request, c call) error {
	if _, err := c.Self(r.Context()); err != nil { // a client without a key learns nothing
		return err
	}
	return unsupported("tags of a template")
}
