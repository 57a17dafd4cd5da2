// Package mark makes marks of a guest. Two marks are equal only if nothing that a mark covers has
// changed between them: the disk, the files in memory and the mounts. The memory of processes and
// the objects of System V IPC are not read, so there is no mark while a program of the workload
// runs or while there are such objects. Other state of the kernel, such as sysctl values and POSIX
// message queues, is not covered.
package mark
