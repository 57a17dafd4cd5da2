// Package grants owns the egress rules and the grants of workspaces. Egress rules say what a
// workspace may reach through the egress proxy. With a grant it uses a secret without having it.
//
// A Manager changes rules and grants in the database and delivers them to runners. Two things are
// true in the whole tree of workspaces. A fork never may reach more than its parent workspace, when
// it is forked or later. A grant that is revoked from a workspace is also revoked from all forks that
// inherited it.
//
// For each workspace, the manager makes a Bundle for the runner: the present rules and grants,
// encrypted for the egress process of the runner's host. Run delivers bundles to all runners that
// are not known to have the present ones. The manager writes a record into the audit log before it
// discloses a secret to an egress process. If a secret is not available, it delivers the rules
// without the grants that need the secret; the hosts of these grants stay reserved for the proxy.
//
// The package uses the database through Store and Tx, and runners through Runners. Secrets come from
// package controller/secretstore, or from a SecretSource such as Vault. The package knows no
// operations and no VMs, and of a workspace only the fields of Workspace.
package grants
