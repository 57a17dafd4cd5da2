package arbor

import (
	"crypto/rand"
	"net/http"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/controller/compat/shared"
)

const (
	passTime  = time.Minute
	maxPasses = 1024 // that were given and neither used nor have expired
)

// passes are the tokens for attaching to sessions: each is for one session, good for one use, and acts for the key that has asked for it. Its
// zero value is ready for use.
type passes struct {
	mu    sync.Mutex // guards given
	given map[string]grantedPass
}

type grantedPass struct {
	session, key string
	until        time.Time
}

func (p *passes) give(session, key string) (token string, until time.Time, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	for token, pass := range p.given {
		if !now.Before(pass.until) {
			delete(p.given, token)
		}
	}
	if len(p.given) >= maxPasses {
		return "", until, shared.Failf(http.StatusTooManyRequests, "%d tokens for attaching are not used; they expire within %v", maxPasses, passTime)
	}
	if p.given == nil {
		p.given = map[string]grantedPass{}
	}
	token, until = rand.Text(), now.Add(passTime)
	p.given[token] = grantedPass{session, key, until}
	return token, until, nil
}

// take uses up a token. A token that was tried with another session is used up, too.
func (p *passes) take(session, token string) (key string, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	pass, there := p.given[token]
	delete(p.given, token)
	return pass.key, there && pass.session == session && time.Now().Before(pass.until)
}
