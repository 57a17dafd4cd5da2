// Package cluster owns what all controllers of a cluster share: the id of the cluster, the authority
// that certifies runners and controllers, and the key that signs passes. One row of the database has
// them. Their keys are encrypted there, with the controllers' master key.
package cluster

import (
	"context"
	"crypto/rand"
	"encoding/hex"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/masterkey"
	"github.com/coppice-dev/coppice/internal/mtls"
	"github.com/coppice-dev/coppice/internal/pass"
)

// Trust is what all controllers of a cluster share: the identity of the cluster, and the keys that runners trust.
type Trust struct {
	ClusterID string
	Authority *mtls.Authority
	Passes    *pass.Signer
}

// Row is the row that holds a Trust.
type Row struct {
	ID           string
	Authority    []byte // the certificate
	AuthorityKey []byte // encrypted
	PassKey      []byte // encrypted
}

// Store runs transactions that see all projects. Package controller/postgres has the methods of Tx.
type Store interface {
	// InSystem runs fn in a transaction and commits when it returns nil.
	InSystem(ctx context.Context, fn func(Tx) error) error
}

// Tx keeps the row.
type Tx interface {
	// Cluster returns the database's cluster; NotFound in a new database.
	Cluster(ctx context.Context) (Row, error)
	// EnsureCluster inserts the cluster unless there is one, and returns the cluster that exists then.
	EnsureCluster(ctx context.Context, c Row) (Row, error)
}

// The names under which the keys are encrypted.
const (
	authorityName = "authority's key"
	passName      = "key for passes"
)

// Open reads a cluster's trust, or makes it in a new database: the first of several controllers wins. create is called
// for the key in a new cluster only, so that a controller without its key file does not found a second one.
func Open(ctx context.Context, store Store, key *masterkey.Key, create func() (*masterkey.Key, error)) (Trust, error) {
	var row Row
	err := store.InSystem(ctx, func(tx Tx) error {
		var err error
		row, err = tx.Cluster(ctx)
		return err
	})
	if core.CategoryOf(err) == core.NotFound {
		if key == nil {
			if key, err = create(); err != nil {
				return Trust{}, err
			}
		}
		row, err = insert(ctx, store, key)
	}
	if err != nil {
		return Trust{}, err
	}
	if key == nil {
		return Trust{}, core.Errorf(core.FailedPrecondition, core.CodeIncompatibleHost,
			"the database belongs to cluster %s and the key file is not here; copy it from the controller that was started first", row.ID)
	}
	return row.open(key)
}

// insert makes the trust of a new cluster.
func insert(ctx context.Context, store Store, key *masterkey.Key) (Row, error) {
	id := make([]byte, 16)
	_, _ = rand.Read(id) // never fails: crypto/rand ends the program instead
	row := Row{ID: hex.EncodeToString(id)}
	authority, err := mtls.NewAuthority(row.ID)
	if err != nil {
		return row, err
	}
	secret, err := authority.Key()
	if err != nil {
		return row, err
	}
	passes, err := pass.NewSigner()
	if err != nil {
		return row, err
	}
	row.Authority, row.AuthorityKey, row.PassKey = authority.Certificate(), key.Encrypt(authorityName, secret), key.Encrypt(passName, passes.Seed())
	var first Row // of the first of several controllers
	err = store.InSystem(ctx, func(tx Tx) error {
		var err error
		first, err = tx.EnsureCluster(ctx, row)
		return err
	})
	return first, err
}

func (r Row) open(key *masterkey.Key) (Trust, error) {
	secret, err := key.Decrypt(authorityName, r.AuthorityKey)
	if err != nil {
		return Trust{}, err
	}
	seed, err := key.Decrypt(passName, r.PassKey)
	if err != nil {
		return Trust{}, err
	}
	t := Trust{ClusterID: r.ID}
	if t.Authority, err = mtls.LoadAuthority(r.Authority, secret); err != nil {
		return Trust{}, err
	}
	t.Passes, err = pass.LoadSigner(seed)
	return t, err
}
