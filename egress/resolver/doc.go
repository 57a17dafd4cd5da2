// Package resolver answers the DNS questions of sandboxes, without asking anybody where rules say
// what a sandbox may reach.
//
// A name that the sandbox's policy allows has an address, made from the name itself ([Address]);
// any other name does not exist. No question of a guest reaches a name server, so a guest cannot
// send data in the labels of a name. When the egress proxy connects, it looks up the name that it
// has decided on by itself.
//
// An address stands for its name wherever it is used, in every sandbox, before and after a fork. It
// means nothing outside: a connection to it arrives at the proxy, which uses the names in TLS and
// HTTP, and for other protocols [Host].
//
// A sandbox that may reach everything gets real answers instead: its resolver asks the name servers
// of the host ([Config].Servers). The guest cannot ask these itself where they have a private
// address. Of a guest's message only the question goes on.
package resolver
