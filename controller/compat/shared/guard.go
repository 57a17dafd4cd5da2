package shared

import (
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/internal/sandboxhost"
)

// Foreign refuses requests of web pages. Where requests need no key (open), it also refuses those that do not come from this host for
// this host.
func Foreign(r *http.Request, open bool) *StatusError {
	if len(r.Header.Values("Origin")) > 0 || fromPage(r.Header.Get("Sec-Fetch-Site")) {
		return Failf(http.StatusForbidden, "a web page must not use this server")
	}
	if !open {
		return nil
	}
	if !local(r.Host) {
		return Failf(http.StatusMisdirectedRequest, "this server needs no key, so it answers only to the names of its own host, such as 127.0.0.1, and not to %q", Clip(r.Host))
	}
	for h := range r.Header {
		if strings.HasPrefix(h, "X-Forwarded-") || slices.Contains([]string{"Forwarded", "Via", "X-Real-Ip"}, h) {
			return Failf(http.StatusForbidden, "this server needs no key, so it must not be behind a proxy (the request has %s)", Clip(h))
		}
	}
	if from, err := netip.ParseAddrPort(r.RemoteAddr); err != nil || !from.Addr().Unmap().IsLoopback() {
		return Failf(http.StatusForbidden, "this server needs no key, so it serves only clients of its own host")
	}
	return nil
}

// fromPage reports whether a browser sent a request for a page. A person who opens an address sends "none".
func fromPage(site string) bool { return site != "" && site != "none" }

// local reports whether a host name can only mean this host. A page may have bound any other name to its address (DNS rebinding).
func local(host string) bool {
	name := sandboxhost.Name(host)
	addr, err := netip.ParseAddr(name)
	return name == "localhost" || err == nil && addr.Unmap().IsLoopback()
}

// maxKey bounds a key before it is looked at.
const maxKey = 2 << 10

// Credential returns the key of a request, which comes as a bearer token or as the password of a URL. given says whether the request has
// any credentials; the key is empty if they cannot be one.
func Credential(r *http.Request) (key string, given bool) {
	header := r.Header.Get("Authorization")
	if header == "" {
		return "", false
	}
	if name, password, ok := r.BasicAuth(); ok {
		if key = password; key == "" {
			key = name
		}
	} else if scheme, bearer, _ := strings.Cut(header, " "); strings.EqualFold(scheme, "Bearer") {
		key = bearer
	}
	if key = strings.TrimSpace(key); len(key) > maxKey {
		key = ""
	}
	return key, true
}
