package proxy_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/egress/ca"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/egress/policy"
	"github.com/coppice-dev/coppice/internal/test/eventually"
)

const canary = "sk-canary/7f3+a9=0123456789abcdef"

// bank is a world with a grant for a host.
type bank struct {
	*world
	root  ca.Authority
	trust *x509.CertPool // roots that a guest of the project trusts
	g     grant.Grant

	mu   sync.Mutex
	seen []string // Authorization headers that the host received
}

const bankHost = "api.example"

func newBank(t *testing.T, change ...func(*grant.Grant)) *bank {
	t.Helper()
	return newBankIn(newWorld(t, bankHost, "other.example"), change...)
}

func newBankIn(w *world, change ...func(*grant.Grant)) *bank {
	w.t.Helper()
	t := w.t
	b := &bank{world: w, trust: x509.NewCertPool()}
	var err error
	if b.root, err = ca.NewRoot("prj_1", time.Now()); err != nil {
		t.Fatal(err)
	}
	root, err := x509.ParseCertificate(b.root.Certificate)
	if err != nil {
		t.Fatal(err)
	}
	b.trust.AddCert(root)
	b.names.set(bankHost, allowedAddr)
	b.names.set("other.example", evilAddr)
	b.g = grant.Grant{
		ID: "api", Mode: grant.ModeHeader, Placeholder: grant.NewPlaceholder(), Secret: grant.NewSecret(canary), Header: "Authorization",
		Targets: []grant.Target{b.at(bankHost + ":443")},
	}
	for _, c := range change {
		c(&b.g)
	}
	b.give(b.g)
	return b
}

func (b *bank) at(s string) grant.Target {
	b.t.Helper()
	h, port, err := policy.ParseHostPort(s)
	if err != nil {
		b.t.Fatal(err)
	}
	return grant.Target{Host: h, Port: port}
}

// give replaces the grants with these.
func (b *bank) give(grants ...grant.Grant) {
	b.t.Helper()
	bundle := grant.Bundle{Grants: grants}
	if names := grant.NewSet(grants...).Hosts(); names != nil {
		issuer, err := b.root.Issuer(names, time.Now(), time.Now().Add(time.Hour))
		if err != nil {
			b.t.Fatal(err)
		}
		bundle.Issuer = &issuer
	}
	b.rules.Grants, b.rules.Held = bundle, nil
	b.setRules()
}

// hold keeps the hosts of the grant, whose secret is missing.
func (b *bank) hold() {
	b.t.Helper()
	b.rules.Grants, b.rules.Held = grant.Bundle{}, b.g.Targets
	b.setRules()
}

// open runs the granted host.
func (b *bank) open(h http.HandlerFunc) *site {
	b.t.Helper()
	return b.serve(allowedAddr+":443", func(w http.ResponseWriter, r *http.Request) {
		b.mu.Lock()
		b.seen = append(b.seen, r.Header.Get("Authorization"))
		b.mu.Unlock()
		h(w, r)
	}, bankHost)
}

func (b *bank) got() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := b.seen
	b.seen = nil
	return out
}

// guest is a client in the sandbox that trusts only the project's authority. aware: it uses the explicit proxy.
func (b *bank) guest(aware, http2 bool) *http.Client {
	c := b.unaware()
	if aware {
		c = b.client()
	}
	t := c.Transport.(*http.Transport)
	t.TLSClientConfig.RootCAs, t.ForceAttemptHTTP2, t.DisableCompression = b.trust, http2, true
	if !http2 {
		t.TLSClientConfig.NextProtos = []string{"http/1.1"}
	}
	return c
}

// ask sends a request with the placeholder, and returns the whole answer.
func (b *bank) ask(c *http.Client, method, target, body string, header ...string) (int, string) {
	b.t.Helper()
	r, err := http.NewRequestWithContext(b.t.Context(), method, target, strings.NewReader(body))
	if err != nil {
		b.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	resp, err := c.Do(r)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	var all bytes.Buffer
	_ = resp.Header.Write(&all)
	_, err = io.Copy(&all, resp.Body)
	_ = resp.Trailer.Write(&all)
	return resp.StatusCode, fmt.Sprintf("%s %s %v", resp.Proto, all.String(), err)
}

func (b *bank) bearer() []string { return []string{"Authorization", "Bearer " + b.g.Placeholder} }

// TestInjection: the host gets the secret, with programs that know the proxy and programs that do not, in every version
// of HTTP; the guest never gets it.
func TestInjection(t *testing.T) {
	b := newBank(t)
	b.open(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s %s %s from %s", r.Method, r.Host, body, r.Header.Get("User-Agent"))
	})
	for _, aware := range []bool{true, false} {
		for proto, two := range map[string]bool{"HTTP/1.1": false, "HTTP/2.0": true} {
			c := b.guest(aware, two)
			for range 2 { // a second time over the same connection
				status, body := b.ask(c, "POST", "https://"+bankHost+"/v1/x?q=1", "hello", append(b.bearer(), "User-Agent", "curl")...)
				if status != 200 || !strings.HasPrefix(body, proto) || !strings.Contains(body, "POST "+bankHost+" hello from curl") {
					t.Errorf("aware %v, %s: %d %s", aware, proto, status, body)
				}
			}
			if got, want := b.got(), "Bearer "+canary; !slices.Equal(got, []string{want, want}) {
				t.Errorf("the host got %q", got)
			}
			flow := "allowed http POST api.example:443/v1/x with api 200"
			wantFlows(t, b.world, flow, flow)
		}
	}
	// Without a placeholder no secret is put in, and the guest's own header is removed.
	if status, body := b.ask(b.guest(true, false), "GET", "https://"+bankHost+"/", "", "Authorization", "Bearer guests-own"); status != 200 || !slices.Equal(b.got(), []string{""}) {
		t.Errorf("%d %s", status, body)
	}
	wantFlows(t, b.world, "allowed http GET api.example:443/ 200")
}

// TestEcho: a host sends back everything that it received, in any form and in pieces; the guest never sees any part of
// the secret.
func TestEcho(t *testing.T) {
	b := newBank(t)
	answers := map[string]func(w http.ResponseWriter, r *http.Request, s string){
		"body":   func(w http.ResponseWriter, _ *http.Request, s string) { fmt.Fprint(w, "you said ", s) },
		"header": func(w http.ResponseWriter, _ *http.Request, s string) { w.Header().Set("X-You-Said", s) },
		"name of a header": func(w http.ResponseWriter, _ *http.Request, s string) {
			w.Header()[strings.Map(func(r rune) rune {
				if r == '/' || r == '=' {
					return '-'
				}
				return r
			}, s)] = []string{"1"}
			w.Header().Set("X-Too", s)
		},
		"trailer": func(w http.ResponseWriter, _ *http.Request, s string) {
			w.Header().Set("Trailer", "X-End")
			fmt.Fprint(w, "nothing here")
			w.(http.Flusher).Flush()
			w.Header().Set("X-End", s)
		},
		"bytes": func(w http.ResponseWriter, _ *http.Request, s string) {
			for _, c := range []byte("you said " + s) {
				_, _ = w.Write([]byte{c})
				w.(http.Flusher).Flush()
			}
		},
		"hex": func(w http.ResponseWriter, _ *http.Request, s string) { fmt.Fprintf(w, "%x", s) },
		"base64": func(w http.ResponseWriter, _ *http.Request, s string) {
			fmt.Fprint(w, base64.URLEncoding.EncodeToString([]byte("x"+s)))
		},
		"escaped": func(w http.ResponseWriter, _ *http.Request, s string) { fmt.Fprint(w, url.QueryEscape(s)) },
		"compressed": func(w http.ResponseWriter, r *http.Request, s string) {
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			fmt.Fprint(z, "accepts ", r.Header.Get("Accept-Encoding"), s)
			_ = z.Close()
		},
		"compressed in another way": func(w http.ResponseWriter, _ *http.Request, s string) {
			w.Header().Set("Content-Encoding", "br")
			fmt.Fprint(w, s)
		},
		"redirect": func(w http.ResponseWriter, r *http.Request, s string) {
			http.Redirect(w, r, "https://other.example/?k="+url.QueryEscape(s), http.StatusFound)
		},
		"failure": func(w http.ResponseWriter, _ *http.Request, s string) {
			http.Error(w, "bad key "+s, http.StatusUnauthorized)
		},
		"upgrade": func(w http.ResponseWriter, _ *http.Request, s string) {
			c, rw, err := http.NewResponseController(w).Hijack()
			if err != nil {
				return
			}
			defer c.Close()
			fmt.Fprintf(rw, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nyou said %s", s)
			_ = rw.Flush()
		},
	}
	var mu sync.Mutex
	var answer func(http.ResponseWriter, *http.Request, string)
	b.open(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		f := answer
		mu.Unlock()
		f(w, r, strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer "))
	})
	c := b.guest(true, false)
	for name, f := range answers {
		mu.Lock()
		answer = f
		mu.Unlock()
		header := append(b.bearer(), "Accept-Encoding", "gzip, br")
		if name == "upgrade" {
			header = append(header, "Connection", "Upgrade", "Upgrade", "websocket")
		}
		status, all := b.ask(c, "GET", "https://"+bankHost+"/", "", header...)
		if got := b.got(); !slices.Equal(got, []string{"Bearer " + canary}) {
			t.Fatalf("%s: the host got %q", name, got)
		}
		for what, form := range map[string]string{
			"it": canary[:14], "hex": hex.EncodeToString([]byte(canary))[:20], "escaped": url.QueryEscape(canary)[:14],
			"base64": base64.URLEncoding.EncodeToString([]byte("x" + canary))[2:20],
		} {
			if strings.Contains(strings.ToLower(all), strings.ToLower(form)) {
				t.Errorf("%s: the guest got %s: %d %s", name, what, status, all)
			}
		}
		flows := b.flows()
		if len(flows) != 1 || !strings.HasPrefix(flows[0], "cut http GET api.example:443/ with api") {
			t.Errorf("%s: %q", name, flows)
		}
	}
}

// TestPlaceholderElsewhere: a placeholder passes only in its grant's header. Anywhere else, not even a part of it
// passes.
func TestPlaceholderElsewhere(t *testing.T) {
	b := newBank(t)
	var mu sync.Mutex
	var bodies []string
	note := func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		mu.Lock()
		defer mu.Unlock()
		bodies = append(bodies, string(body))
	}
	p := b.g.Placeholder
	for to, site := range map[string]*site{"https://" + bankHost: b.open(note), "http://other.example": b.serve(evilAddr+":80", note)} {
		for name, ask := range map[string]func(c *http.Client) (int, string){
			"query":      func(c *http.Client) (int, string) { return b.ask(c, "GET", to+"/?k="+p, "") },
			"escaped":    func(c *http.Client) (int, string) { return b.ask(c, "GET", to+"/?k=%63"+p[1:], "") },
			"user agent": func(c *http.Client) (int, string) { return b.ask(c, "GET", to+"/", "", "User-Agent", p) },
			"base64": func(c *http.Client) (int, string) {
				return b.ask(c, "GET", to+"/", "", "X-A", base64.StdEncoding.EncodeToString([]byte("ab"+p)))
			},
			"another's": func(c *http.Client) (int, string) {
				return b.ask(c, "GET", to+"/", "", "Authorization", "Bearer "+grant.NewPlaceholder())
			},
		} {
			before := site.requests.Load()
			status, all := ask(b.guest(true, false))
			if status != http.StatusForbidden || !strings.Contains(all, "placeholder") {
				t.Errorf("%s to %s: %d %s", name, to, status, all)
			}
			if n := site.requests.Load() - before; n != 0 {
				t.Errorf("%s to %s: %d requests arrived", name, to, n)
			}
		}
		for name, body := range map[string]string{"body": "x" + p, "hex": fmt.Sprintf("%x", p), "base64": base64.StdEncoding.EncodeToString([]byte("a" + p))} {
			for _, chunks := range []int{1, 5, 1 << 20} {
				reader, writer := io.Pipe()
				go func() {
					for part := range slices.Chunk([]byte("start "+body), chunks) {
						if _, err := writer.Write(part); err != nil {
							return
						}
					}
					_ = writer.Close()
				}()
				r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, to+"/", reader)
				if err != nil {
					t.Fatal(err)
				}
				resp, err := b.guest(true, false).Do(r)
				if err == nil {
					if resp.StatusCode == http.StatusOK {
						t.Errorf("%s in pieces of %d to %s: %d", name, chunks, to, resp.StatusCode)
					}
					_ = resp.Body.Close()
				}
				_ = reader.Close()
			}
		}
	}
	for _, f := range b.flows() { // some of a body may have left before the placeholder was found
		if !strings.HasPrefix(f, "denied") && !strings.HasPrefix(f, "cut http POST") {
			t.Error(f)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	for _, body := range bodies {
		if len(body) > len("start ")+3 { // base64 of the text before it
			t.Errorf("a host got %q", body)
		}
	}
}

// TestOnlyTheHost: the secret goes only to the granted host, whichever other server claims to be it.
func TestOnlyTheHost(t *testing.T) {
	b := newBank(t)
	site := b.open(func(http.ResponseWriter, *http.Request) {})
	for _, two := range []bool{false, true} {
		c := b.guest(true, two)
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+bankHost+"/", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Host = "other.example" // Host, :authority
		r.Header.Set("Authorization", "Bearer "+b.g.Placeholder)
		resp, err := c.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusForbidden {
			t.Errorf("HTTP/2 %v: %d", two, resp.StatusCode)
		}
	}
	if n := site.conns.Load(); n != 0 {
		t.Errorf("%d connections", n)
	}
	b.flows()
	b.names.set(bankHost, evilAddr) // its certificate is for another name
	evil := b.serve(evilAddr+":443", nil, "other.example")
	if status, all := b.ask(b.guest(true, false), "GET", "https://"+bankHost+"/", "", b.bearer()...); status != http.StatusBadGateway || evil.requests.Load() != 0 {
		t.Errorf("%d %s, %d requests", status, all, evil.requests.Load())
	}
	wantFlows(t, b.world, "failed http GET api.example:443/ with api")
	// A guest of another project does not accept our certificate, so nothing is sent.
	stranger := b.guest(true, false)
	stranger.Transport.(*http.Transport).TLSClientConfig.RootCAs = b.ca.pool
	if status, all := b.ask(stranger, "GET", "https://"+bankHost+"/", "", b.bearer()...); status != 0 || !strings.Contains(all, "unknown authority") {
		t.Errorf("%d %s", status, all)
	}
	eventually.True(t, "the proxy notices", func() bool {
		b.journal.mu.Lock()
		defer b.journal.mu.Unlock()
		return len(b.journal.begun) > 0
	})
	wantFlows(t, b.world, "failed tls api.example:443")
	// A host without a grant is reached through a tunnel, with its own certificate.
	if status, all := b.ask(stranger, "GET", "https://other.example/", ""); status != 200 {
		t.Errorf("%d %s", status, all)
	}
}

// TestGrantsEnd: when a grant ends, everything that was begun with it ends, and the host receives nothing more.
func TestGrantsEnd(t *testing.T) {
	for name, end := range map[string]func(*bank){
		"revoked":       func(b *bank) { b.give() },
		"other secret":  func(b *bank) { g := b.g; g.Secret = grant.NewSecret("another-secret"); b.give(g) },
		"other epoch":   func(b *bank) { g := b.g; g.Placeholder = grant.NewPlaceholder(); b.give(g) },
		"narrower path": func(b *bank) { g := b.g; g.Paths = []string{"/v2"}; b.give(g) },
		"expired":       func(*bank) {},
		"removed":       func(b *bank) { b.server.Remove(b.id) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBank(t, func(g *grant.Grant) {
				if name == "expired" {
					g.Expires = time.Now().Add(6 * time.Second) // the request is still under way at that time
				}
			})
			gone := make(chan struct{})
			b.open(func(w http.ResponseWriter, r *http.Request) {
				fmt.Fprint(w, "first")
				w.(http.Flusher).Flush()
				if r.URL.Path == "/long" {
					<-r.Context().Done()
					close(gone)
				}
			})
			c, idle := b.guest(true, false), b.guest(true, false)
			if status, all := b.ask(idle, "GET", "https://"+bankHost+"/", ""); status != 200 {
				t.Fatal(status, all)
			}
			b.flows()
			r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+bankHost+"/long", nil)
			if err != nil {
				t.Fatal(err)
			}
			r.Header.Set("Authorization", "Bearer "+b.g.Placeholder)
			resp, err := c.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if _, err := io.ReadFull(resp.Body, make([]byte, 5)); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			end(b)
			if _, err := io.ReadAll(resp.Body); err == nil || os.IsTimeout(err) {
				t.Errorf("the answer ended as if it were whole, or not at all: %v", err)
			}
			<-gone
			if took := time.Since(began); took > promptly {
				t.Errorf("it took %s", took)
			}
			if name == "removed" {
				return
			}
			if flows := b.flows(); len(flows) != 1 || !strings.HasPrefix(flows[0], "cut http GET api.example:443/long with api") {
				t.Errorf("%q", flows)
			}
			b.got()
			if status, all := b.ask(idle, "GET", "https://"+bankHost+"/", ""); name == "revoked" && (status != 0 || !strings.Contains(all, "unknown authority")) {
				t.Errorf("what was a connection to the proxy is not one to the host: %d %s", status, all)
			}
			if status, all := b.ask(b.guest(true, false), "GET", "https://"+bankHost+"/", "", b.bearer()...); status == 200 && name != "other secret" || slices.Contains(b.got(), "Bearer "+canary) {
				t.Errorf("afterwards: %d %s", status, all)
			}
		})
	}
}

// TestBudgets: a grant has limits on bytes and on requests.
func TestBudgets(t *testing.T) {
	b := newBank(t, func(g *grant.Grant) { g.MaxBytes = 1 << 20 })
	b.open(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = w.Write(make([]byte, 300<<10))
	})
	c := b.guest(true, false)
	for i, want := range []bool{true, true, false, false} { // 400 KiB each
		status, all := b.ask(c, "POST", "https://"+bankHost+"/", strings.Repeat("x", 100<<10), b.bearer()...)
		whole := status == 200 && strings.HasSuffix(all, " <nil>")
		if whole != want {
			t.Errorf("request %d: %d, %d bytes %s", i, status, len(all), all[max(0, len(all)-100):])
		}
	}
	b.flows()
	b.g.MaxBytes, b.g.PerMinute = 0, 3
	b.give(b.g)
	for i, want := range []int{200, 200, 200, http.StatusTooManyRequests} {
		if status, _ := b.ask(c, "GET", "https://"+bankHost+"/", "", b.bearer()...); status != want {
			t.Errorf("request %d: %d, want %d", i, status, want)
		}
	}
}

// TestBaseURL: a program with the URL of a grant needs no authority; only the part after the base URL is under its
// control.
func TestBaseURL(t *testing.T) {
	b := newBank(t, func(g *grant.Grant) { g.Mode, g.Paths = grant.ModeBaseURL, []string{"/v1"} })
	b.open(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s %s", r.Host, r.URL.EscapedPath(), r.URL.RawQuery)
	})
	base := "http://" + b.explicit.String() + grant.BasePath
	direct := &http.Client{Transport: new(http.Transport)}
	defer direct.CloseIdleConnections()
	if status, all := b.ask(direct, "GET", base+"api/v1/a%20b?q=1", "", b.bearer()...); status != 200 || !strings.Contains(all, bankHost+" /v1/a%20b q=1") {
		t.Errorf("%d %s", status, all)
	}
	if got := b.got(); !slices.Equal(got, []string{"Bearer " + canary}) {
		t.Errorf("the host got %q", got)
	}
	wantFlows(t, b.world, "allowed http GET api.example:443/v1/a%20b with api 200")
	for path, want := range map[string]int{"api/v2": 403, "api/v1/../v2": 403, "api": 403, "other/v1": 403, "api/v1/%2e%2e/v2": 403, "api/v1/%zz": 400, "": 403} {
		c, err := net.Dial("tcp", b.explicit.String())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(c, "GET %s%s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n\r\n", grant.BasePath, path, b.explicit, b.g.Placeholder)
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(path, err)
		}
		_ = resp.Body.Close()
		_ = c.Close()
		if resp.StatusCode != want || len(b.got()) != 0 {
			t.Errorf("%s: %d, want %d", path, resp.StatusCode, want)
		}
	}
	// A connection is kept alive, but serves base URLs only.
	kept, err := net.Dial("tcp", b.explicit.String())
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Close()
	answers := bufio.NewReader(kept)
	for _, next := range []struct {
		first string
		want  int
	}{
		{"GET " + grant.BasePath + "api/v1/1", 200},
		{"GET " + grant.BasePath + "api/v1/2", 200},
		{"GET " + grant.BasePath + "other/v1", 403},
		{"GET http://" + bankHost + "/v1", 400},
		{"CONNECT " + grant.BasePath + "api/v1", 400},
		{"GET /v1", 400},
		{"GET " + grant.BasePath + "api/v1/3", 200},
	} {
		fmt.Fprintf(kept, "%s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n\r\n", next.first, bankHost, b.g.Placeholder)
		resp, err := http.ReadResponse(answers, nil)
		if err != nil {
			t.Fatal(next.first, err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode != next.want || (len(b.got()) == 1) != (next.want == 200) {
			t.Errorf("%s on a kept connection: %d, want %d", next.first, resp.StatusCode, next.want)
		}
	}
	// A direct connection to the host is an ordinary tunnel: the placeholder is worthless there, and the proxy has no
	// certificate for the host.
	c := b.unaware()
	if status, all := b.ask(c, "GET", "https://"+bankHost+"/v1", "", b.bearer()...); status != 200 || !slices.Equal(b.got(), []string{"Bearer " + b.g.Placeholder}) {
		t.Errorf("%d %s", status, all)
	}
}

// TestGrantsUnderLoad changes grants while requests are under way. The host never gets the secret of a grant that had
// ended before the request began, and nothing hangs.
func TestGrantsUnderLoad(t *testing.T) {
	b := newBank(t)
	b.open(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") })
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for ctx.Err() == nil {
				_, _ = b.ask(b.guest(true, false), "GET", "https://"+bankHost+"/", "", b.bearer()...)
			}
		})
	}
	for range 20 {
		b.give()
		b.got()
		g := b.g
		b.give(g)
	}
	b.give()
	cancel()
	wg.Wait()
	b.got()
	c := b.guest(true, false)
	_, _ = b.ask(c, "GET", "https://"+bankHost+"/", "", b.bearer()...)
	if got := b.got(); slices.Contains(got, "Bearer "+canary) {
		t.Errorf("the host got %q", got)
	}
	b.flows() // waits until all have ended
}
