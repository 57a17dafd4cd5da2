package proxy_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"testing"
)

// TestFiveNames: the target of CONNECT, SNI, Host or :authority, and the host's certificate are each the granted host
// or another allowed one. The secret leaves only when all of them are the granted host. HTTP/1.1 has Host, HTTP/2 has
// :authority.
func TestFiveNames(t *testing.T) {
	names := []string{bankHost, "other.example"}
	for _, certificate := range names {
		t.Run(certificate, func(t *testing.T) { fiveNamesWith(t, certificate, names) })
	}
}

func fiveNamesWith(t *testing.T, certificate string, names []string) {
	t.Helper()
	b := newBank(t)
	secrets := 0
	seen := func(w http.ResponseWriter, r *http.Request) {
		b.mu.Lock()
		defer b.mu.Unlock()
		if r.Header.Get("Authorization") == "Bearer "+canary {
			secrets++
		}
		fmt.Fprint(w, "ok")
	}
	b.serve(allowedAddr+":443", seen, certificate)
	b.serve(evilAddr+":443", seen, names[1])
	pool := b.trust.Clone() // also trusts hosts whose TLS the proxy does not read
	pool.AddCert(b.ca.cert)
	passed, rows := 0, 0
	for _, connect := range names {
		for _, sni := range names {
			for _, host := range names {
				for _, two := range []bool{false, true} {
					rows++
					status, err := fiveNames(t, b, &tls.Config{RootCAs: pool, ServerName: sni, InsecureSkipVerify: true}, connect, host, two)
					equal := connect == bankHost && sni == bankHost && host == bankHost && certificate == bankHost
					b.mu.Lock()
					got := secrets
					secrets = 0
					b.mu.Unlock()
					if (got == 1) != equal || got > 1 || equal && (status != http.StatusOK || err != nil) {
						t.Errorf("CONNECT %s, SNI %s, Host %s, certificate %s, HTTP/2 %v: the secret left %d times; %d, %v", connect, sni, host, certificate, two, got, status, err)
					}
					if connect != sni && err == nil {
						t.Errorf("CONNECT %s, SNI %s: %d", connect, sni, status)
					}
					if connect == bankHost && sni == bankHost && !equal && status < http.StatusBadRequest {
						t.Errorf("Host %s, certificate %s, HTTP/2 %v: %d, %v", host, certificate, two, status, err)
					}
					passed += got
				}
			}
		}
	}
	if want := map[string]int{bankHost: 2}[certificate]; passed != want || rows != 16 {
		t.Errorf("certificate %s: %d of %d rows passed, want %d", certificate, passed, rows, want)
	}
	b.flows()
}

// fiveNames sends a request with a placeholder.
func fiveNames(t *testing.T, b *bank, cfg *tls.Config, connect, host string, two bool) (int, error) {
	t.Helper()
	c, err := net.Dial("tcp", b.explicit.String())
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(c, "CONNECT %s:443 HTTP/1.1\r\nHost: %s:443\r\n\r\n", connect, connect)
	resp, err := http.ReadResponse(bufio.NewReaderSize(c, 16), nil)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatal(resp, err)
	}
	_ = resp.Body.Close() // the answer has no body
	cfg.NextProtos = []string{map[bool]string{false: "http/1.1", true: "h2"}[two]}
	over := tls.Client(c, cfg)
	defer over.Close()
	if err := over.HandshakeContext(t.Context()); err != nil {
		return 0, err
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+host+"/", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+b.g.Placeholder)
	transport := &http.Transport{
		DialTLSContext:    func(context.Context, string, string) (net.Conn, error) { return over, nil },
		ForceAttemptHTTP2: two, DisableKeepAlives: true,
	}
	defer transport.CloseIdleConnections()
	resp, err = transport.RoundTrip(r)
	if err != nil {
		return 0, err
	}
	_ = resp.Body.Close()
	return resp.StatusCode, nil
}
