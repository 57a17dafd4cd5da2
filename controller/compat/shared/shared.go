// Package shared has what the layers for clients of other products share: the client of the REST API in
// this process, errors and answers, and the time that the body of a request may take.
package shared

import (
	"io"
	"net/http"
	"strings"

	"github.com/coppice-dev/coppice/internal/inprocess"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// Client makes a client of the REST API, which is a handler of this process. The token is the API key of its requests.
func Client(api http.Handler, token, agent string) *coppice.Client {
	c, err := coppice.New(coppice.Config{
		Server: "http://coppice", Token: token, UserAgent: agent, Transport: transport{inprocess.Transport{Handler: api}},
	})
	if err != nil {
		panic(err) // the address is constant
	}
	return c
}

// transport makes files go through the REST API: it answers that there is no pass for a direct way.
type transport struct{ next http.RoundTripper }

func (t transport) RoundTrip(r *http.Request) (*http.Response, error) {
	if !strings.HasSuffix(r.URL.Path, "/files/pass") {
		return t.next.RoundTrip(r)
	}
	return &http.Response{
		StatusCode: http.StatusNotFound, Status: "404 Not Found", Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{}, Request: r,
		Body: io.NopCloser(strings.NewReader(`{"code":"ROUTE_NOT_FOUND","status":404}`)),
	}, nil
}
