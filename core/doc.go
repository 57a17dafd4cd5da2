// Package core is the vocabulary of Coppice: ids, digests, states and their legal transitions, errors,
// resources, network identity and the reseal report. It does no I/O and imports nothing of this module but
// the standard library, so that every other package can speak it.
package core
