// Package files serves the files of the workload to a host: reading, writing, listing, moving and
// removing them, and archives of trees. Work that a request does as a user happens on a thread that
// has this user's identity and no capability, so the kernel checks every step of every path. Links
// that the workload changes meanwhile therefore lead nowhere that the user could not go.
package files
