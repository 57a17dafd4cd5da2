package secretstore

import (
	"context"
	"encoding/pem"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/ca"
)

// Authority is a certificate authority. The guests of its project trust it for the hosts of grants.
type Authority struct {
	ProjectID   core.ProjectID
	Certificate []byte // X.509 in DER
	SecretID    string // of its private key
}

// PEM is the certificate in the form that guests read.
func (a Authority) PEM() string {
	if len(a.Certificate) == 0 {
		return ""
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Certificate}))
}

// authorities remembers the authorities of projects, which never change.
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

// Authority returns the authority of a project. The first call for a project makes it.
func (k *Keeper) Authority(ctx context.Context, project core.ProjectID) (Authority, error) {
	if found, ok := k.authorities.get(project); ok {
		return found, nil
	}
	var found Authority
	err := k.store.InSystem(ctx, func(tx Tx) (err error) {
		found, err = tx.Authority(ctx, project)
		return err
	})
	if core.CategoryOf(err) == core.NotFound {
		found, err = k.makeAuthority(ctx, project)
	}
	if err == nil {
		k.authorities.put(found)
	}
	return found, err
}

func (k *Keeper) makeAuthority(ctx context.Context, project core.ProjectID) (Authority, error) {
	root, err := ca.NewRoot(project, time.Now())
	if err != nil {
		return Authority{}, err
	}
	key, err := k.Encrypt(ctx, project, root.Key)
	if err != nil {
		return Authority{}, err
	}
	var is Authority
	err = k.store.InSystem(ctx, func(tx Tx) error {
		if err := tx.InsertSecret(ctx, *key); err != nil {
			return err
		}
		is, err = tx.InsertAuthority(ctx, Authority{ProjectID: project, Certificate: root.Certificate, SecretID: key.ID})
		if err == nil && is.SecretID != key.ID { // another controller was faster
			err = tx.DeleteSecret(ctx, key.ID)
		}
		return err
	})
	return is, err
}

// Trusted is the certificate that guests of a project trust; it is empty if no grants are possible. If the first authority of a project cannot
// be made now, its guests start without it. Then only grants in the mode of base URLs work in them.
func (k *Keeper) Trusted(ctx context.Context, project core.ProjectID) (string, error) {
	if k.wrapper == nil {
		return "", nil
	}
	a, err := k.Authority(ctx, project)
	if core.CodeOf(err) == core.CodeKeyUnavailable {
		k.log.WarnContext(ctx, "a sandbox starts without its project's authority, because the authority cannot be made now", "project_id", project, "err", err)
		return "", nil
	}
	return a.PEM(), err
}
