// Package grant decides where a secret may be used. It knows no network.
//
// A guest never has a secret. It has a placeholder, which is worth nothing outside: the proxy puts the secret in its place in one header of
// requests to the hosts, with the methods and below the paths, that the grant is for ([Set.Use]). A placeholder anywhere else ([Scanner]) ends
// the request. Placeholders are of one sandbox and one epoch; what a fork finds in its memory is its parent's, and dead.
//
// Secrets come to the proxy sealed for a key that it has made itself ([Seal], [Keys]), so that what carries them cannot read them.
package grant
