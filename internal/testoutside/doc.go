// Package testoutside makes a network beyond this host for tests of what leaves sandboxes: a name server and a web server.
package testoutside
