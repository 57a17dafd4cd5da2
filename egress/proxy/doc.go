// Package proxy carries the outgoing traffic of sandboxes, as far as their policies allow it. It is the only way out of
// a sandbox.
//
// # Who sends
//
// The proxy identifies a sandbox by the listener on which a connection arrived: the runner opened it inside the
// sandbox's network namespace and handed it over. Nothing that is sent over a connection identifies the sender.
//
// There are two listeners. At the explicit one, the guest's programs speak HTTP to a proxy (HTTPS_PROXY): CONNECT and
// requests with absolute targets. At the transparent one, all TCP connections of the guest to any other address arrive,
// because the kernel redirects them. So the same rules hold for programs that know of no proxy.
//
// # Decisions
//
//	spoken    name that counts                                      must be equal to it
//	TLS       SNI of the ClientHello                                the target of CONNECT, if there was one
//	HTTP      Host header                                           the absolute target, the target of CONNECT
//	other     the target of CONNECT, or the address that the resolver gave for a name
//
// The port is that of the connection. A ClientHello without SNI, or with an encrypted one (ECH), is refused. If there
// is a name, the address that a guest connects to means nothing: the proxy resolves the name, checks each address that
// it will dial against [policy.Reach], and dials exactly that.
//
// The rules of a sandbox (policy, grants and held hosts) are one value, which [Server.SetRules] replaces. The decision
// about a flow uses one version of the rules. If the rules change before the flow is among those under way, it is checked against
// the new ones once more; if they change later, SetRules ends it.
//
// net/http parses requests and writes them again, so two parsers never see two requests in the same bytes. TLS is
// passed on unchanged.
//
// # Records
//
// The proxy reports each flow (a tunnel, or a request) to the [Journal] before it sends anything for it, and again when
// it has ended. If the journal cannot take it, the flow is refused. Every record is clipped in one place. Neither the
// journal nor an answer to a guest quotes a host: a fault is a sentence of our own, with its class.
package proxy
