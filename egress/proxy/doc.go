// Package proxy carries what sandboxes send out, as far as their policies go. It is the only way out of a sandbox.
//
// # Who is there
//
// A sandbox is known by the listener that a connection arrived on: the runner opened it inside the sandbox's network
// namespace and handed it over. Nothing that is sent over a connection says who sends it.
//
// There are two listeners. At the explicit one the guest's programs speak HTTP to a proxy (HTTPS_PROXY): CONNECT and
// requests with absolute targets. At the transparent one everything arrives that a guest sends to any other address
// over TCP; the kernel has redirected it. Programs that know of no proxy are governed all the same.
//
// # What is decided
//
//	spoken    name that counts                                      must be equal to it
//	TLS       SNI of the ClientHello                                the target of CONNECT, if there was one
//	HTTP      Host header                                           the absolute target, the target of CONNECT
//	other     the target of CONNECT, or the address that the resolver gave for a name
//
// The port is the one that was connected to. A ClientHello without SNI, or with an encrypted one (ECH), is refused.
// Addresses that a guest connects to mean nothing where there is a name: the proxy resolves it, checks what it will
// dial against [policy.Reach], address by address, and dials exactly that.
//
// Requests are parsed and written again by net/http, so two parsers never see two requests in the same bytes. TLS is
// passed on as it is.
//
// # What is kept
//
// Each flow (a tunnel, or a request) is told to the [Journal] before anything is sent for it, and again when it has
// ended. When the journal cannot take it the flow is refused. Every record is clipped in one place. Neither it nor what
// a guest is told quotes a host: a fault is a sentence of our own, with its class.
package proxy
