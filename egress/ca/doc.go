// Package ca makes the certificates that the proxy needs to read a guest's traffic to hosts with grants.
//
//	root     of a project, for years. The controller keeps its key; only guests of the project trust it
//	issuer   of a sandbox, for hours. It signs only for the hosts of its grants (critical name constraints, no addresses)
//	leaf     of a host, for two hours at most, in the memory of the proxy
package ca
