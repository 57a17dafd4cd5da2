// Package smallfile reads and writes small files with plain system calls. Package os would execute
// more code around them. Code that runs for the first time in a clone makes a reseal slow without
// hardware virtualization.
package smallfile
