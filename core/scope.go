package core

import "slices"

// KeyScope is one right of an API key. A request that no scope of its key allows is refused.
type KeyScope string

// The scopes. A create scope also allows changes: labels, ports, restores in place.
const (
	ScopeWorkspaceRead    KeyScope = "workspace:read"   // also operations and events
	ScopeWorkspaceCreate  KeyScope = "workspace:create" // from an image or, by a fork, from a checkpoint
	ScopeWorkspaceExec    KeyScope = "workspace:exec"   // everything inside the guest: programs, files, the console
	ScopeWorkspaceDelete  KeyScope = "workspace:delete"
	ScopeCheckpointRead   KeyScope = "checkpoint:read"
	ScopeCheckpointCreate KeyScope = "checkpoint:create"
	ScopeCheckpointDelete KeyScope = "checkpoint:delete"
	ScopeCheckpointImport KeyScope = "checkpoint:import" // from a file, whose device state a VMM reads; given only by name
	ScopeGrantRead        KeyScope = "grant:read"
	ScopeGrantWrite       KeyScope = "grant:write"      // grant a workspace the use of secrets, and revoke grants
	ScopeSecretReference  KeyScope = "secret:reference" // name secrets of external sources, by vault_ref; given only by name
	ScopeFleetRead        KeyScope = "fleet:read"       // images and runners
	ScopeProjectRead      KeyScope = "project:read"
	ScopeKeyRead          KeyScope = "key:read"
	ScopeKeyWrite         KeyScope = "key:write" // make and revoke keys that have no more scopes than this key
	ScopeAuditRead        KeyScope = "audit:read"
	ScopeRunnerJoin       KeyScope = "runner:join" // make join tokens, for programs that start runners unattended; given only by name
	ScopeAdmin            KeyScope = "admin"       // everything, and all projects with their keys and quotas
)

// ProjectScopes are all scopes that concern only one project.
var ProjectScopes = []KeyScope{
	ScopeWorkspaceRead, ScopeWorkspaceCreate, ScopeWorkspaceExec, ScopeWorkspaceDelete, ScopeCheckpointRead, ScopeCheckpointCreate,
	ScopeCheckpointDelete, ScopeCheckpointImport, ScopeGrantRead, ScopeGrantWrite, ScopeSecretReference, ScopeFleetRead, ScopeProjectRead, ScopeKeyRead, ScopeKeyWrite,
	ScopeAuditRead,
}

// NamedScopes are the scopes that a key gets only if the request names them. A key that is made without a list of
// scopes does not have them.
var NamedScopes = []KeyScope{ScopeCheckpointImport, ScopeSecretReference}

// Known reports whether this is one of the scopes.
func (s KeyScope) Known() bool {
	return s == ScopeAdmin || s == ScopeRunnerJoin || slices.Contains(ProjectScopes, s)
}

// MissingScope returns the first wanted scope that the held scopes do not include; "" if they include all.
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
