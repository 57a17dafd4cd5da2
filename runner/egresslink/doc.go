// Package egresslink is the connection of a runner to the egress process of its host. That process
// proxies the traffic that the rules of sandboxes under deny-all allow. The link keeps the process
// running, gives it the sockets and the rules of the sandboxes, and gives them to its successor
// when it ends. It also compares the network rules in the kernel with what they should be.
//
// The link sees only sandboxes that their runner gave to it (Sandbox.Serve, Sandbox.Adopt). A
// sandbox that is still being made is none of these.
package egresslink
