// Package secretstore owns the secrets that the database keeps, and the certificate authorities of
// projects, whose private keys are such secrets.
//
// A Keeper encrypts each value with a key of its own and has a master key wrap that key, so that the
// database alone reveals nothing. The name of a value is part of its encryption: a row is of no use
// in the place of another one. When the master key changes, Rewrap wraps all keys again.
//
// A project gets its authority when it first needs one. All guests of the project trust it from
// their start, because a grant may be given to a workspace that already runs. The egress proxy gets
// issuers below it for the hosts of grants.
//
// The package knows the database by Store and Tx only. It knows nothing of grants and workspaces.
package secretstore
