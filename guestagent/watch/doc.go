// Package watch reports changes of directories of the workload, by inotify. A watch is part of the
// memory of the guest: it goes on after a checkpoint, and a fork has its own, with the events that
// nobody has read. Directories are watched with the rights of the user who asked.
package watch
