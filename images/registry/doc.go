// Package registry fetches images from registries into the layers of an image store. It unpacks
// nothing: it leaves compressed layers, each compared with its digest, and what the image says about
// its programs.
//
// # Who is trusted
//
// The operator is: the registry of the reference, the mirrors, and the hosts that are named for it.
// The registry and everything it sends are not. Every answer is bounded in bytes, every list in
// count, and every wait in time. A host that only the registry names, by a redirect or as its token
// server, is reached at public addresses only, over TLS. Nothing counts before its digest was
// compared.
//
// # Continuing
//
// Parts of a layer stay in the store. The next attempt, of this process or of another, asks for the
// rest. A layer that is there is not fetched again, for whichever image.
package registry
