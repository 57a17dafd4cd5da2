// Package core is the vocabulary of Coppice: ids, digests, states and their legal transitions,
// errors, resources, network identity and the reseal report. It does no I/O and imports only the
// standard library, so every other package can use it.
package core
