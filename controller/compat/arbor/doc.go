// Package arbor lets the calls of Arbor's README and API reference work against Coppice. It owns the
// translation between Arbor's API and Coppice's.
//
// It is a client of the REST API. Each request becomes requests of the REST API, which is a handler of
// the same process. So keys, scopes, quotas, rates and the audit log are those of the REST API, and this
// package has no use case of its own.
//
// # Answers
//
// An answer to GET has all fields of Coppice and the fields of Arbor. If both have a field, Arbor's is
// there. Where Arbor answers before the work is done, with 202 and an operation, so does this layer. It
// refuses a field that Coppice does not have, and names it. Errors have Arbor's form; details.coppice_code has the code of Coppice.
//
// # Keys
//
// Arbor has no authentication. A layer with a key of its own uses it for requests without one. Then it
// answers only requests that come from this host, for this host, and not from a web page. A client can
// give a key as a bearer token or as the password of its URL.
//
// # Content types
//
// `curl -d` sends JSON as a form, and Arbor's README relies on that. So every content type is taken. A
// web page could send such a request without asking. So a layer that needs no key refuses requests that
// look like those of a browser.
package arbor
