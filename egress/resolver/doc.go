// Package resolver answers the DNS questions of sandboxes without asking anybody.
//
// A name that the sandbox's policy allows has an address, made from the name itself ([Address]);
// any other name does not exist. No question of a guest reaches a name server, so a guest cannot
// send data in the labels of a name. When the egress proxy connects, it looks up the name that it
// has decided on by itself.
//
// An address stands for its name wherever it is used, in every sandbox, before and after a fork. It
// means nothing outside: a connection to it arrives at the proxy, which uses the names in TLS and
// HTTP, and for other protocols [Host].
package resolver
