// Package arrakis lets unmodified clients of Arrakis use Coppice: py-arrakis, arrakis-mcp-server, and
// others that speak Arrakis' REST API. It owns the translation between that API and Coppice's.
//
// It is a client of the REST API. Each request becomes requests of sdk/go, which a RoundTripper carries
// to the REST handler in the same process. So keys, scopes, quotas, rates and the audit log are those of
// the REST API, and this package has no use case of its own.
//
// # Names
//
// Arrakis' clients choose the names of VMs and the ids of snapshots. A VM is a workspace, and a snapshot
// is a checkpoint. If the name can be that of a workspace, it is; otherwise the workspace has a name that
// is made from a hash. The label arrakis/name has the name that the client gave. This layer sees only
// workspaces with this label.
//
// # Keys
//
// Arrakis has no authentication. A layer with a key of its own uses it for requests without one. Then it
// answers only requests that come from this host, for this host, and not from a web page. A client can
// give a key as the password of its URL.
package arrakis
