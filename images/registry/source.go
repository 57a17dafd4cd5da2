package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

// source is one repository from which an image comes: that of the reference, or the same in a mirror.
type source struct {
	repo   name.Repository
	guard  *guard
	auth   authn.Authenticator
	scheme string

	entered http.RoundTripper // with what the registry wants to be shown; nil before the first request
}

// enter finds out what the registry wants to be shown, and gets it.
func (s *source) enter(ctx context.Context) error {
	if s.entered != nil {
		return nil
	}
	in, err := transport.NewWithContext(ctx, s.repo.Registry, s.auth, s.guard, []string{s.repo.Scope(transport.PullScope)})
	if err != nil {
		return s.explain(ctx, err, "ask for access to "+s.repo.Name())
	}
	s.entered = in
	return nil
}

// part is what is wanted of a blob. The zero part is the whole.
type part struct{ from, size int64 }

// get sends a GET request for a path below the repository, and follows redirects.
func (s *source) get(ctx context.Context, path string, accept []string, want part) (*http.Response, error) {
	at := &url.URL{Scheme: s.scheme, Host: s.repo.RegistryStr(), Path: "/v2/" + s.repo.RepositoryStr() + "/" + path}
	home := hostPort(at)
	for range maxRedirects + 1 {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, at.String(), nil)
		if err != nil {
			return nil, refuse("the registry's redirect cannot be followed")
		}
		for _, t := range accept {
			req.Header.Add("Accept", t)
		}
		if want.from > 0 {
			req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", want.from, want.size-1))
		}
		// Credentials are for the registry. A host that it names gets none.
		var to http.RoundTripper = s.guard
		if hostPort(at) == home {
			to = s.entered
		}
		resp, err := to.RoundTrip(req)
		if err != nil {
			return nil, s.explain(ctx, err, "get "+path)
		}
		switch resp.StatusCode {
		case http.StatusOK, http.StatusPartialContent:
			return resp, nil
		case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
			next, err := at.Parse(resp.Header.Get("Location"))
			_ = resp.Body.Close() // nothing in it is wanted
			if err != nil || next.Host == "" {
				return nil, refuse("the registry's redirect cannot be followed")
			}
			next.User = nil
			at = next
		case http.StatusRequestedRangeNotSatisfiable:
			_ = resp.Body.Close() // nothing in it is wanted
			if want.from == 0 {
				return nil, refuse("%s answers a request for a whole blob as one for a part", s.repo.RegistryStr())
			}
			return s.get(ctx, path, accept, part{}) // it knows no parts
		default:
			defer resp.Body.Close()
			return nil, s.explain(ctx, transport.CheckError(resp, http.StatusOK), "get "+path)
		}
	}
	return nil, refuse("the registry redirects more than %d times", maxRedirects)
}

// read gets a short document as a whole.
func (s *source) read(ctx context.Context, path string, accept []string) (body []byte, contentType types.MediaType, err error) {
	resp, err := s.get(ctx, path, accept, part{})
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	var b bytes.Buffer
	if _, err := io.Copy(&b, resp.Body); err != nil {
		return nil, "", s.explain(ctx, err, "get "+path)
	}
	contentType = types.MediaType(strings.TrimSpace(strings.Split(resp.Header.Get("Content-Type"), ";")[0]))
	return b.Bytes(), contentType, nil
}

// explain converts an error of a request into an error that helps. An error of this program stays alone: what others have
// put around it has addresses, and those may have signatures.
func (s *source) explain(ctx context.Context, err error, what string) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if ours, ok := errors.AsType[*core.Error](err); ok {
		return ours
	}
	host := s.repo.RegistryStr()
	if answer, ok := errors.AsType[*transport.Error](err); ok {
		switch answer.StatusCode {
		case http.StatusNotFound:
			return core.Wrapf(err, core.NotFound, core.CodeImageNotFound, "%s has no such image (%s)", host, core.Clip(what))
		case http.StatusUnauthorized, http.StatusForbidden:
			return core.Wrapf(err, core.PermissionDenied, CodeDenied,
				"%s does not let this user have the image; store credentials with `docker login`, or see whether the name is right", host)
		case http.StatusTooManyRequests:
			return core.Wrapf(err, core.Unavailable, CodeUnreachable, "%s says that it was asked too often; log in, use a mirror, or try again later", host)
		}
		if answer.StatusCode < 500 {
			return core.Wrapf(err, core.Invalid, CodeRefused, "%s answers %d %s", host, answer.StatusCode, http.StatusText(answer.StatusCode))
		}
	}
	return core.Wrapf(err, core.Unavailable, CodeUnreachable, "%s cannot be reached, or broke the connection off (%s)", host, core.Clip(lastCause(err)))
}

// lastCause is the text of the innermost error, which has no address.
func lastCause(err error) string {
	for {
		inner := errors.Unwrap(err)
		if inner == nil {
			return err.Error()
		}
		err = inner
	}
}

// again reports whether the same request may succeed later.
func again(err error) bool { return core.CodeOf(err) == CodeUnreachable }

// attempt calls do until it succeeds, fails for good, or has failed too often.
func (p *puller) attempt(ctx context.Context, attempts int, do func() error) error {
	wait := p.o.Backoff
	for i := 1; ; i++ {
		err := do()
		if err == nil || !again(err) || i == attempts {
			return err
		}
		if err := pace.Pause(ctx, wait); err != nil {
			return err
		}
		wait *= 2
	}
}

// mirrorAttempts is how often a request is sent to a mirror: there is another source.
const mirrorAttempts = 2

// fromAny calls do with each source, mirrors first, until one of them succeeds. A mirror that fails is not asked again. The
// error is that of the last source, which is the registry of the reference.
func (p *puller) fromAny(ctx context.Context, do func(*source) error) error {
	var failed error
	for i, s := range p.sources {
		isMirror, attempts := i < len(p.sources)-1, p.o.Attempts
		if isMirror {
			attempts = min(attempts, mirrorAttempts)
			if p.isLeftOut(s) {
				continue
			}
		}
		err := p.attempt(ctx, attempts, func() error {
			p.entering.Lock()
			err := s.enter(ctx)
			p.entering.Unlock()
			if err != nil {
				return err
			}
			return do(s)
		})
		if err == nil || ctx.Err() != nil || core.CodeOf(err) == core.CodeDiskFull {
			return err
		}
		failed = err
		if isMirror {
			p.leaveOut(s, err)
		}
	}
	return failed
}

func (p *puller) isLeftOut(s *source) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.leftOut[s]
}

// leaveOut notes that a mirror has failed, and tells the operator once.
func (p *puller) leaveOut(s *source, why error) {
	p.mu.Lock()
	known := p.leftOut[s]
	p.leftOut[s] = true
	p.mu.Unlock()
	if !known {
		p.report(func(g *Progress) {
			g.Note = fmt.Sprintf("the mirror %s is left out: %s", s.repo.RegistryStr(), core.MessageOf(why))
		})
	}
}
