package controller

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
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

// Cluster is the row that holds a Trust. Its keys are sealed.
type Cluster struct {
	ID           string
	Authority    []byte // the certificate
	AuthorityKey []byte
	PassKey      []byte
}

// RunnerToken lets one runner join once. Only its hash is stored.
type RunnerToken struct {
	Hash      [32]byte
	RunnerID  core.RunnerID
	ExpiresAt time.Time
}

// The names under which the keys are sealed.
const (
	sealedAuthority = "authority's key"
	sealedPass      = "key for passes"
)

// OpenTrust reads a cluster's trust, or makes it in a new database: the first of several controllers wins. create is called
// for the key in a new cluster only, so that a controller without its key file does not found a second one.
func OpenTrust(ctx context.Context, store Store, key *masterkey.Key, create func() (*masterkey.Key, error)) (Trust, error) {
	var row Cluster
	err := store.InTx(ctx, System(), func(tx AllTx) (err error) {
		row, err = tx.Cluster(ctx)
		return err
	})
	if core.CategoryOf(err) == core.NotFound {
		if key == nil {
			if key, err = create(); err != nil {
				return Trust{}, err
			}
		}
		row, err = foundCluster(ctx, store, key)
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

func foundCluster(ctx context.Context, store Store, key *masterkey.Key) (Cluster, error) {
	id := make([]byte, 16)
	_, _ = rand.Read(id) // never fails: crypto/rand ends the program instead
	row := Cluster{ID: hex.EncodeToString(id)}
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
	row.Authority, row.AuthorityKey, row.PassKey = authority.Certificate(), key.Seal(sealedAuthority, secret), key.Seal(sealedPass, passes.Seed())
	err = store.InTx(ctx, System(), func(tx AllTx) (err error) {
		row, err = tx.EnsureCluster(ctx, row)
		return err
	})
	return row, err
}

func (c Cluster) open(key *masterkey.Key) (Trust, error) {
	secret, err := key.Open(sealedAuthority, c.AuthorityKey)
	if err != nil {
		return Trust{}, err
	}
	seed, err := key.Open(sealedPass, c.PassKey)
	if err != nil {
		return Trust{}, err
	}
	t := Trust{ClusterID: c.ID}
	if t.Authority, err = mtls.LoadAuthority(c.Authority, secret); err != nil {
		return Trust{}, err
	}
	t.Passes, err = pass.LoadSigner(seed)
	return t, err
}

// The life of a join token.
const (
	DefaultJoinTTL = 15 * time.Minute
	MaxJoinTTL     = 24 * time.Hour
)

const joinPrefix = "cpj_"

var errNoTrust = core.Errorf(core.FailedPrecondition, core.CodeUnsupported,
	"this controller takes no runners from elsewhere, as coppice dev does not; run coppice controller and coppice runner")

// MaxRunnerTokens bounds the join tokens of a cluster that are open: neither spent nor expired.
const MaxRunnerTokens = 10_000

// CreateRunnerToken makes a token for a runner to join with: a new one, or, named, one that has lost its certificate. The
// token holds the pin of the authority, so that the runner knows the controller, too.
//
// A key with runner:join is on every host that joins unattended. It cannot make a token for a runner whose certificate may still be valid:
// else whoever has the key could become any runner. That is for an administrator.
func (c *Controller) CreateRunnerToken(ctx context.Context, actor Key, id core.RunnerID, ttl time.Duration) (string, RunnerToken, error) {
	if c.cfg.Trust == nil {
		return "", RunnerToken{}, errNoTrust
	}
	known := id != ""
	if !known {
		id = core.NewID[core.RunnerID]()
	}
	if ttl == 0 {
		ttl = DefaultJoinTTL
	}
	var secret [32]byte
	_, _ = rand.Read(secret[:]) // never fails
	token := joinPrefix + base64.RawURLEncoding.EncodeToString(secret[:])
	row, err := read(ctx, c, System(), func(tx Tx) (RunnerToken, error) {
		if known {
			if err := c.mayRejoin(ctx, tx, actor, id); err != nil {
				return RunnerToken{}, err
			}
		}
		return tx.InsertRunnerToken(ctx, RunnerToken{Hash: sha256.Sum256([]byte(token)), RunnerID: id}, min(ttl, MaxJoinTTL))
	})
	return token + "." + c.cfg.Trust.Authority.Pin(), row, err
}

func (c *Controller) mayRejoin(ctx context.Context, tx Tx, actor Key, id core.RunnerID) error {
	if err := tx.RunnerIdentity(ctx, id); err != nil || core.MissingScope(actor.Scopes, core.ScopeAdmin) == "" {
		return err
	}
	heard, err := tx.RunnerHeard(ctx, id)
	if err == nil && heard < c.cfg.CertificateLife {
		err = core.Errorf(core.PermissionDenied, core.CodePermissionDenied,
			"runner %s was heard %s ago and may still have its certificate; until %s have passed, only an administrator's key can make a token for it",
			id, heard.Round(time.Second), c.cfg.CertificateLife)
	}
	return err
}

// JoinRunner spends a token and gives its first certificate to the runner that the token names.
func (c *Controller) JoinRunner(ctx context.Context, in runnerapi.Join) (runnerapi.Joined, error) {
	if c.cfg.Trust == nil {
		return runnerapi.Joined{}, errNoTrust
	}
	public, err := mtls.Requested(in.CertificateRequest)
	if err != nil {
		return runnerapi.Joined{}, err
	}
	secret, _, _ := strings.Cut(in.Token, ".")
	row, err := read(ctx, c, System(), func(tx Tx) (RunnerToken, error) {
		row, err := tx.UseRunnerToken(ctx, sha256.Sum256([]byte(secret)))
		if err != nil {
			return row, err
		}
		return row, tx.InsertRunnerIdentity(ctx, row.RunnerID)
	})
	if err != nil {
		return runnerapi.Joined{}, err
	}
	der, err := c.cfg.Trust.Authority.Issue(public, mtls.RunnerName(row.RunnerID), c.cfg.CertificateLife)
	if err != nil {
		return runnerapi.Joined{}, err
	}
	c.log.InfoContext(ctx, "runner joined", "runner_id", row.RunnerID)
	return runnerapi.Joined{
		RunnerID: row.RunnerID, ClusterID: c.cfg.ClusterID, Certificate: der, Authority: c.cfg.Trust.Authority.Certificate(),
	}, nil
}

// RenewRunner gives a runner, which has shown its certificate, the next one.
func (c *Controller) RenewRunner(ctx context.Context, id core.RunnerID, in runnerapi.Renew) (runnerapi.Renewed, error) {
	if c.cfg.Trust == nil {
		return runnerapi.Renewed{}, errNoTrust
	}
	public, err := mtls.Requested(in.CertificateRequest)
	if err != nil {
		return runnerapi.Renewed{}, err
	}
	if err := c.AdmitRunner(ctx, id); err != nil {
		return runnerapi.Renewed{}, err
	}
	der, err := c.cfg.Trust.Authority.Issue(public, mtls.RunnerName(id), c.cfg.CertificateLife)
	return runnerapi.Renewed{Certificate: der}, err
}

// AdmitRunner refuses a runner whose certificate is genuine but whose identity was revoked. If the database does not know the identity, a
// failover has lost that the runner joined, because identities are never deleted. The certificate proves that it did, so its identity is
// recorded again.
func (c *Controller) AdmitRunner(ctx context.Context, id core.RunnerID) error {
	err := c.store.InTx(ctx, System(), func(tx Tx) error { return tx.RunnerIdentity(ctx, id) })
	if core.CodeOf(err) != core.CodeRunnerNotFound {
		return err
	}
	c.log.WarnContext(ctx, "runner is taken in again by its certificate: the database does not know that it has joined", "runner_id", id)
	ctx = WithOrigin(ctx, Origin{Actor: string(id), Action: "rejoin"})
	return c.store.InTx(ctx, System(), func(tx Tx) error { return tx.InsertRunnerIdentity(ctx, id) })
}

// RemoveRunner revokes a runner's identity. From then on no controller accepts its messages or calls it, and it ends its sandboxes when it is told.
// A runner with living workspaces is removed only with force; then the workspaces are LOST.
func (c *Controller) RemoveRunner(ctx context.Context, id core.RunnerID, force bool) error {
	var lost []core.WorkspaceID
	err := c.store.InTx(ctx, System(), func(tx Tx) error {
		lost = nil
		living, err := tx.RemoveRunner(ctx, id)
		if err != nil || len(living) == 0 {
			return err
		}
		if !force {
			return core.Errorf(core.FailedPrecondition, core.CodeRunnerInUse,
				"runner %s has %d living workspaces; terminate them, or remove it with force: they are lost then", id, len(living))
		}
		ended := make([]EndedWorkspace, len(living))
		for i, w := range living {
			ended[i] = EndedWorkspace{ID: w, To: core.WorkspaceLost, Failure: &Failure{Code: core.CodeRunnerLost, Message: "its runner was removed"}}
		}
		lost = living
		_, err = tx.EndWorkspaces(ctx, ended)
		return err
	})
	if err != nil {
		return err
	}
	c.log.WarnContext(ctx, "runner removed", "runner_id", id, "lost_workspaces", len(lost))
	return nil
}
