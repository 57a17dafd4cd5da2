// Package confine runs a task in a confined helper: a separate process that can harm nobody while
// it parses what a tenant supplied. The helper is this program, executed again. See ADR 40.
//
// A helper has its own user id, no capabilities and an empty bounding set, no_new_privs, and a
// seccomp filter that allows what a Go program needs to compute and to read open files. It has
// limits of memory, CPU time, threads and descriptors, its own namespaces (mounts, processes,
// network, IPC, host name, control groups), an empty root directory, an empty environment, and a
// deadline. It gets a request and open files. It sends answers, which are bounded in bytes and in
// count.
//
// The caller survives whatever the helper does. Too much memory, CPU time, time or output, a crash
// and a panic each give the caller an error: LimitError or CrashError. The caller trusts no answer:
// it must check every value.
//
// A program that starts helpers calls Enter first, in main, or in TestMain.
package confine
