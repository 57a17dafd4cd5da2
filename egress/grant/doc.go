// Package grant decides where a secret may be used. It does no network I/O.
//
// A guest never has a secret. It has a placeholder, which is worthless anywhere else. The proxy replaces it with the
// secret in one header of requests, only to the hosts, with the methods and below the paths of the grant ([Set.Use]). A
// placeholder anywhere else ([Scanner]) ends the request. Placeholders belong to one sandbox and one epoch: a
// placeholder that a fork finds in its memory is its parent's and does not work.
// Secrets reach the proxy encrypted for a key that the proxy itself has made ([Encrypt], [Keys]), so
// the parts that carry them cannot read them.
package grant
