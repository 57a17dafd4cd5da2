// Package secretstore owns the secrets that the database keeps, and the certificate authorities of
// projects, whose private keys are such secrets.
//
// A Keeper encrypts each value with a key of its own, and wraps that key with a master key. So the
// database alone reveals nothing. The name of a value is part of its encryption, so a row cannot
// replace another one. When the master key changes, Rewrap wraps all keys again.
//
// A project gets its authority when it first needs one. All guests of the project trust it from
// their start, because a grant may be given to a workspace that already runs. The egress proxy gets
// issuers: intermediate authorities below this one, for the hosts of grants.
//
// The package uses the database through Store and Tx only. It knows nothing of grants and workspaces.
package secretstore
