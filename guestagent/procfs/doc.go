// Package procfs reads the kernel's lists of processes and of listening sockets from a /proc: the
// agent's own, or that of the workload. It changes nothing, except for NormalOOM.
package procfs
