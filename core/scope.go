package core

import "slices"

// KeyScope is one right of an API key. What no scope of a key allows is refused.
type KeyScope string

// The scopes. To create is also to change: labels, ports, restores in place.
const (
	ScopeWorkspaceRead    KeyScope = "workspace:read"   // and operations and events
	ScopeWorkspaceCreate  KeyScope = "workspace:create" // from an image or, by a fork, from a checkpoint
	ScopeWorkspaceExec    KeyScope = "workspace:exec"   // whatever reaches into the guest: programs, files, the console
	ScopeWorkspaceDelete  KeyScope = "workspace:delete"
	ScopeCheckpointRead   KeyScope = "checkpoint:read"
	ScopeCheckpointCreate KeyScope = "checkpoint:create"
	ScopeCheckpointDelete KeyScope = "checkpoint:delete"
	ScopeCheckpointImport KeyScope = "checkpoint:import" // from a file, whose device state a VMM reads; only where it is named
	ScopeGrantRead        KeyScope = "grant:read"
	ScopeGrantWrite       KeyScope = "grant:write"      // give a workspace the use of secrets, and take it
	ScopeSecretReference  KeyScope = "secret:reference" // name secrets that are kept elsewhere, by vault_ref; only where it is named
	ScopeFleetRead        KeyScope = "fleet:read"       // images and runners
	ScopeProjectRead      KeyScope = "project:read"
	ScopeKeyRead          KeyScope = "key:read"
	ScopeKeyWrite         KeyScope = "key:write" // make keys that can do no more, and revoke such
	ScopeAuditRead        KeyScope = "audit:read"
	ScopeRunnerJoin       KeyScope = "runner:join" // make tokens with which runners join, for what starts runners unattended; only where it is named
	ScopeAdmin            KeyScope = "admin"       // everything, and all projects with their keys and quotas
)

// ProjectScopes are all that concern one project only.
var ProjectScopes = []KeyScope{
	ScopeWorkspaceRead, ScopeWorkspaceCreate, ScopeWorkspaceExec, ScopeWorkspaceDelete, ScopeCheckpointRead, ScopeCheckpointCreate,
	ScopeCheckpointDelete, ScopeCheckpointImport, ScopeGrantRead, ScopeGrantWrite, ScopeSecretReference, ScopeFleetRead, ScopeProjectRead, ScopeKeyRead, ScopeKeyWrite,
	ScopeAuditRead,
}

// NamedScopes are those that a key has only where they are named: to make a key without a list of scopes does not give them.
var NamedScopes = []KeyScope{ScopeCheckpointImport, ScopeSecretReference}

// Known reports whether it is one of the scopes.
func (s KeyScope) Known() bool {
	return s == ScopeAdmin || s == ScopeRunnerJoin || slices.Contains(ProjectScopes, s)
}

// MissingScope returns the first of the wanted scopes that those held do not give; "" when they give all.
func MissingScope(held []KeyScope, wanted ...KeyScope) KeyScope {
	if slices.Contains(held, ScopeAdmin) {
		return ""
	}
	for _, s := range wanted {
		if !slices.Contains(held, s) {
			return s
		}
	}
	return ""
}
