package router

import (
	"context"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/previews"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sandboxhost"
)

// cookie holds the token of a signed preview in a browser. Browsers send a __Host- cookie to the host that set it and to no other, and no
// other host can set it.
const cookie = "__Host-coppice-preview"

// way says what let a request in.
type way int

const (
	byNothing   way = iota // the preview is public
	byHeader               // the token or the key is in a header
	byParameter            // the token is in the URL
	byCookie               // the browser sent it by itself
)

const (
	maxCredential = 2048 // bytes of a key or a token
	maxCookies    = 4    // cookies with the name of ours that are judged
)

// tooManyError refuses a request before anything is read.
type tooManyError struct{ wait time.Duration }

func (e *tooManyError) Error() string {
	return "an address has made too many requests that were refused"
}

// outage reports whether a request could not be judged.
func outage(err error) bool {
	c := core.CategoryOf(err)
	return c == core.Unavailable || c == core.Internal
}

// find finds the preview of a request and judges its credentials. What was found a moment ago lets a request in, but keeps out only those
// for a name without a preview: a link may be newer. Before the database is asked, the request counts as one that is refused, until it is let in. It
// does not count if it could not be judged.
func (r *Router) find(q *http.Request, t sandboxhost.Target, from netip.Addr) (previews.Preview, way, model.Key, error) {
	p, known, err := r.cfg.Previews.Recent(t)
	if err != nil { // it counts as every refusal does: a difference would say that there is a preview
		if wait := r.charge(from); wait > 0 {
			err = &tooManyError{wait}
		}
		return p, 0, model.Key{}, err
	}
	if known && (p.Visibility != model.VisibilityPrivate || r.cfg.Keys.Known(q.Header.Get(headerKey))) {
		if how, key, err := r.admit(q, p); err == nil {
			return p, how, key, nil
		}
	}
	if wait := r.charge(from); wait > 0 {
		return p, 0, model.Key{}, &tooManyError{wait}
	}
	var how way
	var key model.Key
	if p, err = r.cfg.Previews.Lookup(q.Context(), t); err == nil {
		how, key, err = r.admit(q, p)
	}
	if q.Context().Err() == nil && (err == nil || outage(err)) {
		r.strangers.GiveBack(time.Now(), from)
	}
	return p, how, key, err
}

// admit judges the credentials of a request. Every refusal is the error of an absent preview.
func (r *Router) admit(q *http.Request, p previews.Preview) (way, model.Key, error) {
	switch p.Visibility {
	case model.VisibilityPublic:
		return byNothing, model.Key{}, nil
	case model.VisibilityPrivate:
		key, err := r.key(q.Context(), q, p.ProjectID)
		return byHeader, key, err
	case model.VisibilitySigned:
		if how := r.token(q, p); how != byNothing {
			return how, model.Key{}, nil
		}
	}
	return 0, model.Key{}, previews.Absent()
}

// key judges the API key of a request. It must be one of the project that may reach into guests.
func (r *Router) key(ctx context.Context, q *http.Request, project core.ProjectID) (model.Key, error) {
	secret := q.Header.Get(headerKey)
	if secret == "" || len(secret) > maxCredential {
		return model.Key{}, previews.Absent()
	}
	if !r.cfg.Keys.Known(secret) { // it is read from the database
		leave, err := r.cfg.Previews.Queue(ctx)
		if err != nil {
			return model.Key{}, err
		}
		defer leave()
	}
	key, err := r.cfg.Keys.Authenticate(ctx, secret)
	if outage(err) {
		return model.Key{}, err
	}
	if err != nil || key.ProjectID != project || core.MissingScope(key.Scopes, core.ScopeWorkspaceExec) != "" {
		return model.Key{}, previews.Absent()
	}
	return key, nil
}

// token finds the token of a signed preview in a request.
func (r *Router) token(q *http.Request, p previews.Preview) way {
	good := func(token string) bool {
		return token != "" && len(token) <= maxCredential && r.cfg.Previews.Token(p, token)
	}
	for _, name := range []string{headerToken, headerTraffic} {
		if good(q.Header.Get(name)) {
			return byHeader
		}
	}
	if token, _ := splitToken(q.URL.RawQuery); good(token) {
		return byParameter
	}
	cookies := q.CookiesNamed(cookie)
	for _, c := range cookies[:min(len(cookies), maxCookies)] {
		if good(c.Value) && fromOwnPage(q) {
			return byCookie
		}
	}
	return byNothing
}

// splitToken takes the token out of a query. The rest stays as it is.
func splitToken(query string) (token, rest string) {
	var kept []string
	for part := range strings.SplitSeq(query, "&") {
		name, value, _ := strings.Cut(part, "=")
		if plain, err := url.QueryUnescape(name); err == nil && plain == previews.TokenParameter {
			token = value
			continue
		}
		kept = append(kept, part)
	}
	return token, strings.Join(kept, "&")
}

// navigates reports whether a browser opens a page.
func navigates(q *http.Request) bool {
	if (q.Method != http.MethodGet && q.Method != http.MethodHead) || q.Header.Get("Upgrade") != "" {
		return false
	}
	if mode := q.Header.Get("Sec-Fetch-Mode"); mode != "" {
		return mode == "navigate"
	}
	return strings.Contains(q.Header.Get("Accept"), "text/html")
}

// fromOwnPage reports whether a browser may use the cookie for a request. Pages of other sandboxes are of the same site, so SameSite does
// not keep them out. They may link to a preview, and nothing else. Browsers that do not say where a request comes from cannot use the cookie.
func fromOwnPage(q *http.Request) bool {
	if origin := q.Header.Get("Origin"); origin != "" {
		u, err := url.Parse(origin)
		return err == nil && (u.Scheme == "http" || u.Scheme == "https") && strings.EqualFold(u.Host, q.Host)
	}
	switch q.Header.Get("Sec-Fetch-Site") {
	case "same-origin", "none":
		return true
	}
	return navigates(q) && q.Header.Get("Sec-Fetch-Dest") == "document"
}

// keepToken moves a token from the URL into a cookie. The browser forgets what it keeps of an earlier state of the workspace, whose token was
// another: pages in its cache, and storage with service workers. Cookies stay, since browsers would clear those of all sandboxes.
func keepToken(w http.ResponseWriter, q *http.Request) {
	token, rest := splitToken(q.URL.RawQuery)
	if !slices.ContainsFunc(q.CookiesNamed(cookie), func(c *http.Cookie) bool { return c.Value == token }) {
		w.Header().Set("Clear-Site-Data", `"cache", "storage"`)
	}
	http.SetCookie(w, &http.Cookie{Name: cookie, Value: token, Path: "/", Secure: true, HttpOnly: true, SameSite: http.SameSiteLaxMode})
	h := w.Header()
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cache-Control", "no-store")
	path := "/" + strings.TrimLeft(q.URL.EscapedPath(), `/\`) // "//name" would lead to another host
	if rest != "" {
		path += "?" + rest
	}
	h.Set("Location", path)
	w.WriteHeader(http.StatusSeeOther)
}

// hide removes from a request what is for this router. The guest must not learn how others get in.
func hide(out *http.Request, query string) {
	for _, name := range []string{headerKey, headerToken, headerTraffic, headerSandbox, headerPort} {
		out.Header.Del(name)
	}
	_, out.URL.RawQuery = splitToken(query)
	lines := out.Header["Cookie"]
	out.Header.Del("Cookie")
	for _, line := range lines {
		var kept []string
		for part := range strings.SplitSeq(line, ";") {
			if name, _, _ := strings.Cut(strings.TrimSpace(part), "="); !strings.EqualFold(strings.TrimSpace(name), cookie) {
				kept = append(kept, strings.TrimSpace(part))
			}
		}
		if len(kept) > 0 {
			out.Header.Add("Cookie", strings.Join(kept, "; "))
		}
	}
	if referer := out.Header.Get("Referer"); strings.Contains(referer, previews.TokenParameter) {
		out.Header.Del("Referer")
	}
}

// reduce limits an answer of a guest to its own host.
func reduce(res *http.Response, host string) error {
	h := res.Header
	h.Add("Vary", "Service-Worker") // or a script that is in the browser's cache could become a service worker without a request
	h.Del("Clear-Site-Data")        // it would clear the cookies of all sandboxes
	h.Del("Alt-Svc")                // it would lead browsers past this router
	lines := h.Values("Set-Cookie")
	h.Del("Set-Cookie")
	for _, line := range lines {
		c, err := http.ParseSetCookie(line)
		if err != nil || strings.EqualFold(c.Name, cookie) || c.Domain != "" && sandboxhost.Name(strings.TrimPrefix(c.Domain, ".")) != host {
			continue // for other sandboxes, or in place of the token
		}
		c.Domain = ""
		if text := c.String(); text != "" { // without parts that could not be parsed
			h.Add("Set-Cookie", text)
		}
	}
	return nil
}
