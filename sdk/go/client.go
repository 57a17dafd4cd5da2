package coppice

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Config says which server to use, and with which key.
type Config struct {
	// Server is unix:///path/to/socket, http://host:port or https://host:port.
	Server string
	// Token is the API key. It may be empty if only a server's open routes are used.
	Token string
	// UserAgent is sent with every request; "coppice-go" when empty.
	UserAgent string
	// Transport carries the requests; nil: the client makes its own. For a unix server, it must dial the socket itself.
	Transport http.RoundTripper
}

// Client talks to one server. Make it with New.
type Client struct {
	base  *url.URL
	token string
	agent string
	http  *http.Client

	direct direct
}

// The maximum number of bytes that are read of an answer that must fit in memory.
const maxAnswer = 256 << 20

// New checks the configuration and makes a client. It connects to nothing.
func New(cfg Config) (*Client, error) {
	c := &Client{token: cfg.Token, agent: cfg.UserAgent}
	if c.agent == "" {
		c.agent = "coppice-go"
	}
	dialer := &net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}
	transport := &http.Transport{DialContext: dialer.DialContext, MaxIdleConnsPerHost: 64, IdleConnTimeout: 90 * time.Second, ExpectContinueTimeout: 5 * time.Second}
	switch u, err := url.Parse(cfg.Server); {
	case err != nil:
		return nil, errors.New("the server address is no URL such as https://HOST[:PORT], http://HOST:PORT or unix:///PATH") // it may contain a password
	case u.Scheme == "unix" && u.Host == "" && u.Path != "":
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, "unix", u.Path)
		}
		c.base = &url.URL{Scheme: "http", Host: "coppice"}
	case (u.Scheme == "http" || u.Scheme == "https") && u.Host != "":
		transport.Proxy = http.ProxyFromEnvironment
		c.base = &url.URL{Scheme: u.Scheme, Host: u.Host, Path: strings.TrimSuffix(u.Path, "/")}
	default:
		return nil, fmt.Errorf("server address %q is neither unix:///path nor http(s)://host:port", u.Redacted())
	}
	c.http = &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	if cfg.Transport != nil {
		c.http.Transport = cfg.Transport
	}
	return c, nil
}

// Close closes idle connections.
func (c *Client) Close() {
	c.http.CloseIdleConnections()
	c.direct.close()
}

// request is one call. body, unless it is nil, is sent as JSON; raw is sent unchanged.
type request struct {
	method string
	path   []string // joined with slashes after escaping each
	query  url.Values
	body   any
	raw    io.Reader
	size   int64 // of raw in bytes; 0: unknown
	header http.Header
	once   bool   // never repeated
	keyed  bool   // it creates something: sent with a key, so that a repetition creates nothing new
	key    string // the key
}

func (c *Client) url(r request) string {
	u := c.base.JoinPath()
	var escaped strings.Builder
	escaped.WriteString(strings.TrimSuffix(c.base.EscapedPath(), "/"))
	for _, p := range r.path {
		escaped.WriteString("/" + url.PathEscape(p))
	}
	u.Path, _ = url.PathUnescape(escaped.String())
	u.RawPath = escaped.String()
	u.RawQuery = r.query.Encode()
	return u.String()
}

// The number of times that a call is tried, and the length of the first pause, which doubles each time.
const (
	attempts   = 5
	firstPause = 50 * time.Millisecond
	maxPause   = 5 * time.Second
)

// send performs the call and returns an answer with a status below 400, whose body the caller closes.
func (c *Client) send(ctx context.Context, r request) (*http.Response, error) {
	var payload []byte
	if r.body != nil {
		var err error
		if payload, err = json.Marshal(r.body); err != nil {
			return nil, fmt.Errorf("%s %s: encode: %w", r.method, strings.Join(r.path, "/"), err)
		}
	}
	if r.keyed && r.key == "" {
		r.key = keyOf(ctx)
	}
	pause := firstPause
	for attempt := 1; ; attempt++ {
		resp, err := c.try(ctx, r, payload)
		wait, again := retryable(r, resp, err)
		if again && r.key != "" && resp != nil && resp.StatusCode == http.StatusConflict {
			attempt = 1 // the server has the first try and works on it; that may take any time
		}
		if !again || r.once || attempt == attempts || ctx.Err() != nil {
			return result(resp, err)
		}
		if resp != nil {
			_ = resp.Body.Close()
		}
		timer := time.NewTimer(max(wait, pause/2+rand.N(pause))) //nolint:gosec // G404: a pause, not a secret
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil, context.Cause(ctx)
		case <-timer.C:
		}
		pause = min(2*pause, maxPause)
	}
}

func (c *Client) try(ctx context.Context, r request, payload []byte) (*http.Response, error) {
	body := r.raw
	if payload != nil {
		body = bytes.NewReader(payload)
	}
	req, err := http.NewRequestWithContext(ctx, r.method, c.url(r), body)
	if err != nil {
		return nil, err
	}
	if r.size > 0 {
		req.ContentLength = r.size
	}
	maps.Copy(req.Header, r.header)
	if payload != nil {
		req.Header.Set("Content-Type", "application/json")
	} else if r.raw != nil && req.Header.Get("Content-Type") == "" {
		req.Header.Set("Content-Type", "application/octet-stream")
	}
	req.Header.Set("User-Agent", c.agent)
	if r.key != "" {
		req.Header.Set(headerKey, r.key)
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	return c.http.Do(req)
}

// retryable reports whether a repetition is safe and may help, and how long the server wants the client to wait.
func retryable(r request, resp *http.Response, err error) (time.Duration, bool) {
	idempotent := r.method == http.MethodGet || r.method == http.MethodHead || r.method == http.MethodDelete || r.key != ""
	if err != nil {
		var op *net.OpError
		refused := errors.As(err, &op) && op.Op == "dial" && errors.Is(err, syscall.ECONNREFUSED)
		lost := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
		return 0, r.raw == nil && (refused || idempotent && lost)
	}
	seconds, _ := strconv.Atoi(resp.Header.Get("Retry-After"))
	wait := min(time.Duration(max(seconds, 0))*time.Second, maxPause)
	if resp.StatusCode == http.StatusTooManyRequests { // refused before the server did anything
		return wait, r.raw == nil && peek(resp).Code == string(CodeRateLimited)
	}
	if r.key != "" {
		return wait, repeatable(resp)
	}
	switch resp.StatusCode {
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return wait, idempotent
	}
	return 0, false
}

// result turns an answer of 400 or more into an *Error.
func result(resp *http.Response, err error) (*http.Response, error) {
	if err != nil {
		return nil, err
	}
	if resp.StatusCode < http.StatusBadRequest {
		return resp, nil
	}
	defer resp.Body.Close()
	return nil, problem(resp)
}

// call sends the request and decodes the answer into out, unless that is nil.
func (c *Client) call(ctx context.Context, r request, out any) error {
	resp, err := c.send(ctx, r)
	if err != nil {
		return err
	}
	return decode(resp, out)
}

func decode(resp *http.Response, out any) error {
	defer resp.Body.Close()
	if out == nil || resp.StatusCode == http.StatusNoContent {
		_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<20)) // so that the connection can be used again
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(out); err != nil {
		return fmt.Errorf("%s %s: decode the answer: %w", resp.Request.Method, resp.Request.URL.Path, err)
	}
	return nil
}

func get(path ...string) request  { return request{method: http.MethodGet, path: path} }
func post(path ...string) request { return request{method: http.MethodPost, path: path} }

// creation is a POST that makes something.
func creation(path ...string) request {
	return request{method: http.MethodPost, path: path, keyed: true}
}

func (r request) with(query url.Values) request {
	r.query = query
	return r
}

func (r request) json(body any) request {
	r.body = body
	return r
}

// withoutAddress takes the address out of an error of net/url or net/http. An address may have a token or a password in it.
func withoutAddress(err error) error {
	if e, ok := errors.AsType[*url.Error](err); ok {
		return e.Err
	}
	return err
}
