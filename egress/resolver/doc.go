// Package resolver answers the questions that sandboxes ask for names, without asking anybody.
//
// A name that the sandbox's policy allows has an address, made of the name itself ([Address]); any other name does not
// exist. No question of a guest reaches a name server: what a guest would tell somebody in the labels of a name stays
// here. The egress proxy looks names up when it connects, by itself, for the names that it has decided on.
//
// An address stands for its name wherever it is used, in every sandbox, before and after a fork, and means nothing
// outside: a connection to it arrives at the proxy, which goes by the names in TLS and HTTP, and for other protocols
// by [Host].
package resolver
