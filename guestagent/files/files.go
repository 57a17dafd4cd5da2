//go:build linux

package files

import (
	"context"
	"net/http"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/account"
)

// Server answers the requests for files.
type Server struct {
	// Inside runs fn where the workload's file system is, with all rights. fn must not block for long, except in the file system.
	Inside func(fn func() error) error
	// As runs fn there with the rights of a user alone, until fn returns. fn may not start goroutines that work on files.
	As func(ctx context.Context, cred *syscall.Credential, fn func() error) error
}

// caller is who a request works as.
type caller struct {
	do    func(fn func() error) error // runs fn with the caller's rights
	after func(fn func() error) error // runs fn likewise, even after the request has ended
	cred  *syscall.Credential         // of a named user
	user  bool                        // the request names the user
	path  string                      // the path that it names
}

const maxPath = 4096

// caller finds the user of a request, and makes its path absolute for this user. A relative path starts where a session of the
// user would start.
func (s *Server) caller(ctx context.Context, user string, paths ...*string) (caller, error) {
	for _, p := range paths {
		if *p == "" || strings.ContainsRune(*p, 0) || len(*p) > maxPath {
			return caller{}, core.Errorf(core.Invalid, core.CodeInvalidField, "path must name a file in the sandbox")
		}
	}
	if len(user) > 256 || strings.ContainsRune(user, 0) {
		return caller{}, core.Errorf(core.Invalid, core.CodeInvalidField, "user must name a user of the sandbox")
	}
	var who account.Account
	err := s.Inside(func() (err error) {
		if who, err = account.Lookup(user); err != nil {
			return err
		}
		for _, p := range paths {
			*p = meaning(*p, who.Home, user != "")
		}
		return nil
	})
	c := caller{do: s.Inside, after: s.Inside, cred: who.Cred, user: user != ""}
	if who.Cred != nil {
		c.do = func(fn func() error) error { return s.As(ctx, who.Cred, fn) }
		c.after = func(fn func() error) error { return s.As(context.WithoutCancel(ctx), who.Cred, fn) }
	}
	return c, err
}

// Caller makes paths absolute as this package does, and returns a function that runs others with the rights of a user.
func (s *Server) Caller(ctx context.Context, user string, paths ...*string) (func(ctx context.Context, fn func() error) error, error) {
	c, err := s.caller(ctx, user, paths...)
	return func(ctx context.Context, fn func() error) error {
		if c.cred != nil {
			return s.As(ctx, c.cred, fn)
		}
		return s.Inside(fn)
	}, err
}

// meaning makes a path absolute. Only requests that name a user know ~, because a file may have that name.
func meaning(path, home string, tilde bool) string {
	if rest, ok := strings.CutPrefix(path, "~"); ok && tilde && (rest == "" || rest[0] == '/') {
		path = filepath.Join("/", home, rest)
	}
	if !filepath.IsAbs(path) {
		path = filepath.Join(account.DefaultDir(home), path)
	}
	return filepath.Clean(path)
}

// asked is the caller of a request that has its path and user in the query.
func (s *Server) asked(r *http.Request) (caller, error) {
	q := r.URL.Query()
	path := q.Get("path")
	c, err := s.caller(r.Context(), q.Get("user"), &path)
	c.path = path
	return c, err
}
