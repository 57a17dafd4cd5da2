// Package ca makes the certificates that let the proxy read what a guest sends to hosts that it has grants for.
//
//	root     of a project, for years. Its key stays with the controller; guests of the project trust it, nobody else does
//	issuer   of a sandbox, for hours. Signs for the hosts of its grants only (critical name constraints, no addresses)
//	leaf     of a host, for two hours at most, in the memory of the proxy
package ca
