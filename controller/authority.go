package controller

import (
	"context"
	"encoding/pem"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/ca"
)

// Authority is what the guests of a project trust for the hosts that it has grants for.
type Authority struct {
	ProjectID   core.ProjectID
	Certificate []byte // X.509 in DER
	SecretID    string // of its private key
}

// PEM is the certificate as guests take it.
func (a Authority) PEM() string {
	if len(a.Certificate) == 0 {
		return ""
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Certificate}))
}

// AuthorityTx keeps the authorities of projects.
type AuthorityTx interface {
	// Authority returns that of a project; NOT_FOUND while it has none.
	Authority(ctx context.Context, project core.ProjectID) (Authority, error)
	// InsertAuthority gives a project its authority, unless it has one, and returns the one that it has.
	InsertAuthority(ctx context.Context, a Authority) (Authority, error)
}

// authorities remembers those of projects, which never change.
type authorities struct {
	// mu guards known.
	mu    sync.Mutex
	known map[core.ProjectID]Authority
}

func (a *authorities) get(id core.ProjectID) (Authority, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	found, ok := a.known[id]
	return found, ok
}

func (a *authorities) put(found Authority) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.known == nil {
		a.known = map[core.ProjectID]Authority{}
	}
	a.known[found.ProjectID] = found
}

// authority returns that of a project, which is made when it is first needed. Every guest that may ever have grants trusts it from its birth:
// a grant works in a workspace that runs.
func (c *Controller) authority(ctx context.Context, project core.ProjectID) (Authority, error) {
	if found, ok := c.authorities.get(project); ok {
		return found, nil
	}
	found, err := read(ctx, c, System(), func(tx Tx) (Authority, error) { return tx.Authority(ctx, project) })
	if core.CategoryOf(err) == core.NotFound {
		found, err = c.makeAuthority(ctx, project)
	}
	if err == nil {
		c.authorities.put(found)
	}
	return found, err
}

func (c *Controller) makeAuthority(ctx context.Context, project core.ProjectID) (Authority, error) {
	root, err := ca.NewRoot(project, time.Now())
	if err != nil {
		return Authority{}, err
	}
	key, err := c.sealSecret(ctx, project, root.Key)
	if err != nil {
		return Authority{}, err
	}
	return read(ctx, c, System(), func(tx Tx) (Authority, error) {
		if err := tx.InsertSecret(ctx, *key); err != nil {
			return Authority{}, err
		}
		is, err := tx.InsertAuthority(ctx, Authority{ProjectID: project, Certificate: root.Certificate, SecretID: key.ID})
		if err == nil && is.SecretID != key.ID { // another controller was faster
			err = tx.DeleteSecret(ctx, key.ID)
		}
		return is, err
	})
}

// trusted is what guests of a project trust; "" where no grants are possible. When the very first authority of a project cannot be made now, its
// guests are made without: grants in the mode of base URLs work in them.
func (c *Controller) trusted(ctx context.Context, project core.ProjectID) (string, error) {
	if c.cfg.Wrapper == nil {
		return "", nil
	}
	a, err := c.authority(ctx, project)
	if core.CodeOf(err) == core.CodeKeyUnavailable {
		c.log.WarnContext(ctx, "a sandbox does not trust its project's authority, which cannot be made now", "project_id", project, "err", err)
		return "", nil
	}
	return a.PEM(), err
}
