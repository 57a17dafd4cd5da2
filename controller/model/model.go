// Package model has the rows of the control plane as its packages share them: projects, keys,
// workspaces and their sandboxes, checkpoints, sessions, runners. It has values only: no query, no
// call and no rule about who may change what. Each package that works on rows declares the queries
// that it needs with these types.
package model

import (
	"time"

	"github.com/coppice-dev/coppice/core"
)

// SystemProject owns what the operator publishes to all projects: templates, images, runners.
const SystemProject = core.SystemProject

// Scope says for which project a transaction works. The database enforces it: the transaction does not see rows of other projects.
type Scope struct{ name string }

// InProject is the scope of one tenant.
func InProject(id core.ProjectID) Scope { return Scope{string(id)} }

// System is the scope of the controller's own work, which sees every project.
func System() Scope { return Scope{"system"} }

// String gives the value of the database setting that carries the scope.
func (s Scope) String() string { return s.name }

// MaxLabels bounds the labels of one object.
const MaxLabels = 64

// Project is a tenant.
type Project struct {
	ID        core.ProjectID
	Name      string
	Quotas    Quotas
	CreatedAt time.Time

	Encryption Encryption // of data that is stored from now on
	KeyVersion int64      // of its newest key; 0: it has none
}

// Key is an API key. The secret itself is kept nowhere.
type Key struct {
	ID         core.KeyID
	ProjectID  core.ProjectID
	Name       string
	Prefix     string
	Hash       [32]byte // SHA-256 of the secret
	Scopes     []core.KeyScope
	Parent     core.KeyID // that made it
	CreatedAt  time.Time
	LastUsedAt time.Time // to within seconds; zero: never
	ExpiresAt  time.Time // zero: never
	RevokedAt  time.Time // zero: valid
}

// Encryption says how a project's checkpoints are stored.
type Encryption string

// How a project's checkpoints are stored.
const (
	EncryptionNone     Encryption = "none"
	EncryptionEnvelope Encryption = "envelope" // with keys of the project, which a master key wraps
)

// Quotas are the limits of a project.
type Quotas struct {
	Version         int64
	Workspaces      int64 // that have not ended
	ForksInFlight   int64 // workspaces that are being made or restored
	Checkpoints     int64 // that are not deleted
	CheckpointBytes int64 // a capture is admitted while less than that is stored
	Depth           int64 // generations below a root
	Children        int64 // checkpoints directly below one
	Keys            int64 // that are valid
	Ports           int64 // that are forwarded
	AllowAll        AllowAll
}

// AllowAll says whether sandboxes of a project may have the egress policy allow-all. Under this policy no proxy is between them and the
// network.
type AllowAll string

// The values.
const (
	AllowAllDefault AllowAll = "default" // as the controllers' operator says
	AllowAllAllowed AllowAll = "allowed"
	AllowAllDenied  AllowAll = "denied"
)

// Page bounds a list: at most Limit rows after the one named After.
type Page struct {
	After string
	Limit int
}
