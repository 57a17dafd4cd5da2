package e2b

import (
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// page is the part of a list that a request asks for. A token is the id of the last item of the page before. Lists are newest first,
// and ids grow with time, so a token stays good when its item has gone.
type page struct {
	after string
	limit int
	last  string
}

const maxPage = 100

func newPage(r *http.Request) (page, error) {
	p := page{after: rawQuery(r, "nextToken"), limit: maxPage}
	if text := rawQuery(r, "limit"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			return p, shared.Failf(http.StatusBadRequest, "limit: %q is not a number from 1 to %d", shared.Clip(text), maxPage)
		}
		p.limit = min(n, maxPage)
	}
	return p, nil
}

// take reports whether an item of a list, newest first, comes after the token.
func (p *page) take(id string) bool { return p.after == "" || id < p.after }

// full reports whether the page has no more room; then the answer tells where the next one begins.
func (p *page) full(w http.ResponseWriter, have int) bool {
	if have < p.limit {
		return false
	}
	w.Header().Set(headerNext, p.last)
	return true
}

const (
	headerNext  = "X-Next-Token"
	headerTotal = "X-Total-Running"
)

// listFilter is the filter of a list of sandboxes.
type listFilter struct {
	metadata map[string]string
	states   []string
	template string
	after    time.Time
}

func newListFilter(r *http.Request) (f listFilter, err error) {
	if f.metadata, err = metadataFilter(rawQuery(r, "metadata")); err != nil {
		return f, err
	}
	q, _ := url.ParseQuery(r.URL.RawQuery) // as rawQuery does
	for _, value := range q["state"] {
		for s := range strings.SplitSeq(value, ",") {
			if s != stateRunning && s != statePaused {
				return f, shared.Failf(http.StatusBadRequest, "state: %q is neither %s nor %s", shared.Clip(s), stateRunning, statePaused)
			}
			f.states = append(f.states, s)
		}
	}
	f.template = q.Get("template")
	if text := q.Get("startedAfter"); text != "" {
		if f.after, err = time.Parse(time.RFC3339, text); err != nil {
			return f, shared.Failf(http.StatusBadRequest, "startedAfter: %q is not a time in RFC 3339", shared.Clip(text))
		}
	}
	return f, nil
}

func (f listFilter) match(v listedView) bool {
	return (len(f.states) == 0 || slices.Contains(f.states, v.State)) && (f.template == "" || f.template == v.TemplateID) &&
		(f.after.IsZero() || !v.StartedAt.Before(f.after)) && contains(v.Metadata, f.metadata)
}

// matching lists the sandboxes of the key's project, newest first, and counts those that run.
func (c call) matching(r *http.Request, f listFilter) (list []listedView, running int, err error) {
	for ws, err := range c.Workspaces(r.Context(), coppice.WorkspaceFilter{}) {
		if err != nil {
			return nil, 0, err
		}
		if !live(ws) {
			continue
		}
		v := listed(ws)
		if v.State == stateRunning {
			running++
		}
		if f.match(v) {
			list = append(list, v)
		}
	}
	return list, running, nil
}

// listRunning is the list of version 1 of the API: one page of the running sandboxes.
func listRunning(w http.ResponseWriter, r *http.Request, c call) error {
	f, err := newListFilter(r)
	if err != nil {
		return err
	}
	f.states = []string{stateRunning}
	list, running, err := c.matching(r, f)
	if err != nil {
		return err
	}
	w.Header().Set(headerTotal, strconv.Itoa(running))
	writeJSON(w, http.StatusOK, append([]listedView{}, list...))
	return nil
}

func listPaged(w http.ResponseWriter, r *http.Request, c call) error {
	f, err := newListFilter(r)
	if err != nil {
		return err
	}
	p, err := newPage(r)
	if err != nil {
		return err
	}
	list, running, err := c.matching(r, f)
	if err != nil {
		return err
	}
	ascending := false
	switch order := rawQuery(r, "order"); order {
	case "", "desc":
	case "asc":
		ascending = true
		slices.Reverse(list)
	default:
		return shared.Failf(http.StatusBadRequest, "order: %q is neither asc nor desc", shared.Clip(order))
	}
	out := []listedView{}
	for _, v := range list {
		if p.after != "" && (ascending && v.SandboxID <= p.after || !ascending && v.SandboxID >= p.after) {
			continue
		}
		if p.full(w, len(out)) {
			break
		}
		out = append(out, v)
		p.last = v.SandboxID
	}
	w.Header().Set(headerTotal, strconv.Itoa(running))
	writeJSON(w, http.StatusOK, out)
	return nil
}
