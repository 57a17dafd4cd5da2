package coppice

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"
)

// direct lets the client reach the data planes of runners without its server.
type direct struct {
	mu      sync.Mutex // guards the fields below
	clients map[DataTLS]*http.Client
	passes  map[WorkspaceID]DataPass
	never   time.Time // no pass is requested until then: there is no data plane, or it cannot be reached
}

const (
	directPause = time.Minute      // after this time, a missing data plane is tried again
	passMargin  = 30 * time.Second // a pass with less time left is no longer used
	maxPasses   = 1024
)

// client returns an HTTP client that trusts the certificate that a pass names.
func (d *direct) client(t DataTLS) (*http.Client, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c, ok := d.clients[t]; ok {
		return c, nil
	}
	dialer := &net.Dialer{Timeout: 5 * time.Second, KeepAlive: 30 * time.Second}
	transport := &http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: dialer.DialContext, TLSHandshakeTimeout: 5 * time.Second, IdleConnTimeout: 90 * time.Second,
		ExpectContinueTimeout: 5 * time.Second, TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}},
	}
	if t.Authority != "" {
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM([]byte(t.Authority)) {
			return nil, errors.New("the server sent an authority's certificate that cannot be read")
		}
		transport.TLSClientConfig.RootCAs, transport.TLSClientConfig.ServerName = roots, t.ServerName
	}
	c := &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	if d.clients == nil {
		d.clients = map[DataTLS]*http.Client{}
	}
	d.clients[t] = c
	return c, nil
}

func (d *direct) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.clients {
		c.CloseIdleConnections()
	}
}

// avoid makes the client use the server for a while.
func (d *direct) avoid() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.never = time.Now().Add(directPause)
}

func (d *direct) kept(id WorkspaceID) (pass DataPass, ok, never bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	pass, ok = d.passes[id]
	return pass, ok && time.Until(pass.ExpiresAt) > passMargin, time.Now().Before(d.never)
}

func (d *direct) keep(id WorkspaceID, pass DataPass) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.passes == nil || len(d.passes) >= maxPasses {
		d.passes = map[WorkspaceID]DataPass{}
	}
	d.passes[id] = pass
}

// FilesPass says how to reach the files of a workspace: directly at its runner with a pass, or through the server.
func (c *Client) FilesPass(ctx context.Context, id WorkspaceID) (DataPass, error) {
	var out DataPass
	err := c.call(ctx, post("v1", "workspaces", id, "files", "pass"), &out)
	return out, err
}

// pass returns a valid pass; ok is false if the client must use the server.
func (c *Client) pass(ctx context.Context, id WorkspaceID, fresh bool) (pass DataPass, ok bool) {
	pass, ok, never := c.direct.kept(id)
	if never {
		return pass, false
	}
	if ok && !fresh {
		return pass, true
	}
	pass, err := c.FilesPass(ctx, id)
	if err != nil {
		if errors.Is(err, Code("ROUTE_NOT_FOUND")) { // an older server
			c.direct.avoid()
		}
		return pass, false // the request itself will show the error
	}
	if u, err := url.Parse(pass.URL); err != nil || !u.IsAbs() {
		c.direct.avoid()
		return pass, false
	}
	c.direct.keep(id, pass)
	return pass, true
}

// sendFiles is send for the bytes of files. They go directly to the runner if possible.
func (c *Client) sendFiles(ctx context.Context, id WorkspaceID, r request) (*http.Response, error) {
	for attempt := range 2 {
		pass, ok := c.pass(ctx, id, attempt > 0)
		if !ok {
			break
		}
		resp, err := c.tryDirect(ctx, pass, r)
		var refused *Error
		switch {
		case err == nil:
			return resp, nil
		case errors.As(err, &refused) && refused.Status == http.StatusUnauthorized && attempt == 0:
			continue // the workspace was restored: it has another sandbox
		case errors.As(err, &refused) && refused.Status != http.StatusUnauthorized, ctx.Err() != nil, !errors.As(err, &refused) && !errors.As(err, new(*unsentError)):
			return nil, err
		}
		c.direct.avoid()
		break
	}
	return c.send(ctx, r)
}

// unsentError is the failure of a request whose body was not read at all.
type unsentError struct{ err error }

func (e *unsentError) Error() string { return e.err.Error() }
func (e *unsentError) Unwrap() error { return e.err }

// counted records whether a body was begun, and prevents its closing: it may be sent again in another way.
type counted struct {
	io.Reader
	begun bool
}

func (r *counted) Read(p []byte) (int, error) {
	r.begun = true
	return r.Reader.Read(p)
}

func (r *counted) Close() error { return nil }

func (c *Client) tryDirect(ctx context.Context, pass DataPass, r request) (*http.Response, error) {
	client, err := c.direct.client(pass.TLS)
	if err != nil {
		return nil, err
	}
	var body io.Reader
	sent := &counted{Reader: r.raw}
	if r.raw != nil && r.raw != http.NoBody {
		body = sent
	}
	req, err := http.NewRequestWithContext(ctx, r.method, pass.URL+"?"+r.query.Encode(), body)
	if err != nil {
		return nil, fmt.Errorf("reach the data plane: %w", err)
	}
	maps.Copy(req.Header, r.header)
	if body != nil {
		req.Header.Set("Expect", "100-continue") // if the pass is refused, no byte of the body is sent
	}
	req.Header.Set("User-Agent", c.agent)
	req.Header.Set("Authorization", "Bearer "+pass.Token)
	resp, err := client.Do(req)
	if err != nil {
		if !sent.begun {
			err = &unsentError{err}
		}
		return nil, err
	}
	return result(resp, nil)
}
