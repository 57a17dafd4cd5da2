package mcp

import (
	"context"
	"crypto/sha256"
	"errors"
	"net/http"
	"strings"
	"sync"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"golang.org/x/time/rate"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// The bounds of all callers over HTTP together.
const (
	maxRequests    = 256  // requests at the same time, of keys that are known to be valid
	maxOfProject   = 64   // those of one project, which may have many keys
	maxTenants     = 1024 // keys that the server remembers
	maxStrangers   = 32   // keys that it asks the API about for the first time, at the same time
	strangersRate  = 50   // of them in a second
	maxKey         = 512  // bytes of a key
	verifyPatience = 15 * time.Second
)

// tenant is a key that the API has accepted, with its own server: no answer can come from the client of another key.
type tenant struct {
	client   *coppice.Client
	server   *sdk.Server
	project  string    // of the key
	requests slots     // of this key
	users    int       // requests that have this entry; tenants.mu guards it
	used     time.Time // tenants.mu guards it
}

// tenants admits requests over HTTP.
//
// Every request is checked with the API, so a revoked key is refused at its next request. A request takes a shared slot only
// after that, at most maxCalls for a key and maxOfProject for a project. The check of a key that was valid before takes a slot of this key; checks
// of unknown keys have slots and a rate of their own. So one tenant cannot keep others out, and wrong keys cannot keep out a key that this
// server knows. They can keep out keys that it does not know yet: enough invented keys of the right form take all places of unknown keys. A text
// of another form takes none.
type tenants struct {
	cfg       Config
	transport *transport
	cache     *sdk.SchemaCache
	shared    slots
	strangers slots
	rate      *rate.Limiter

	mu    sync.Mutex // guards the fields below
	known map[[sha256.Size]byte]*tenant
	busy  map[string]int // requests by project
}

func newTenants(cfg Config, t *transport) *tenants {
	return &tenants{
		cfg: cfg, transport: t, cache: sdk.NewSchemaCache(), shared: make(slots, maxRequests), strangers: make(slots, maxStrangers),
		rate: rate.NewLimiter(strangersRate, strangersRate), known: map[[sha256.Size]byte]*tenant{}, busy: map[string]int{},
	}
}

// refusal is the answer to a request that is not admitted.
type refusal struct {
	status int
	fault
}

func refuse(status int, code, detail string) *refusal {
	return &refusal{status, *explain(&fault{code: code, detail: detail})}
}

// admit returns the tenant of a key, and what the request holds until it has ended.
func (ts *tenants) admit(ctx context.Context, key string) (*tenant, *hold, *refusal) {
	if key == "" || len(key) > maxKey {
		return nil, nil, refuse(http.StatusUnauthorized, string(coppice.CodeUnauthenticated), "the request has no API key: send it as Authorization: Bearer")
	}
	if !possible(key) {
		return nil, nil, refuse(http.StatusUnauthorized, string(coppice.CodeUnauthenticated), "the API key is wrong, expired or revoked")
	}
	sum := sha256.Sum256([]byte(key))
	t := ts.get(sum)
	if t == nil {
		var no *refusal
		if t, no = ts.meet(ctx, sum, key); no != nil {
			return nil, nil, no
		}
	}
	defer ts.put(t)
	if !t.requests.try() {
		return nil, nil, refuse(http.StatusTooManyRequests, codeBusy, "this key has as many requests as it may have at the same time")
	}
	if _, no := ts.verify(ctx, t.client); no != nil {
		t.requests.free()
		if no.status == http.StatusUnauthorized {
			ts.forget(sum, t)
		}
		return nil, nil, no
	}
	if !ts.begin(t.project) {
		t.requests.free()
		return nil, nil, refuse(http.StatusTooManyRequests, codeBusy, "the project of this key has as many requests as it may have at the same time")
	}
	if !ts.shared.try() {
		ts.end(t.project)
		t.requests.free()
		return nil, nil, refuse(http.StatusServiceUnavailable, codeBusy, "the server has as many requests as it may have at the same time")
	}
	return t, &hold{holders: 1, free: func() {
		ts.shared.free()
		ts.end(t.project)
		t.requests.free()
	}}, nil
}

// The form of a key that the API has made: keyPrefix, its id, an underscore and its secret. The key of an operator may have any other
// form.
const (
	keyPrefix = "cpk_"
	keyID     = 26
	keySecret = 52
)

// possible reports whether a text can be a key.
func possible(key string) bool {
	rest, made := strings.CutPrefix(key, keyPrefix)
	if !made {
		return true
	}
	id, secret, _ := strings.Cut(rest, "_")
	return len(id) == keyID && len(secret) == keySecret &&
		!strings.ContainsFunc(id+secret, func(r rune) bool { return !strings.ContainsRune("0123456789abcdefghjkmnpqrstvwxyz", r) })
}

// begin counts a request of a project, unless the project has as many as it may have.
func (ts *tenants) begin(project string) bool {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if ts.busy[project] >= maxOfProject {
		return false
	}
	ts.busy[project]++
	return true
}

func (ts *tenants) end(project string) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if ts.busy[project]--; ts.busy[project] == 0 {
		delete(ts.busy, project)
	}
}

// verify asks the API whether a key is valid now.
func (ts *tenants) verify(ctx context.Context, client *coppice.Client) (project string, no *refusal) {
	ctx, cancel := context.WithTimeout(ctx, verifyPatience)
	defer cancel()
	key, err := client.Self(ctx)
	switch {
	case err == nil:
		return key.ProjectID, nil
	case errors.Is(err, coppice.CodeUnauthenticated):
		return "", refuse(http.StatusUnauthorized, string(coppice.CodeUnauthenticated), "the API key is wrong, expired or revoked")
	case errors.Is(err, coppice.CodeRateLimited):
		return "", refuse(http.StatusTooManyRequests, string(coppice.CodeRateLimited), "the API takes no more requests of this key for now")
	}
	ts.cfg.Log.WarnContext(ctx, "the API could not check a key", "error", err)
	return "", refuse(http.StatusServiceUnavailable, codeServer, "the API could not check the key")
}

// meet makes the entry of an unknown key, if the API accepts the key.
func (ts *tenants) meet(ctx context.Context, sum [sha256.Size]byte, key string) (*tenant, *refusal) {
	if !ts.strangers.try() {
		return nil, refuse(http.StatusServiceUnavailable, codeBusy, "too many keys are being checked")
	}
	defer ts.strangers.free()
	if !ts.rate.Allow() {
		return nil, refuse(http.StatusServiceUnavailable, codeBusy, "too many keys are being checked")
	}
	client, err := ts.transport.client(ts.cfg, key)
	if err != nil {
		ts.cfg.Log.ErrorContext(ctx, "no client for a key", "error", err)
		return nil, refuse(http.StatusInternalServerError, codeInternal, "the MCP server failed")
	}
	project, no := ts.verify(ctx, client)
	if no != nil {
		return nil, no
	}
	t := &tenant{client: client, project: project, server: newServer(ts.cfg, client, ts.cache, enterHeld), requests: make(slots, maxCalls), users: 1, used: time.Now()}
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if other := ts.known[sum]; other != nil { // another request was faster
		other.users++
		return other, nil
	}
	if len(ts.known) >= maxTenants && !ts.evict() {
		return nil, refuse(http.StatusServiceUnavailable, codeBusy, "too many keys have requests at the same time")
	}
	ts.known[sum] = t
	return t, nil
}

// evict forgets the key that has not been used for the longest time. ts.mu is held.
func (ts *tenants) evict() bool {
	var oldest [sha256.Size]byte
	var found *tenant
	for sum, t := range ts.known {
		if t.users == 0 && len(t.requests) == 0 && (found == nil || t.used.Before(found.used)) {
			oldest, found = sum, t
		}
	}
	if found != nil {
		delete(ts.known, oldest)
		found.client.Close()
	}
	return found != nil
}

func (ts *tenants) get(sum [sha256.Size]byte) *tenant {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	t := ts.known[sum]
	if t != nil {
		t.users++
		t.used = time.Now()
	}
	return t
}

func (ts *tenants) put(t *tenant) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	t.users--
}

func (ts *tenants) forget(sum [sha256.Size]byte, t *tenant) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if ts.known[sum] == t {
		delete(ts.known, sum)
	}
}

// close closes the connections of all keys.
func (ts *tenants) close() {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	for _, t := range ts.known {
		t.client.Close()
	}
	clear(ts.known)
}

// hold is the slots of a request. They are free again when the request has ended and so have the calls in it: a client
// that hangs up does not get room for more.
type hold struct {
	mu      sync.Mutex // guards holders
	holders int
	free    func()
}

type holdKey struct{}

func (h *hold) enter() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.holders++
}

func (h *hold) leave() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.holders--; h.holders == 0 {
		h.free()
	}
}

// enterHeld is the admission of calls over HTTP: their request was admitted before.
func enterHeld(ctx context.Context) (func(), error) {
	h, ok := ctx.Value(holdKey{}).(*hold)
	if !ok {
		return nil, &fault{code: codeInternal, detail: "a call without an admitted request"}
	}
	h.enter()
	return h.leave, nil
}
