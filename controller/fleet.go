package controller

import (
	"context"

	"github.com/coppice-dev/coppice/controller/attestations"
	"github.com/coppice-dev/coppice/controller/cluster"
	"github.com/coppice-dev/coppice/controller/fleet"
	"github.com/coppice-dev/coppice/controller/placement"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/masterkey"
)

// The types of the fleet and of the cluster that the store and callers of the controller use.
type (
	Trust           = cluster.Trust
	Cluster         = cluster.Row
	RunnerToken     = fleet.Token
	HeldSandbox     = fleet.RunnerSandbox
	HeldFilter      = fleet.SandboxFilter
	HeldCheckpoints = fleet.RunnerCheckpoints
	Beaten          = fleet.Order
	BeatTerms       = fleet.Terms
	QuietBeat       = fleet.QuietBeat
	EmptiestFilter  = fleet.EmptiestFilter
	Attestation     = attestations.Attestation
)

// AttestationsKept is how long attestations are kept by default.
const AttestationsKept = attestations.Kept

// MaxRunnerTokens bounds the join tokens of a cluster that are open.
const MaxRunnerTokens = fleet.MaxTokens

// SilentRunner is the reason of a workspace that is lost with its runner.
const SilentRunner = fleet.SilentRunner

// OpenTrust reads a cluster's trust, or makes it in a new database; see cluster.Open.
func OpenTrust(ctx context.Context, store Store, key *masterkey.Key, create func() (*masterkey.Key, error)) (Trust, error) {
	return cluster.Open(ctx, partStore[cluster.Tx]{store, func(tx AllTx) cluster.Tx { return tx }}, key, create)
}

func newFleet(c *Controller) *fleet.Fleet {
	certify := func(id core.RunnerID, request []byte) ([]byte, error) { return c.attestations.Certify(id, request) }
	return fleet.New(fleet.Config{
		ClusterID: c.cfg.ClusterID, Trust: c.cfg.Trust, CertificateLife: c.cfg.CertificateLife,
		Lease: c.cfg.RunnerLease, Fence: c.cfg.RunnerFence, UsageInterval: c.cfg.UsageInterval, DropPause: c.cfg.LoopInterval,
		Certify: certify, Used: c.idle.Add, Go: c.operations.Go, Registries: c.cfg.ImageRegistries, PullRetry: c.cfg.RunnerRetry, Log: c.log,
	}, partStore[fleet.Tx]{c.store.Store, func(tx AllTx) fleet.Tx { return tx }}, c.runners)
}

// Fleet returns the runners of the cluster.
func (c *Controller) Fleet() *fleet.Fleet { return c.fleet }

func newAttestations(c *Controller) *attestations.Keeper {
	return attestations.New(attestations.Config{
		ClusterID: c.cfg.ClusterID, Countersigner: c.countersigner, Kept: c.cfg.AttestationsKept, Log: c.log,
		Ended: func(outcome string) { c.metrics.Attestations.WithLabelValues(outcome).Inc() },
	}, partStore[attestations.Tx]{c.store.Store, func(tx AllTx) attestations.Tx { return tx }})
}

// Attestations returns the signed reports of reseals.
func (c *Controller) Attestations() *attestations.Keeper { return c.attestations }

// place chooses a runner from the fleet that the transaction sees.
func (c *Controller) place(ctx context.Context, tx Tx, req placement.Request) (Runner, error) {
	list, err := c.placeEach(ctx, tx, req, false)
	if err != nil {
		return Runner{}, err
	}
	return list[0], nil
}

// placeEach chooses a runner for each requested sandbox, unless other requests wait for room.
func (c *Controller) placeEach(ctx context.Context, tx Tx, req placement.Request, even bool) ([]Runner, error) {
	if err := c.operations.MayPlace(ctx, req); err != nil {
		return nil, err
	}
	return fleet.Place(ctx, tx, req, even)
}
