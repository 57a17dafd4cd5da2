package sessions

import (
	"context"
	"encoding/pem"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/mtls"
	"github.com/coppice-dev/coppice/internal/pass"
)

// filesTTL is how long a pass for files is valid.
const filesTTL = 5 * time.Minute

// Way says how a user reaches a stream or files: directly at the runner with a pass, or, if the URL is empty, through this
// controller.
type Way struct {
	URL        string
	Token      string
	ExpiresAt  time.Time
	Authority  string // in PEM, the only one to trust there; empty: the authorities of the user's system
	ServerName string // to be expected with Authority
}

// AttachWay gives a token that lets its bearer attach to a session once, soon. direct prefers the runner's data plane.
func (k *Keeper) AttachWay(ctx context.Context, project core.ProjectID, id core.SessionID, direct bool) (Way, error) {
	if direct && k.cfg.Passes != nil {
		row, w, err := k.ReachSession(ctx, project, id)
		if err != nil {
			return Way{}, err
		}
		way, err := k.sign(ctx, w, pass.Claims{Scope: pass.Attach, Session: row.GuestID}, runnerapi.PathDataAttach, attachTTL)
		if err != nil || way.URL != "" {
			return way, err
		}
	}
	token, expires, err := k.Attach(ctx, project, id)
	return Way{Token: token, ExpiresAt: expires}, err
}

// FilesWay gives a pass for the files of a workspace.
func (k *Keeper) FilesWay(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (Way, error) {
	w, err := k.cfg.Reach(ctx, project, id)
	if err != nil {
		return Way{}, err
	}
	return k.sign(ctx, w, pass.Claims{Scope: pass.Files}, runnerapi.PathDataFiles, filesTTL)
}

// sign makes a pass for the present sandbox of a workspace. It makes none if the runner has no data plane.
func (k *Keeper) sign(ctx context.Context, w model.Workspace, claims pass.Claims, path string, life time.Duration) (Way, error) {
	if k.cfg.Passes == nil {
		return Way{}, nil
	}
	runner, err := inProject(ctx, k.store, w.ProjectID, func(tx Tx) (model.Runner, error) { return tx.Runner(ctx, w.Sandbox.RunnerID) })
	if err != nil || runner.DataURL == "" {
		return Way{}, err
	}
	claims.Runner, claims.Project, claims.Workspace = runner.Info.RunnerID, w.ProjectID, w.ID
	claims.Sandbox, claims.Epoch = w.Sandbox.ID, w.Sandbox.Epoch
	key := request.KeyOf(ctx)
	claims.Key, claims.KeyEnds = key.ID, key.ExpiresAt
	token, signed, err := k.cfg.Passes.Sign(claims, life)
	if err != nil {
		return Way{}, err
	}
	way := Way{URL: runner.DataURL + path, Token: token, ExpiresAt: signed.ExpiresAt}
	if runner.DataOwnCert {
		way.ServerName = mtls.RunnerName(runner.Info.RunnerID)
		way.Authority = string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: k.cfg.Authority}))
	}
	return way, nil
}
