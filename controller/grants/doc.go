// Package grants owns what workspaces may reach through the egress proxy: their egress rules, and
// the grants by which they use secrets without having them.
//
// A Manager changes rules and grants in the database, and makes runners have them. Two things hold
// for the whole tree of workspaces. A fork never may reach more than the workspace that it was
// forked from, then or later. A grant that is revoked is gone from all forks that have it by
// descent.
//
// For a runner, the manager puts together a Bundle for each workspace: its rules and its grants of
// this moment, encrypted for the egress process of the runner's host. Run delivers bundles to all
// runners that are not known to have the present ones. Before a secret is disclosed to an egress
// process, the audit log has a record of it. If a secret is not available, the rules are delivered
// without the grants that need it; the hosts of these grants stay reserved for the proxy.
//
// The package knows the database by Store and Tx, and runners by Runners. Secrets come from package
// controller/secretstore, or from a SecretSource such as Vault. It knows no operation and no VM: of
// a workspace it knows the fields of Workspace.
package grants
