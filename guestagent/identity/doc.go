// Package identity covers the files of an image that hold a machine's identity (machine id, host
// name, hosts, name servers, boot id), so that a reseal can change them. It writes what it is given,
// and makes no identity.
package identity
