// Package workload holds the processes of a sandbox's user: their cgroup, which it freezes and
// thaws, and their namespaces, in which it starts programs and works on files. The first process of
// these namespaces is a mode of the agent's own binary (RunInit). The package knows no session and no
// request.
package workload
