// Package guestclient asks the agent in a guest, through the guest's runner. The answers of guests
// are untrusted: each has a bound, and the answers of all guests of a project share another bound.
package guestclient

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/boundjson"
)

// The bounds of each answer of a guest. An honest agent stays far below: it keeps 384 sessions and lists 4096 processes with
// 4 KiB of command line each. Long texts are cut, because honest programs have them. Everything else beyond a bound is refused.
var (
	boundSession = boundjson.Bound{
		Name: "the guest's session", Bytes: 24 << 20, Elements: 8 << 10, List: 8 << 10, Depth: 6, String: 128 << 10, Text: 1 << 20, Cut: 2, Keep: 4096,
	}
	boundSessions = boundjson.Bound{
		Name: "the guest's list of sessions", Bytes: 16 << 20, Elements: 40 << 10, List: 512, Depth: 6, String: 4 << 10, Text: 1 << 20, Cut: 4, Keep: 64,
	}
	boundProcesses = boundjson.Bound{
		Name: "the guest's list of processes", Bytes: 24 << 20, Elements: 40 << 10, List: 4096, Depth: 6, String: 4 << 10, Text: 2 << 20, Cut: 2, Keep: 4096,
	}
	boundMark    = boundjson.Bound{Name: "the guest's mark", Bytes: 4 << 10, Elements: 16, List: 1, Depth: 2, String: 512, Text: 1 << 10}
	boundProblem = boundjson.Bound{
		Name: "the guest's reason", Bytes: 1 << 20, Elements: 256, List: 64, Depth: 6, String: 4 << 10, Text: 16 << 10,
	}
)

// The bounds of all guests' answers that a controller reads at the same time. A project has at most an eighth.
const (
	guestBytesTotal = 64 << 20
	guestBytesShare = 8 << 20
	guestBytesFree  = 16 << 10 // of each answer: as much as its connection buffers
)

const (
	maxText       = 500 // of an error's message
	pathSessions  = "/v1/sessions"
	pathProcesses = "/v1/processes"
	pathMark      = "/v1/mark"
	headerContent = "Content-Type"
	contentJSON   = "application/json"
	contentRaw    = "application/octet-stream"
	contentTar    = "application/x-tar"
)

// answer has the destination of a guest's answer, and the bound of the answer.
type answer struct {
	bound boundjson.Bound
	out   any
}

// Config says how guests are reached.
type Config struct {
	// Guest carries requests to the agent in a sandbox; see controller.Runners.
	Guest   func(endpoint string, sandbox core.SandboxID) http.RoundTripper
	Timeout time.Duration // of one call
}

// Client asks guests. It is safe for concurrent use.
type Client struct {
	cfg   Config
	bytes boundjson.Budget
}

// New makes a client.
func New(cfg Config) *Client {
	return &Client{cfg: cfg, bytes: boundjson.Budget{Total: guestBytesTotal, Share: guestBytesShare, Free: guestBytesFree}}
}

// Transport returns the way to the agent of a sandbox.
func (c *Client) Transport(s model.Sandbox) http.RoundTripper { return c.cfg.Guest(s.Endpoint, s.ID) }

// Used is how many bytes of guests' answers are held now, and how many answers were refused because there was no room.
func (c *Client) Used() (held int, refused int64) { return c.bytes.Used() }

// Start starts the program of a session. The agent starts only one program per id, however often it is asked: CodeSessionExists.
func (c *Client) Start(ctx context.Context, s model.Sandbox, id core.SessionID, req ExecRequest) (Session, error) {
	var g Session
	err := c.call(ctx, s, http.MethodPost, pathSessions, nil, execRequest{ID: id, ExecRequest: req}, answer{boundSession, &g})
	return g, err
}

// Session returns a session.
func (c *Client) Session(ctx context.Context, s model.Sandbox, id core.SessionID) (Session, error) {
	var g Session
	err := c.call(ctx, s, http.MethodGet, sessionPath(id, ""), nil, nil, answer{boundSession, &g})
	return g, err
}

// Wait returns a session at its end, or after a while in its present state. The agent may answer earlier.
func (c *Client) Wait(ctx context.Context, s model.Sandbox, id core.SessionID, wait time.Duration) (Session, error) {
	var g Session
	q := url.Values{"timeout_ms": {strconv.FormatInt(wait.Milliseconds(), 10)}}
	err := c.call(ctx, s, http.MethodGet, sessionPath(id, "wait"), q, nil, answer{boundSession, &g})
	return g, err
}

// Sessions lists the sessions of a guest.
func (c *Client) Sessions(ctx context.Context, s model.Sandbox) (List, error) {
	var list List
	err := c.call(ctx, s, http.MethodGet, pathSessions, nil, nil, answer{boundSessions, &list})
	return list, err
}

// Delete kills a session's processes and forgets it.
func (c *Client) Delete(ctx context.Context, s model.Sandbox, id core.SessionID) error {
	return c.call(ctx, s, http.MethodDelete, sessionPath(id, ""), nil, nil, answer{})
}

// Signal sends a signal to a session's processes.
func (c *Client) Signal(ctx context.Context, s model.Sandbox, id core.SessionID, name string) error {
	return c.call(ctx, s, http.MethodPost, sessionPath(id, "signal"), nil, signal{name}, answer{})
}

// Resize sets the size of a session's terminal.
func (c *Client) Resize(ctx context.Context, s model.Sandbox, id core.SessionID, cols, rows uint16) error {
	return c.call(ctx, s, http.MethodPost, sessionPath(id, "resize"), nil, size{cols, rows}, answer{})
}

// Processes lists the processes of the workload.
func (c *Client) Processes(ctx context.Context, s model.Sandbox) ([]Process, error) {
	var out processes
	err := c.call(ctx, s, http.MethodGet, pathProcesses, nil, nil, answer{boundProcesses, &out})
	return out.Processes, err
}

// Mark returns a mark of the guest. If two marks are equal and not empty, nothing that a mark covers has changed between them.
func (c *Client) Mark(ctx context.Context, s model.Sandbox) (string, error) {
	var out mark
	err := c.call(ctx, s, http.MethodGet, pathMark, nil, nil, answer{boundMark, &out})
	return out.Mark, err
}

func sessionPath(id core.SessionID, verb string) string {
	if verb == "" {
		return pathSessions + "/" + string(id)
	}
	return pathSessions + "/" + string(id) + "/" + verb
}

// call sends JSON to the agent and reads its answer. in may be nil; the zero answer reads none.
func (c *Client) call(ctx context.Context, s model.Sandbox, method, path string, query url.Values, in any, to answer) error {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return fmt.Errorf("encode request to the guest: %w", err)
		}
		body = bytes.NewReader(b)
	}
	res, err := c.ask(ctx, s, method, path, query, contentJSON, body)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if to.out == nil {
		return nil
	}
	account := c.bytes.Open(string(s.ProjectID))
	defer account.Close()
	if err := boundjson.Decode(res.Body, to.bound, account, to.out); err != nil {
		return fault(ctx, err)
	}
	return nil
}

// fault says why an answer of a guest was not read.
func fault(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, boundjson.ErrFull):
		return core.Wrapf(err, core.Unavailable, core.CodeGuestBusy, "the guests of this project send more at once than a controller holds for one project; repeat the request")
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return core.Wrapf(err, core.Unavailable, core.CodeGuestProtocol, "the answer of the guest's agent cannot be read")
}

// ask sends a request and returns an answer with a status below 300, whose body the caller closes.
func (c *Client) ask(ctx context.Context, s model.Sandbox, method, path string, query url.Values, content string, body io.Reader) (*http.Response, error) {
	target := url.URL{Scheme: "http", Host: "guest", Path: path, RawQuery: query.Encode()}
	req, err := http.NewRequestWithContext(ctx, method, target.String(), body)
	if err != nil {
		return nil, fmt.Errorf("make request to the guest: %w", err)
	}
	if body != nil {
		req.Header.Set(headerContent, content)
	}
	res, err := c.Transport(s).RoundTrip(req)
	if err != nil {
		return nil, err
	}
	if res.StatusCode < http.StatusMultipleChoices {
		return res, nil
	}
	err = Problem(res)
	return nil, errors.Join(err, res.Body.Close())
}

// relayed are the codes that an agent, or the runner before it, may answer with. A guest that could choose any code would speak
// for the controller: clients repeat requests for some codes, and show the advice that belongs to others.
var relayed = map[core.Code]bool{
	// Of the agent; guestagent/guestapi defines them.
	"ALREADY_SEALED": true, "GUEST_QUARANTINED": true, "GUEST_STATE": true, "GENERATION_MISMATCH": true, "COMMAND_NOT_FOUND": true,
	"COMMAND_NOT_STARTED": true, CodeSessionExists: true, "SESSION_ENDED": true, "SESSION_LIMIT": true, "WATCH_LIMIT": true,
	"FILE_CONFLICT": true, "FILE_DENIED": true,
	core.CodeFileNotFound: true, core.CodeSessionNotFound: true, core.CodeWatchNotFound: true, core.CodeInvalidField: true,
	core.CodeMalformedBody: true, core.CodeBodyTooLarge: true, core.CodeUnsupported: true, core.CodeNotQuiesced: true, core.CodePortClosed: true,
	core.CodeInvalidID: true,
	// Of the runner, when it does not reach the agent or the machine stands still.
	core.CodeGuestUnreachable: true, core.CodeGuestProtocol: true, core.CodeGuestBusy: true, core.CodeRunnerUnreachable: true, core.CodeWorkspaceNotReady: true,
	core.CodeStoreUnavailable: true, core.CodeStoreAuth: true, core.CodeKeyUnavailable: true, core.CodeDiskFull: true, core.CodeDiskUnreadable: true,
	core.CodeCheckpointCorrupt: true, core.CodePagerGone: true,
}

var codeForm = regexp.MustCompile(`^[A-Z][A-Z0-9_]{1,63}$`)

// Problem turns an answer with a status of 300 or more, from a runner or from an agent behind it, into an error. It reads the body and does
// not close it.
func Problem(res *http.Response) error {
	var p runnerapi.Problem
	if err := boundjson.Decode(res.Body, boundProblem, nil, &p); err != nil || !codeForm.MatchString(string(p.Code)) {
		return core.Errorf(core.Unavailable, core.CodeGuestProtocol, "the guest's agent answered with status %d and no reason", res.StatusCode)
	}
	if p.Code == core.CodeSandboxNotFound {
		return core.Errorf(core.Unavailable, core.CodeSandboxLost, "the workspace's sandbox is gone from its runner; the workspace will be lost")
	}
	if p.Code == core.CodeRouteNotFound {
		return core.Errorf(core.FailedPrecondition, core.CodeUnsupported, "the runner or the guest agent of this workspace is older than this request")
	}
	if !relayed[p.Code] {
		return core.Errorf(core.Unavailable, core.CodeGuestProtocol, "the guest's agent failed with a code that is not an agent's: %s", clipText(p.Message))
	}
	text := clipText(p.Message)
	switch p.Category {
	case core.NotFound, core.AlreadyExists, core.Invalid, core.Conflict, core.FailedPrecondition, core.Exhausted, core.Unavailable, core.TimedOut:
		return core.Errorf(p.Category, p.Code, "%s", text)
	case core.PermissionDenied: // inside the guest; the caller's own rights are not in question
		return core.Errorf(core.FailedPrecondition, p.Code, "%s", text)
	case core.Unauthenticated, core.DataLoss, core.Canceled, core.Internal:
	}
	return core.Errorf(core.Unavailable, core.CodeGuestProtocol, "the guest's agent failed: %s (%s)", text, p.Code)
}

// clipText bounds foreign text and makes it printable.
func clipText(s string) string {
	b := []byte(s[:min(len(s), maxText)])
	for i, ch := range b {
		if ch < 0x20 || ch > 0x7e {
			b[i] = '?'
		}
	}
	return string(b)
}
