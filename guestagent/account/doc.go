// Package account finds users and groups of the workload, in its /etc/passwd and /etc/group. Its
// functions are called inside the workload. It changes no identity.
package account
