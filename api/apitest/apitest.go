// Package apitest compares the answers of a running server with api/openapi.yaml. It is for tests.
package apitest

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"sync"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/legacy"

	"github.com/coppice-dev/coppice/api"
)

// Router finds the operation of the contract that a request is for, on any server.
var Router = sync.OnceValues(func() (routers.Router, error) {
	doc, err := openapi3.NewLoader().LoadFromData(api.Specification())
	if err != nil {
		return nil, err
	}
	doc.Servers = nil
	return legacy.NewRouter(doc)
})

// Transport returns a transport that fails the test when an answer breaks the contract: a status, header or content type that
// is not in it, or a JSON body of another form. Bodies that are no JSON are passed on as they come. next is
// http.DefaultTransport when it is nil.
func Transport(t testing.TB, next http.RoundTripper) http.RoundTripper {
	t.Helper()
	if next == nil {
		next = http.DefaultTransport
	}
	return transport{t, next}
}

type transport struct {
	t    testing.TB
	next http.RoundTripper
}

// RoundTrip sends the request and checks the answer.
func (tr transport) RoundTrip(req *http.Request) (*http.Response, error) {
	res, err := tr.next.RoundTrip(req)
	if err != nil || res.StatusCode == http.StatusSwitchingProtocols {
		return res, err
	}
	var body []byte
	if isJSON(res.Header) {
		body, err = io.ReadAll(res.Body)
		_ = res.Body.Close()
		res.Body = io.NopCloser(bytes.NewReader(body))
		if err != nil { // the connection broke: the reader will see that too
			res.Body = io.NopCloser(io.MultiReader(bytes.NewReader(body), failing{err}))
			return res, nil //nolint:nilerr // it is in the body
		}
	}
	if err := Check(req, res, body); err != nil {
		tr.t.Errorf("%s %s: %v", req.Method, req.URL.Path, err)
	}
	return res, nil
}

// CloseIdleConnections lets http.Client do so.
func (tr transport) CloseIdleConnections() {
	if c, ok := tr.next.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func isJSON(h http.Header) bool {
	media, _, err := mime.ParseMediaType(h.Get("Content-Type"))
	return err == nil && (media == "application/json" || media == "application/problem+json")
}

// Check compares an answer with what the contract says of its request. Unknown routes have no contract, but they answer with
// a problem as well.
func Check(req *http.Request, res *http.Response, body []byte) error {
	router, err := Router()
	if err != nil {
		return err
	}
	if res.Header.Get("X-Request-Id") == "" {
		return fmt.Errorf("status %d: the answer has no request id", res.StatusCode)
	}
	asked := req.Clone(context.WithoutCancel(req.Context()))
	asked.URL = &url.URL{Scheme: "http", Host: "x", Path: req.URL.Path, RawPath: req.URL.RawPath, RawQuery: req.URL.RawQuery}
	route, params, err := router.FindRoute(asked)
	if err != nil {
		if res.StatusCode != http.StatusNotFound && res.StatusCode != http.StatusMethodNotAllowed {
			return fmt.Errorf("status %d of a route that is not in the contract", res.StatusCode)
		}
		return nil
	}
	input := &openapi3filter.ResponseValidationInput{
		RequestValidationInput: &openapi3filter.RequestValidationInput{Request: asked, PathParams: params, Route: route},
		Status:                 res.StatusCode, Header: res.Header, Options: &openapi3filter.Options{IncludeResponseStatus: true},
	}
	input.SetBodyBytes(body)
	if !isJSON(res.Header) {
		input.Options.ExcludeResponseBody = true
	}
	if err := openapi3filter.ValidateResponse(asked.Context(), input); err != nil {
		return fmt.Errorf("the answer breaks the contract: %w\n%s", err, body)
	}
	return nil
}
