// Package policy decides what a sandbox may reach. It is pure: it uses no clock, no network and no sandbox.
//
// A policy is a list of rules. Everything that no rule names is denied. A rule is text, in an API request as in the
// database:
//
//	api.example.com          that name, at ports 80 and 443
//	*.example.com            every name below it, not example.com itself
//	example.com:8443         that port only
//	203.0.113.7:443          an address; without such a rule addresses are denied, whatever a name resolves to
//	tcp://db.example.com:5432  anything over TCP, not only TLS and HTTP; the name is exact and there is a port
//	bundle:python            the hosts that a package manager or a forge needs, see [Bundles]
//
// # Names
//
// [ParseHost] examines a host once and gives it in one form: lower case, without the final dot, in the ASCII form of
// IDNA. A text that can be read in two ways (127.1, 0x7f000001, a name that ends in a number, anything with a percent
// sign, an at sign or a control character) is not a host. All later code compares these forms, byte by byte; a suffix
// rule compares whole labels.
//
// # Addresses
//
// An allowed name may still resolve to any address. [Reach] says which addresses may be dialled. It is asked for the
// exact address that is about to be dialled, never for a name.
package policy
