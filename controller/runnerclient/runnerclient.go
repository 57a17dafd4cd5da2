// Package runnerclient is the controller's client of its runners: api/runnerapi over TLS to
// https://runner-id@host:port, or, with a shared secret, over plain HTTP to http://host:port or
// unix:/path. It owns deadlines, the identification of the other end, and the mapping of answers to
// core errors. It repeats nothing by itself.
package runnerclient

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/boundjson"
	"github.com/coppice-dev/coppice/internal/mtls"
	"github.com/coppice-dev/coppice/internal/tracing"
)

// Timeouts bound calls. Guests' streams are bounded by who reads them.
type Timeouts struct {
	Call     time.Duration // small ones
	Fork     time.Duration
	Capture  time.Duration
	Template time.Duration // an image is booted, perhaps without KVM
	Diff     time.Duration // longer than a runner tries
	Export   time.Duration // until a checkpoint is packed, and for every part of the file
}

// DefaultTimeouts are what New uses.
var DefaultTimeouts = Timeouts{Call: 15 * time.Second, Fork: 3 * time.Minute, Capture: 3 * time.Minute, Template: 10 * time.Minute, Diff: 45 * time.Second, Export: 10 * time.Minute}

const (
	dialTimeout   = 3 * time.Second
	maxAnswer     = 64 << 20
	maxHeader     = 64 << 10 // a guest's answer has at most 32 KiB, and the runner adds little
	idlePerRunner = 64
	idleTimeout   = 90 * time.Second
)

// Client implements controller.Runners.
type Client struct {
	secret   string         // for plain HTTP; empty: none is spoken
	identity *mtls.Identity // for TLS; nil: none is spoken
	timeouts Timeouts
	// mu guards transports: one per endpoint, because a dialler is bound to its path and a TLS configuration to its runner.
	mu         sync.Mutex
	transports map[string]*http.Transport
}

var _ controller.Runners = (*Client)(nil)

// New makes a client with the secret that it shares with the runners. Close it to end idle connections.
func New(secret string) *Client { return NewWithTimeouts(secret, DefaultTimeouts) }

// NewWithTimeouts makes a client with other timeouts; all must be set.
func NewWithTimeouts(secret string, t Timeouts) *Client {
	return &Client{secret: secret, timeouts: t, transports: map[string]*http.Transport{}}
}

// NewTLS makes a client that shows a certificate to runners and wants theirs: each runner must be the one that its endpoint names.
func NewTLS(identity *mtls.Identity) (*Client, error) {
	if identity == nil {
		return nil, errors.New("the way to runners needs a certificate")
	}
	return &Client{identity: identity, timeouts: DefaultTimeouts, transports: map[string]*http.Transport{}}, nil
}

// Close ends idle connections.
func (c *Client) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, t := range c.transports {
		t.CloseIdleConnections()
	}
}

// route gives the transport and the base address of an endpoint.
func (c *Client) route(endpoint string) (*http.Transport, *url.URL, error) {
	path, unix := strings.CutPrefix(endpoint, "unix:")
	base, err := url.Parse(endpoint)
	if unix {
		base, err = &url.URL{Scheme: "http", Host: "runner"}, nil
		path = "/" + strings.TrimLeft(path, "/")
	}
	var secure *tls.Config
	switch {
	case err != nil || base.Host == "":
		return nil, nil, badEndpoint(err, endpoint)
	case base.Scheme == "https" && c.identity != nil:
		id, err := core.ParseID[core.RunnerID](base.User.Username())
		if err != nil {
			return nil, nil, badEndpoint(err, endpoint)
		}
		secure = c.identity.Client(mtls.RunnerName(id))
		base.User = nil
	case base.Scheme != "http" || c.secret == "":
		return nil, nil, badEndpoint(nil, endpoint)
	}
	base.Path = "/" + strings.Trim(base.Path, "/") // JoinPath makes a relative path of a base without one
	c.mu.Lock()
	defer c.mu.Unlock()
	if t, ok := c.transports[endpoint]; ok {
		return t, base, nil
	}
	dialer := net.Dialer{Timeout: dialTimeout}
	t := &http.Transport{
		TLSClientConfig: secure, TLSHandshakeTimeout: dialTimeout,
		MaxIdleConnsPerHost: idlePerRunner, IdleConnTimeout: idleTimeout, DisableCompression: true, MaxResponseHeaderBytes: maxHeader,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			if unix {
				network, address = "unix", path
			}
			return dialer.DialContext(ctx, network, address)
		},
	}
	c.transports[endpoint] = t
	return t, base, nil
}

func badEndpoint(err error, endpoint string) error {
	return core.Wrapf(err, core.Unavailable, core.CodeRunnerUnreachable, "a runner's endpoint %q is not of a form that this controller speaks: https://runner-id@host:port, or, in coppice dev, http://host:port or unix:/path", core.Clip(endpoint))
}

// do sends a request and returns an answer with a status below 300.
func (c *Client) do(ctx context.Context, endpoint, method, path string, in any) (*http.Response, error) {
	transport, base, err := c.route(endpoint)
	if err != nil {
		return nil, err
	}
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return nil, fmt.Errorf("encode request to the runner: %w", err)
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, base.JoinPath(path).String(), body)
	if err != nil {
		return nil, fmt.Errorf("make request to the runner: %w", err)
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	c.authorize(req)
	res, err := transport.RoundTrip(req)
	if err != nil {
		return nil, unreachable(ctx, err)
	}
	if res.StatusCode < http.StatusMultipleChoices {
		return res, nil
	}
	return nil, errors.Join(problem(res), res.Body.Close())
}

// authorize adds the secret, where there is one (over TLS the certificate says who we are), and for whom we ask, for the runner's log.
func (c *Client) authorize(req *http.Request) {
	if c.secret != "" {
		req.Header.Set("Authorization", "Bearer "+c.secret)
	}
	tracing.Inject(req.Context(), req.Header)
	if id := core.RequestIDOf(req.Context()); id != "" {
		req.Header.Set(runnerapi.HeaderRequest, id)
	}
	if id := core.OperationIDOf(req.Context()); id != "" {
		req.Header.Set(runnerapi.HeaderOperation, string(id))
	}
}

// problem reads what a runner refused.
func problem(res *http.Response) error {
	var p runnerapi.Problem
	if err := boundjson.Decode(res.Body, boundSmall, nil, &p); err != nil || p.Code == "" {
		return core.Errorf(core.Unavailable, core.CodeRunnerUnreachable, "the runner answered with status %d and no reason", res.StatusCode)
	}
	if p.Category == core.Unauthenticated { // our secret, not the caller's key
		return core.Errorf(core.Internal, core.CodeInternal, "the runner does not accept this controller: %s", core.Clip(p.Message))
	}
	return p.Err()
}

var errTimeout = errors.New("the runner did not answer in time")

// unreachable says what a broken connection means. The caller's own end is the caller's.
func unreachable(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, errTimeout) {
		return cause
	}
	if refused := mtls.Refused(err); core.CodeOf(refused) == core.CodeCertificateRefused {
		return core.Wrapf(refused, core.Unavailable, core.CodeRunnerUnreachable, "the runner cannot be reached: its controller and it do not take each other's certificates")
	}
	return core.Wrapf(err, core.Unavailable, core.CodeRunnerUnreachable, "the runner cannot be reached; what it had begun is undone or finished when it is back")
}

// call sends in and reads a small answer into out; either may be nil.
func (c *Client) call(ctx context.Context, timeout time.Duration, endpoint, method, path string, in, out any) (err error) {
	return c.callBound(ctx, timeout, endpoint, method, path, in, out, boundSmall)
}

func (c *Client) callBound(ctx context.Context, timeout time.Duration, endpoint, method, path string, in, out any, bound boundjson.Bound) (err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, errTimeout)
	defer cancel()
	ctx, span := tracing.Start(ctx, "runner call", trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(attribute.String("path", method+" "+path)))
	defer func() {
		tracing.Fail(span, err)
		span.End()
	}()
	res, err := c.do(ctx, endpoint, method, path, in)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if out == nil {
		_, err = io.Copy(io.Discard, io.LimitReader(res.Body, bound.Bytes))
	} else {
		err = boundjson.Decode(res.Body, bound, nil, out)
	}
	if err != nil {
		return unreachable(ctx, fmt.Errorf("read answer of %s: %w", path, err))
	}
	return nil
}

// with puts ids into a path.
func with[A, B ~string](path string, id A, port B) string {
	return strings.NewReplacer("{id}", url.PathEscape(string(id)), "{port_id}", url.PathEscape(string(port))).Replace(path)
}

// Images lists what a runner holds.
func (c *Client) Images(ctx context.Context, endpoint string) ([]runnerapi.Image, error) {
	var out runnerapi.Images
	err := c.callBound(ctx, c.timeouts.Call, endpoint, http.MethodGet, runnerapi.PathImages, nil, &out, boundImages)
	return out.Images, err
}

// Template boots an image and captures it.
func (c *Client) Template(ctx context.Context, endpoint string, t runnerapi.Template) (runnerapi.Checkpoint, error) {
	var out runnerapi.Checkpoint
	err := c.call(ctx, c.timeouts.Template, endpoint, http.MethodPost, runnerapi.PathTemplates, t, &out)
	return out, err
}

// Fork grows sandboxes.
func (c *Client) Fork(ctx context.Context, endpoint string, f runnerapi.Fork) (runnerapi.ForkResult, error) {
	var out runnerapi.ForkResult
	err := c.callBound(ctx, c.timeouts.Fork, endpoint, http.MethodPost, runnerapi.PathForks, f, &out, boundFork(len(f.Children)))
	return out, err
}

// Capture makes a checkpoint of a sandbox.
func (c *Client) Capture(ctx context.Context, endpoint string, sandbox core.SandboxID, in runnerapi.Capture) (runnerapi.Checkpoint, error) {
	var out runnerapi.Checkpoint
	err := c.call(ctx, c.timeouts.Capture, endpoint, http.MethodPost, with(runnerapi.PathSandboxCheckpoint, sandbox, ""), in, &out)
	return out, err
}

// DeleteSandbox takes a sandbox down.
func (c *Client) DeleteSandbox(ctx context.Context, endpoint string, id core.SandboxID) error {
	return c.call(ctx, c.timeouts.Call, endpoint, http.MethodDelete, with(runnerapi.PathSandbox, id, ""), nil, nil)
}

// DeleteCheckpoint removes a checkpoint's bytes.
func (c *Client) DeleteCheckpoint(ctx context.Context, endpoint string, id core.CheckpointID) error {
	return c.call(ctx, c.timeouts.Call, endpoint, http.MethodDelete, with(runnerapi.PathCheckpoint, id, ""), nil, nil)
}

// Diff says what differs between two checkpoints.
func (c *Client) Diff(ctx context.Context, endpoint string, from core.CheckpointID, d runnerapi.Diff) (runnerapi.DiffPage, error) {
	var out runnerapi.DiffPage
	err := c.callBound(ctx, c.timeouts.Diff, endpoint, http.MethodPost, with(runnerapi.PathCheckpointDiff, from, ""), d, &out, boundDiff)
	return out, err
}

// ReadFile reads a part of a file of a checkpoint.
func (c *Client) ReadFile(ctx context.Context, endpoint string, id core.CheckpointID, in runnerapi.ReadFile) (runnerapi.FilePart, error) {
	var out runnerapi.FilePart
	err := c.callBound(ctx, c.timeouts.Diff, endpoint, http.MethodPost, with(runnerapi.PathCheckpointFiles, id, ""), in, &out, boundFile)
	return out, err
}

// OpenPort forwards a port.
func (c *Client) OpenPort(ctx context.Context, endpoint string, sandbox core.SandboxID, p runnerapi.Port) (runnerapi.Port, error) {
	var out runnerapi.Port
	err := c.call(ctx, c.timeouts.Call, endpoint, http.MethodPost, with(runnerapi.PathSandboxPorts, sandbox, ""), p, &out)
	return out, err
}

// ClosePort stops forwarding a port.
func (c *Client) ClosePort(ctx context.Context, endpoint string, sandbox core.SandboxID, id core.PortID) error {
	return c.call(ctx, c.timeouts.Call, endpoint, http.MethodDelete, with(runnerapi.PathSandboxPort, sandbox, id), nil, nil)
}

// SetEgress gives a sandbox other rules.
func (c *Client) SetEgress(ctx context.Context, endpoint string, sandbox core.SandboxID, rules runnerapi.EgressRules) error {
	return c.call(ctx, c.timeouts.Call, endpoint, http.MethodPut, with(runnerapi.PathSandboxEgress, sandbox, ""), rules, nil)
}

// Prepare tells a runner for which checkpoints it is to prepare machines.
func (c *Client) Prepare(ctx context.Context, endpoint string, in runnerapi.Prepare) (out runnerapi.Prepared, err error) {
	err = c.call(ctx, c.timeouts.Call, endpoint, http.MethodPut, runnerapi.PathPrepared, in, &out)
	return out, err
}

// Pull begins the pull of an image, or asks how far it is.
func (c *Client) Pull(ctx context.Context, endpoint string, id core.OperationID, in runnerapi.Pull) (out runnerapi.PullState, err error) {
	err = c.call(ctx, c.timeouts.Call, endpoint, http.MethodPut, with(runnerapi.PathPull, id, ""), in, &out)
	return out, err
}

// Console returns the tail of a console.
func (c *Client) Console(ctx context.Context, endpoint string, sandbox core.SandboxID) (io.ReadCloser, error) {
	res, err := c.do(ctx, endpoint, http.MethodGet, with(runnerapi.PathSandboxConsole, sandbox, ""), nil)
	if err != nil {
		return nil, err
	}
	return res.Body, nil
}

// Guest returns a transport to the agent in a sandbox.
func (c *Client) Guest(endpoint string, sandbox core.SandboxID) http.RoundTripper {
	return guest{c: c, endpoint: endpoint, prefix: strings.TrimSuffix(with(runnerapi.PathSandboxGuest, sandbox, ""), "/*")}
}

type guest struct {
	c                *Client
	endpoint, prefix string
}

// RoundTrip sends a request for the agent through its runner. Of the headers only those that the agent understands go along:
// a user's credentials never do.
func (g guest) RoundTrip(req *http.Request) (*http.Response, error) {
	transport, base, err := g.c.route(g.endpoint)
	if err != nil {
		if req.Body != nil {
			err = errors.Join(err, req.Body.Close())
		}
		return nil, err
	}
	out := req.Clone(req.Context())
	out.URL = base.JoinPath(g.prefix, req.URL.Path)
	out.URL.RawQuery = req.URL.RawQuery
	out.Host, out.RequestURI, out.Header = "", "", http.Header{}
	for _, name := range []string{
		"Content-Type", "Connection", "Upgrade", "Sec-Websocket-Key", "Sec-Websocket-Version", "Sec-Websocket-Protocol",
	} {
		if v := req.Header.Get(name); v != "" {
			out.Header.Set(name, v)
		}
	}
	g.c.authorize(out)
	res, err := transport.RoundTrip(out)
	if err != nil {
		return nil, unreachable(req.Context(), err)
	}
	return res, nil
}
