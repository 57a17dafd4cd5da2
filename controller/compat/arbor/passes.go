package arbor

import (
	"crypto/rand"
	"net/http"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

const (
	passTime  = time.Minute
	maxPasses = 256 // of one key, that are neither used nor expired
)

// passes are the tokens for attaching to sessions. Each is for one session, good for one use, and acts for the key that has asked for it. They
// are known in this process only. The zero value is ready for use.
type passes struct {
	mu    sync.Mutex // guards given
	given map[string]grantedPass
}

type grantedPass struct {
	session, key string
	owner        coppice.KeyID
	until        time.Time
}

func (p *passes) give(session, key string, owner coppice.KeyID) (token string, until time.Time, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now, n := time.Now(), 0
	for token, pass := range p.given {
		switch {
		case !now.Before(pass.until):
			delete(p.given, token)
		case pass.owner == owner:
			n++
		}
	}
	if n >= maxPasses {
		return "", until, shared.Failf(http.StatusTooManyRequests, "%d tokens for attaching are not used; they expire within %v", maxPasses, passTime)
	}
	if p.given == nil {
		p.given = map[string]grantedPass{}
	}
	token, until = rand.Text(), now.Add(passTime)
	p.given[token] = grantedPass{session, key, owner, until}
	return token, until, nil
}

// take uses up a token. A token that was tried with another session is used up, too.
func (p *passes) take(session, token string) (pass grantedPass, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	pass, there := p.given[token]
	delete(p.given, token)
	return pass, there && pass.session == session && time.Now().Before(pass.until)
}
