// Package testoutside makes a network beyond this host, with a name server and a web server, for
// tests of egress traffic.
package testoutside
