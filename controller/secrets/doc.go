// Package secrets reads the secrets of grants that are not in the database: from HashiCorp Vault
// and, in development, from the controller's own environment. A Mux chooses by the scheme of a
// reference:
//
//	vault://<mount>/<path>#<field>
//	env://COPPICE_SECRET_<NAME>
//
// No error contains a value, a token or text from Vault. Everything is safe for concurrent use.
package secrets
