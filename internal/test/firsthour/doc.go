// Package firsthour tests what a new user meets in the first hour: the commands of the documents, the messages after mistakes, and
// the tables of the command line, in a terminal of 100 columns, on a real `coppice dev` with VMs.
package firsthour
