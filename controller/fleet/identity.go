package fleet

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/mtls"
)

// Token lets one runner join once. Only its hash is stored.
type Token struct {
	Hash      [32]byte
	RunnerID  core.RunnerID
	ExpiresAt time.Time
}

// IdentityTx keeps the identities of runners.
type IdentityTx interface {
	// InsertRunnerToken stores a token; QUOTA_EXCEEDED when there are MaxTokens.
	InsertRunnerToken(ctx context.Context, t Token, ttl time.Duration) (Token, error)
	// UseRunnerToken spends a token; JOIN_TOKEN_REFUSED when it is unknown, spent or too old.
	UseRunnerToken(ctx context.Context, hash [32]byte) (Token, error)
	// RunnerHeard returns how long ago a runner last sent a heartbeat, or joined.
	RunnerHeard(ctx context.Context, id core.RunnerID) (time.Duration, error)
	// InsertRunnerIdentity admits a runner. It changes nothing for a runner that is admitted already. It fails with RUNNER_REVOKED if the
	// runner was revoked.
	InsertRunnerIdentity(ctx context.Context, id core.RunnerID) error
	// RunnerIdentity returns nil for an admitted runner. It fails with RUNNER_REVOKED if the runner was revoked, and with RUNNER_NOT_FOUND if
	// the database does not know it.
	RunnerIdentity(ctx context.Context, id core.RunnerID) error
	// RemoveRunner revokes a runner's identity, ends its lease and returns its living workspaces. A runner that the database does not know
	// gets a revoked identity.
	RemoveRunner(ctx context.Context, id core.RunnerID) (living []core.WorkspaceID, known bool, err error)
}

// The life of a join token.
const (
	DefaultJoinTTL = 15 * time.Minute
	MaxJoinTTL     = 24 * time.Hour
)

const joinPrefix = "cpj_"

var errNoTrust = core.Errorf(core.FailedPrecondition, core.CodeUnsupported,
	"this controller takes no runners from elsewhere, as coppice dev does not; run coppice controller and coppice runner")

// MaxTokens bounds the join tokens of a cluster that are open: neither spent nor expired.
const MaxTokens = 10_000

// CreateToken makes a token for a runner to join with: a new one, or, named, one that has lost its certificate. The
// token holds the pin of the authority, so that the runner knows the controller, too.
//
// A key with runner:join is on every host that joins unattended. It cannot make a token for a runner whose certificate may still be valid:
// otherwise everybody with the key could become any runner. Only an administrator may do that.
func (f *Fleet) CreateToken(ctx context.Context, actor model.Key, id core.RunnerID, ttl time.Duration) (string, Token, error) {
	if f.cfg.Trust == nil {
		return "", Token{}, errNoTrust
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
	row, err := read(ctx, f, func(tx Tx) (Token, error) {
		if known {
			if err := f.mayRejoin(ctx, tx, actor, id); err != nil {
				return Token{}, err
			}
		}
		return tx.InsertRunnerToken(ctx, Token{Hash: sha256.Sum256([]byte(token)), RunnerID: id}, min(ttl, MaxJoinTTL))
	})
	return token + "." + f.cfg.Trust.Authority.Pin(), row, err
}

func (f *Fleet) mayRejoin(ctx context.Context, tx IdentityTx, actor model.Key, id core.RunnerID) error {
	if err := tx.RunnerIdentity(ctx, id); err != nil || core.MissingScope(actor.Scopes, core.ScopeAdmin) == "" {
		return err
	}
	heard, err := tx.RunnerHeard(ctx, id)
	if err == nil && heard < f.cfg.CertificateLife {
		err = core.Errorf(core.PermissionDenied, core.CodePermissionDenied,
			"runner %s was heard %s ago and may still have its certificate; until %s have passed, only an administrator's key can make a token for it",
			id, heard.Round(time.Second), f.cfg.CertificateLife)
	}
	return err
}

// Join spends a token and gives its first certificate to the runner that the token names.
func (f *Fleet) Join(ctx context.Context, in runnerapi.Join) (runnerapi.Joined, error) {
	if f.cfg.Trust == nil {
		return runnerapi.Joined{}, errNoTrust
	}
	public, err := mtls.Requested(in.CertificateRequest)
	if err != nil {
		return runnerapi.Joined{}, err
	}
	secret, _, _ := strings.Cut(in.Token, ".")
	row, err := read(ctx, f, func(tx Tx) (Token, error) {
		row, err := tx.UseRunnerToken(ctx, sha256.Sum256([]byte(secret)))
		if err != nil {
			return row, err
		}
		return row, tx.InsertRunnerIdentity(ctx, row.RunnerID)
	})
	if err != nil {
		return runnerapi.Joined{}, err
	}
	der, err := f.cfg.Trust.Authority.Issue(public, mtls.RunnerName(row.RunnerID), f.cfg.CertificateLife)
	if err != nil {
		return runnerapi.Joined{}, err
	}
	f.cfg.Log.InfoContext(ctx, "runner joined", "runner_id", row.RunnerID)
	return runnerapi.Joined{
		RunnerID: row.RunnerID, ClusterID: f.cfg.ClusterID, Certificate: der, Authority: f.cfg.Trust.Authority.Certificate(),
	}, nil
}

// Renew gives a runner, which has shown its certificate, the next one.
func (f *Fleet) Renew(ctx context.Context, id core.RunnerID, in runnerapi.Renew) (runnerapi.Renewed, error) {
	if f.cfg.Trust == nil {
		return runnerapi.Renewed{}, errNoTrust
	}
	public, err := mtls.Requested(in.CertificateRequest)
	if err != nil {
		return runnerapi.Renewed{}, err
	}
	if err := f.CheckIdentity(ctx, id); err != nil {
		return runnerapi.Renewed{}, err
	}
	der, err := f.cfg.Trust.Authority.Issue(public, mtls.RunnerName(id), f.cfg.CertificateLife)
	return runnerapi.Renewed{Certificate: der}, err
}

// CheckIdentity refuses a runner whose certificate is genuine but whose identity was revoked. If the database does not know the identity, a
// failover has lost that the runner joined, because identities are never deleted. The certificate proves that it did, so its identity is
// recorded again.
func (f *Fleet) CheckIdentity(ctx context.Context, id core.RunnerID) error {
	err := f.store.InSystem(ctx, func(tx Tx) error { return tx.RunnerIdentity(ctx, id) })
	if core.CodeOf(err) != core.CodeRunnerNotFound {
		return err
	}
	f.cfg.Log.WarnContext(ctx, "runner is taken in again by its certificate: the database does not know that it has joined", "runner_id", id)
	ctx = request.WithOrigin(ctx, request.Origin{Actor: string(id), Action: "rejoin"})
	return f.store.InSystem(ctx, func(tx Tx) error { return tx.InsertRunnerIdentity(ctx, id) })
}

// Remove revokes a runner's identity. From then on no controller accepts its messages or calls it, and it ends its sandboxes as soon as it learns of this.
// A runner with living workspaces is removed only with force; then the workspaces are LOST. A runner that the database does not know is
// RUNNER_NOT_FOUND, and its certificate is refused from then on, if it has one.
func (f *Fleet) Remove(ctx context.Context, id core.RunnerID, force bool) error {
	if _, err := core.ParseID[core.RunnerID](string(id)); err != nil {
		return err
	}
	var lost []core.WorkspaceID
	var known bool
	err := f.store.InSystem(ctx, func(tx Tx) error {
		lost = nil
		living, there, err := tx.RemoveRunner(ctx, id)
		if known = there; err != nil || len(living) == 0 {
			return err
		}
		if !force {
			return core.Errorf(core.FailedPrecondition, core.CodeRunnerInUse,
				"runner %s has %d living workspaces; terminate them, or remove it with force: they are lost then", id, len(living))
		}
		ended := make([]model.EndedWorkspace, len(living))
		for i, w := range living {
			ended[i] = model.EndedWorkspace{ID: w, To: core.WorkspaceLost, Failure: &model.Failure{Code: core.CodeRunnerLost, Message: "its runner was removed"}}
		}
		lost = living
		_, err = tx.EndWorkspaces(ctx, ended)
		return err
	})
	if err != nil {
		return err
	}
	if !known {
		f.cfg.Log.WarnContext(ctx, "a runner that the database does not know was removed: its certificate is refused", "runner_id", id)
		return core.Errorf(core.NotFound, core.CodeRunnerNotFound, "there is no runner %s; if it has a certificate, it is refused from now on", id)
	}
	f.cfg.Log.WarnContext(ctx, "runner removed", "runner_id", id, "lost_workspaces", len(lost))
	return nil
}
