// Package mark makes marks of a guest: two marks are equal only if nothing that outlives a command
// has changed between them. A mark covers the disk, the files in memory, the mounts and the objects
// of System V IPC. It does not read the memory of processes, so there is no mark while a program of
// the workload runs.
package mark
