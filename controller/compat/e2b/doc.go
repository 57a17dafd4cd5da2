// Package e2b lets unmodified clients of E2B use Coppice: their control plane, the daemon that their
// clients expect in each sandbox (envd), and the router to the ports of a sandbox. It owns the
// translation, the access tokens of sandboxes and their metadata.
//
// It is a client of the REST API. Each request becomes requests of sdk/go, which a RoundTripper
// carries to the REST handler in the same process. So keys, scopes, quotas, rates, idempotency and
// the audit log are those of the REST API, and this package has no use case of its own.
//
// # Names
//
//	sandbox id    the 26 characters of a workspace id after "ws_": E2B's clients put it into host names
//	snapshot id   likewise those of a checkpoint id
//	template      the name of an image, or the id or name of a snapshot
//	API key       a Coppice key, or "e2b_" and the hex digits of its bytes
//
// # Tokens
//
// A sandbox has one access token for each API key that created it or connected to it. The token names
// the sandbox and the key, and has a MAC over both. A request with the token acts for the key: it has
// the key's scopes, and it ends when the key ends. The traffic token of a sandbox opens its other
// ports and nothing else.
//
// # Metadata
//
// E2B's metadata has free keys, so it is JSON in labels of the workspace below "e2b/".
package e2b
